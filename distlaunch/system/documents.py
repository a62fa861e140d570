"""The documents in job files. One that was read before is known, without YAML, whose import takes a while."""

import marshal
import sys
from typing import Any

from distlaunch.job.document import Entries, Items, Place, Scalar, Value
from distlaunch.packed import state_of
from distlaunch.system import cache

MOST = 1 << 16
"""Characters of a text that is worth knowing; a longer one takes longer to read than YAML to import."""


def parse(text: str, source: str) -> Value:
    """The document in `text`, which is from `source`. Raises `JobError` naming the place of a mistake."""
    file = cache.file_for("read", repr((text, source)))
    key = (*_reader(), text, source)
    if (known := _known(file, key)) is not None:
        return _value(known, source)
    from distlaunch.system.yaml_document import parsed

    document = parsed(text, source)
    if len(text) <= MOST:
        cache.keep(file, marshal.dumps((key, _plain(document))))
    return document


def _reader() -> tuple[Any, ...]:
    """What tells one version of what reads them from another."""
    here = __file__.replace("documents.py", "yaml_document.py")
    return sys.version, *state_of(here)


def _known(file: str, key: tuple[Any, ...]) -> Any:
    """The document that was kept, if that is of this very text."""
    try:
        with open(file, "rb") as kept:
            known, document = marshal.loads(kept.read())  # noqa: S302 (as each .pyc is)
    except (OSError, ValueError, EOFError, TypeError):
        return None
    return document if known == key else None


def _plain(value: Value) -> Any:
    """A document as marshal has it: each value with its line and column."""
    at = value.place[1:3]
    match value:
        case Items(items=items):
            return at, [_plain(item) for item in items]
        case Entries(entries=entries):
            return at, {str(key.value): (key.place[1:3], _plain(inner)) for key, inner in entries}
        case Scalar():
            return at, value.value, value.text


def _value(plain: Any, source: str) -> Value:
    (line, column), value, *text = plain
    place = Place(source, line, column)
    if text:
        return Scalar(value, place, *text)
    if isinstance(value, list):
        return Items(tuple(_value(item, source) for item in value), place)
    entries = ((Scalar(key, Place(source, *at)), _value(inner, source)) for key, (at, inner) in value.items())
    return Entries(tuple(entries), place)
