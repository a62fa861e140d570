"""A type for what another program reads: a mapping of anything that YAML can say."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from distlaunch.errors import Problem
from distlaunch.job.document import Entries, Items, Scalar, Value, is_unset
from distlaunch.job.types.values import Schema, Text, refuse

_TEXT = Text("text without NUL", r"[^\0]*")


class Tree(NamedTuple):
    """A mapping of any depth; becomes dicts, lists and scalars."""

    name: str = "a mapping"

    def check(self, value: Value, path: str, problems: list[Problem]) -> dict[str, Any] | None:
        """The mapping."""
        if not isinstance(value, Entries):
            refuse(self, value, path, problems)
            return None
        for place, scalar in _scalars(value, path):
            if "\0" in str(scalar.value):
                refuse(_TEXT, scalar, place, problems)
        return {key: _plain(entry) for key, _, entry in value.walk() if not is_unset(entry)}

    def schema(self) -> Schema:
        """JSON Schema."""
        return {"type": "object"}


def _scalars(value: Value, path: str) -> Iterator[tuple[str, Scalar]]:
    """Each value that is not made of others, with its path."""
    match value:
        case Scalar():
            yield path, value
        case Items():
            for i, item in enumerate(value.items):
                yield from _scalars(item, f"{path}[{i}]")
        case Entries():
            for key, _, entry in value.walk():
                yield from _scalars(entry, f"{path}.{key}")


def _plain(value: Value) -> Any:
    match value:
        case Scalar():
            return value.value
        case Items():
            return [_plain(item) for item in value.items]
        case Entries():
            return {key: _plain(entry) for key, _, entry in value.walk() if not is_unset(entry)}
