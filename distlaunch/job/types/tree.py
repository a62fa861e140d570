"""A type for what another program reads: a mapping of anything that YAML can say."""

from typing import Any, NamedTuple

from distlaunch.errors import Problem
from distlaunch.job.document import Entries, Items, Scalar, Value, is_unset
from distlaunch.job.types.values import Schema, refuse


class Tree(NamedTuple):
    """A mapping of any depth; becomes dicts, lists and scalars."""

    name: str = "a mapping"

    def check(self, value: Value, path: str, problems: list[Problem]) -> dict[str, Any] | None:
        """The mapping."""
        if not isinstance(value, Entries):
            refuse(self, value, path, problems)
            return None
        return {key: _plain(entry) for key, _, entry in value.walk() if not is_unset(entry)}

    def schema(self) -> Schema:
        """JSON Schema."""
        return {"type": "object"}


def _plain(value: Value) -> Any:
    match value:
        case Scalar():
            return value.value
        case Items():
            return [_plain(item) for item in value.items]
        case Entries():
            return {key: _plain(entry) for key, _, entry in value.walk() if not is_unset(entry)}
