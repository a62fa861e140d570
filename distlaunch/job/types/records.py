"""Types of lists and mappings, and records: declarations of keys."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distlaunch.errors import Problem
from distlaunch.job.document import Entries, Items, Place, Scalar, Value, describe, is_unset
from distlaunch.job.types.hints import colon_hint, list_hint, nearest, quote_hint, records_hint
from distlaunch.job.types.values import Schema, Type, duration_text, in_words, names_of, refuse


class ListOf(NamedTuple):
    """A list of one type; becomes a tuple."""

    item: Type
    least: int = 0

    @property
    def name(self) -> str:
        """What is expected."""
        return "a non-empty list" if self.least else "a list"

    def check(self, value: Value, path: str, problems: list[Problem]) -> tuple[Any, ...] | None:
        """The items."""
        if not isinstance(value, Items) or len(value.items) < self.least:
            refuse(self, value, path, problems, self.hint(value, path))
            return None
        return tuple(self.item.check(item, f"{path}[{i}]", problems) for i, item in enumerate(value.items))

    def hint(self, value: Value, path: str) -> str:
        """How to write the value as a list."""
        record = self.item.entries if isinstance(self.item, Either) else None
        if isinstance(value, Entries) and value.entries and isinstance(record, Record):
            return records_hint(value, {*record.fields, *record.foreign}, record.required[0])
        return list_hint(value, path, self.item.name, self.item.check)

    def schema(self) -> Schema:
        """JSON Schema."""
        return {"type": "array", "items": self.item.schema(), "minItems": self.least}


class MapOf(NamedTuple):
    """A mapping from names that match `pattern` to one type; null stays None where it has a meaning."""

    item: Type
    pattern: str
    key_name: str
    name: str = "a mapping"
    nulls: bool = True

    def check(self, value: Value, path: str, problems: list[Problem]) -> dict[str, Any] | None:
        """The entries."""
        if not isinstance(value, Entries):
            _refuse_mapping(self, value, path, problems)
            return None
        checked = {}
        for key, at, entry in value.walk():
            if is_unset(entry):
                continue
            if not re.fullmatch(self.pattern, key):
                wrong = colon_hint(key, at.place) or f"expected {self.key_name}, got {describe(at)}"
                problems.append(at.place.problem(f"{path}.{key}", wrong))
            null = self.nulls and isinstance(entry, Scalar) and entry.value is None
            checked[key] = None if null else self.item.check(entry, f"{path}.{key}", problems)
        return checked

    def schema(self) -> Schema:
        """JSON Schema."""
        item = self.item.schema()
        if self.nulls:
            item = {"anyOf": [item, {"type": "null"}]}
        return {
            "type": "object",
            "propertyNames": {"pattern": f"^{self.pattern}$"},
            "additionalProperties": item,
        }


class Either(NamedTuple):
    """One of several types, chosen by the kind of the value: a number, a word, a list or a mapping."""

    number: Type | None = None
    text: Type | None = None
    items: Type | None = None
    entries: Type | None = None

    @property
    def _types(self) -> list[Type]:
        return [kind for kind in (self.number, self.text, self.items, self.entries) if kind]

    @property
    def name(self) -> str:
        """What is expected."""
        return in_words([name for kind in self._types for name in names_of(kind)])

    def _choose(self, value: Value) -> Type | None:
        match value:
            case Items():
                return self.items
            case Entries():
                return self.entries
            case Scalar(value=bool()):
                return None
            case Scalar(value=int() | float()):
                return self.number
            case Scalar(value=str() | None):
                return self.text
        return None

    def check(self, value: Value, path: str, problems: list[Problem]) -> Any:
        """What the chosen type makes of it."""
        chosen = self._choose(value)
        if chosen is None or isinstance(value, Scalar):
            trial: list[Problem] = []
            checked = chosen.check(value, path, trial) if chosen else None
            if chosen is None or trial:
                hinted = any("did you mean" in problem.text for problem in trial)
                hint = "" if hinted else self._hint(value, path)
                problems.extend(trial) if hinted else refuse(self, value, path, problems, hint)
            return checked
        return chosen.check(value, path, problems)

    def _hint(self, value: Value, path: str) -> str:
        if self.text and not (isinstance(value, Entries) and isinstance(self.items, ListOf)):
            return quote_hint(value, path, self.text.check)
        return self.items.hint(value, path) if isinstance(self.items, ListOf) else ""

    def schema(self) -> Schema:
        """JSON Schema."""
        return {"anyOf": [kind.schema() for kind in self._types]}


class Field(NamedTuple):
    """One key of a record: its type, a line of explanation, and where its value goes.

    That is the `field` of what the record makes, None = the one named like the key; its default there is the
    key's. `told` is a default in words, or what to add to the value.
    """

    kind: Type
    doc: str
    told: str = ""
    field: str | None = None
    default: Any = None


BUILT = ""
"""The field of a key that is none as it stands."""


def built(kind: Type, doc: str, told: str = "", default: Any = None) -> Field:
    """A key that job/build.py makes something of; `default` stands for it where it is not given."""
    return Field(kind, doc, told, BUILT, default)


class Record(NamedTuple):
    """A mapping with known keys; becomes a dict of those that were given.

    `makes` is the frozen type whose fields they are: that of the record around it, for some of its fields.
    `foreign` maps names that other tools use to ours.
    """

    fields: Mapping[str, Field]
    makes: Any = None
    foreign: Mapping[str, str] = {}
    required: Sequence[str] = ()
    name: str = "a mapping"

    def check(self, value: Value, path: str, problems: list[Problem]) -> dict[str, Any] | None:
        """The keys that were given, checked."""
        if not isinstance(value, Entries):
            _refuse_mapping(self, value, path, problems)
            return None
        checked = {}
        for key, at, entry in value.walk():
            inner = f"{path}.{key}" if path else key
            if key not in self.fields:
                problems.append(self._unknown(key, at.place, inner, entry))
            elif not is_unset(entry):
                checked[key] = self.fields[key].kind.check(entry, inner, problems)
        renamed = {self.foreign.get(key, key.partition(":")[0]) for key, _, _ in value.walk()}
        missing = [key for key in self.required if value.get(key) is None and key not in renamed]
        problems.extend(value.place.problem(path, f"{key} is missing") for key in missing)
        return checked

    def _unknown(self, key: str, place: Place, path: str, entry: Value) -> Problem:
        section, _, inner = self.foreign.get(key, "").partition(".")
        if inner and isinstance(entry, Entries):  # its keys are those of the section
            return place.problem(path, f"unknown key; did you mean {section}?")
        if hint := colon_hint(key, place):
            return place.problem(path, hint)
        if key in self.foreign:
            return place.problem(path, f"unknown key; use {self.foreign[key]}")
        close = nearest(key, self.fields)
        hint = f"did you mean {close}?" if close else f"known keys: {', '.join(self.fields)}"
        return place.problem(path, f"unknown key; {hint}")

    def schema(self) -> Schema:
        """JSON Schema."""
        properties = {
            key: {**entry.kind.schema(), "description": self._described(key)}
            for key, entry in self.fields.items()
        }
        required = {"required": list(self.required)} if self.required else {}
        return {"type": "object", "additionalProperties": False, "properties": properties, **required}

    def _described(self, key: str) -> str:
        default = self.default_text(key)
        return f"{self.fields[key].doc} Default: {default}." if default else self.fields[key].doc

    def fields_of(self, checked: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of what is made of the keys that were given, but those of `built` keys."""
        made: dict[str, Any] = {}
        for key, value in checked.items():
            entry = self.fields[key]
            if isinstance(entry.kind, Record) and entry.kind.makes is self.makes:
                made |= entry.kind.fields_of(value)
            elif entry.field != BUILT:
                made[entry.field or key] = entry.kind.made(value) if isinstance(entry.kind, Record) else value
        return made

    def made(self, checked: Mapping[str, Any]) -> Any:
        """What is made of the keys that were given; no key may be a `built` one."""
        return self.makes(**self.fields_of(checked))

    def value(self, checked: Mapping[str, Any], key: str) -> Any:
        """What was given for a key, or its default."""
        return checked[key] if key in checked else self.default(key)

    def default(self, key: str) -> Any:
        """What a key is where it is not given, None where that is decided elsewhere."""
        entry = self.fields[key]
        known = {} if entry.field == BUILT else getattr(self.makes, "_field_defaults", {})
        return known.get(entry.field or key, entry.default)

    def default_text(self, key: str) -> str:
        """How the default reads."""
        entry = self.fields[key]
        return _written(entry.kind, self.default(key)) + entry.told


class Short(NamedTuple):
    """A record, or just the value of its most important `key`."""

    record: Record
    key: str

    @property
    def name(self) -> str:
        """What is expected."""
        return in_words([self.record.fields[self.key].kind.name, self.record.name])

    def check(self, value: Value, path: str, problems: list[Problem]) -> dict[str, Any] | None:
        """The keys that were given, checked."""
        if isinstance(value, Scalar) and isinstance(value.value, int):
            value = Entries(((Scalar(self.key, value.place), value),), value.place)
        if not isinstance(value, Entries):
            _refuse_mapping(self, value, path, problems)
            return None
        return self.record.check(value, path, problems)

    def schema(self) -> Schema:
        """JSON Schema."""
        return {"anyOf": [self.record.fields[self.key].kind.schema(), self.record.schema()]}


def _refuse_mapping(kind: Type, value: Value, path: str, problems: list[Problem]) -> None:
    text = value.value if isinstance(value, Scalar) and isinstance(value.value, str) else ""
    hint = colon_hint(text, value.place)
    refuse(kind, value, path, problems, hint and f"; {hint}")


def _written(kind: Type, value: Any) -> str:
    """How a job file has a value of that type; "" where it is none, or no word can stand for it."""
    trial: list[Problem] = []
    word = Scalar("none", Place(""))
    if value is None:
        return "none" if kind.check(word, "", trial) is None and not trial else ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return duration_text(value)
    return str(value) if isinstance(value, int | str) else ""
