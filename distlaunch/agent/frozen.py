"""What typing.NamedTuple is, for the price of a plain class.

A hundred types are made at every start, at 50 µs each by NamedTuple and 8 by this; and on a node its import
alone would cost 10 ms. To mypy they are one and the same.
"""

__all__ = ["Frozen"]
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple as Frozen
else:
    try:
        from _collections import _tuplegetter as field
    except ImportError:
        from operator import itemgetter

        def field(position, doc):
            """The attribute of that position."""
            return property(itemgetter(position), doc=doc)

    class Frozen(tuple):
        """A tuple whose items have the names, and defaults, that the class body gives."""

        __slots__ = ()

        def __init_subclass__(cls):
            cls._fields = tuple(getattr(cls, "__annotations__", ()))
            cls._field_defaults = {name: cls.__dict__[name] for name in cls._fields if name in cls.__dict__}
            for position, name in enumerate(cls._fields):
                setattr(cls, name, field(position, None))

        def __new__(cls, *values, **named):
            """By position or by name."""
            if len(values) == len(cls._fields) and not named:
                return tuple.__new__(cls, values)
            rest = cls._fields[len(values) :]
            given = {**cls._field_defaults, **named}
            if len(values) > len(cls._fields) or not set(named) <= set(rest) <= set(given):
                raise TypeError("%s has the fields %s" % (cls.__name__, ", ".join(cls._fields)))
            return tuple.__new__(cls, (*values, *[given[name] for name in rest]))

        def __getnewargs__(self):
            return tuple(self)

        def __repr__(self):
            pairs = zip(self._fields, self)
            return "%s(%s)" % (type(self).__name__, ", ".join("%s=%r" % pair for pair in pairs))

        def _asdict(self):
            return dict(zip(self._fields, self))

        def _replace(self, **changes):
            return type(self)(**{**self._asdict(), **changes})
