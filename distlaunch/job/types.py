"""Types of job-file fields: each checks a value with its place and knows its JSON schema.

Our own and small, since msgspec and pydantic know no line numbers, msgspec stops at the first error,
and they would add 34 and 73 ms to every launch.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from distlaunch.errors import Problem
from distlaunch.job.document import (
    Entries,
    Items,
    Place,
    Scalar,
    Value,
    as_list,
    describe,
    in_quotes,
    is_unset,
    setting,
    words_of,
)

Schema = dict[str, Any]


class Type(Protocol):
    """Checks a value: returns it converted, or adds to `problems` and returns None."""

    @property
    def name(self) -> str:
        """How an error message calls what is expected."""

    def check(self, value: Value, path: str, problems: list[Problem]) -> Any:
        """The converted value."""

    def schema(self) -> Schema:
        """JSON Schema of the type."""


def _refuse(kind: Type, value: Value, path: str, problems: list[Problem], hint: str = "") -> None:
    problems.append(value.place.problem(path, f"expected {kind.name}, got {describe(value)}{hint}"))


def _refuse_mapping(kind: Type, value: Value, path: str, problems: list[Problem]) -> None:
    text = value.value if isinstance(value, Scalar) and isinstance(value.value, str) else ""
    hint = colon_hint(text, value.place)
    _refuse(kind, value, path, problems, hint and f"; {hint}")


def _list_hint(item: Type, value: Value, path: str) -> str:
    """How to write a list whose items were given as one string, or as the keys of a mapping."""
    match value:
        case Scalar(value=str(text)) if text.strip(" ,"):
            trial: list[Problem] = []
            for word in words_of(text):
                item.check(Scalar(word, value.place, word), path, trial)
            if trial:
                return f"; each of its items is {item.name}"
            return f"; write {value.place.entry(path.rpartition('.')[2], text, as_list(text))}"
        case Entries() if value.entries and isinstance(item, Either) and isinstance(item.entries, Record):
            return _records_hint(item.entries, value)
    return ""


def _records_hint(record: "Record", value: Entries) -> str:
    """How to write as a list one record, or several that were given as a mapping of names."""
    names = [key for key, _, _ in value.walk()]
    if set(names) & {*record.fields, *record.foreign}:
        return f"; begin each item of the list with a dash, also a single one: - {names[0]}: …"
    main = record.required[0]
    if not value.place.typed:
        return f"; write - {main}: {names[0]}"
    listed = ", ".join(f"{{{main}: {name}}}" for name in names)
    return f"; write {setting(value.place.source, f'[{listed}]')}"


def _quote_hint(kind: Type, value: Value, path: str) -> str:
    """How to write a string that YAML has read as something else."""
    text = _unquoted(value)
    trial: list[Problem] = []
    if not text or kind.check(Scalar(text, value.place), path, trial) is None:
        return ""
    return f"; quote it: {value.place.instead(text, in_quotes(text))}"


def _unquoted(value: Value) -> str:
    """What was meant as a string: a number, a switch, `{word}` or `word: word`."""
    match value:
        case Scalar(value=bool() | int() | float() | None, text=text):
            return text
        case Entries(entries=((Scalar(value=str(key)), Scalar(value=None, text="")),)):
            return f"{{{key}}}"
        case Entries(entries=((Scalar(value=str(key)), Scalar(text=text)),)):
            return f"{key}: {text}"
    return ""


def colon_hint(text: str, place: Place) -> str:
    """How to write a key and its value where the space between them was forgotten."""
    found = re.fullmatch(r"([A-Za-z_]\w*):([^\s/].*)", text)
    return f"put a space after the colon: {place.instead(text, f'{found[1]}: {found[2]}')}" if found else ""


class Text(NamedTuple):
    """A string; numbers and dates that YAML recognised are refused, since their spelling is lost."""

    name: str = "a string"
    pattern: str = r"[^\0]*"

    def check(self, value: Value, path: str, problems: list[Problem]) -> str | None:
        """The string."""
        match value:
            case Scalar(value=str(text)) if re.fullmatch(self.pattern, text, re.DOTALL):
                return text
        hint = (
            ""
            if isinstance(value, Scalar) and isinstance(value.value, str)
            else _quote_hint(self, value, path)
        )
        _refuse(self, value, path, problems, hint)
        return None

    def schema(self) -> Schema:
        """JSON Schema."""
        # JSON Schema's patterns are JavaScript's: NUL is spelled otherwise there.
        return {"type": "string", "pattern": f"^(?:{self.pattern})$".replace("\\0", "\\u0000")}


class Word(NamedTuple):
    """A string, or any other scalar as it was spelled: arguments and variables."""

    name: str = "a string"

    def check(self, value: Value, path: str, problems: list[Problem]) -> str | None:
        """The string."""
        match value:
            case Scalar(value=None):
                pass
            case Scalar(value=str(text)) | Scalar(text=text) if "\0" not in text:
                return text
        odd = isinstance(value, Entries) or (isinstance(value, Scalar) and value.value is None)
        _refuse(self, value, path, problems, _quote_hint(self, value, path) if odd else "")
        return None

    def schema(self) -> Schema:
        """JSON Schema."""
        return {"type": ["string", "number", "boolean"]}


class Integer(NamedTuple):
    """A whole number from `least` to `most`."""

    least: int = 0
    most: int | None = None

    @property
    def name(self) -> str:
        """What is expected."""
        if self.most is None:
            return f"an integer ≥ {self.least}"
        return f"an integer from {self.least} to {self.most}"

    def check(self, value: Value, path: str, problems: list[Problem]) -> int | None:
        """The number."""
        match value:
            case Scalar(value=bool()):
                pass
            case Scalar(value=int(number)) if self.least <= number <= (self.most or number):
                return number
        _refuse(self, value, path, problems)
        return None

    def schema(self) -> Schema:
        """JSON Schema."""
        limits = {"minimum": self.least, "maximum": self.most}
        return {"type": "integer", **{key: limit for key, limit in limits.items() if limit is not None}}


MAX_DURATION_S = 1e9
"""Some thirty years: more is a typing error."""
_PART = r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)"
_DURATION = r"(?:[0-9]+(?:\.[0-9]+)?\s*(?:ms|s|m|h|d)\s*)+"
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Duration(NamedTuple):
    """`500ms`, `30s`, `10m`, `1h30m`, `7d`, or a number of seconds; becomes seconds."""

    least_s: int = 0

    @property
    def name(self) -> str:
        """What is expected."""
        least = f" ≥ {self.least_s}s" if self.least_s else ""
        return f'a duration{least} such as "30s" or "10m"'

    def check(self, value: Value, path: str, problems: list[Problem]) -> float | None:
        """Seconds."""
        seconds = _seconds(value)
        if seconds is None or not self.least_s <= seconds <= MAX_DURATION_S:
            _refuse(self, value, path, problems)
            return None
        return seconds

    def schema(self) -> Schema:
        """JSON Schema."""
        return {"type": ["string", "number"], "pattern": f"^(?:{_DURATION})$", "minimum": self.least_s}


def _seconds(value: Value) -> float | None:
    match value:
        case Scalar(value=bool()):
            return None
        case Scalar(value=int() | float() as number) if number <= MAX_DURATION_S:
            return float(number)
        case Scalar(value=str(text)) if re.fullmatch(_DURATION, text):
            return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(_PART, text))
    return None


class OrNone(NamedTuple):
    """A value of some type, or the word `none`, which becomes None."""

    kind: Type

    @property
    def name(self) -> str:
        """What is expected."""
        return f'{self.kind.name}, or "none"'

    def check(self, value: Value, path: str, problems: list[Problem]) -> Any:
        """The value."""
        if isinstance(value, Scalar) and value.value == "none":
            return None
        trial: list[Problem] = []
        checked = self.kind.check(value, path, trial)
        if trial:
            _refuse(self, value, path, problems)
        return checked

    def schema(self) -> Schema:
        """JSON Schema."""
        return {"anyOf": [self.kind.schema(), {"const": "none"}]}


class Switch(NamedTuple):
    """true or false."""

    name: str = "true or false"

    def check(self, value: Value, path: str, problems: list[Problem]) -> bool | None:
        """The switch."""
        if isinstance(value, Scalar) and isinstance(value.value, bool):
            return value.value
        _refuse(self, value, path, problems)
        return None

    def schema(self) -> Schema:
        """JSON Schema."""
        return {"type": "boolean"}


class Choice(NamedTuple):
    """One of a few words; with `none`, also that word, or null, which become None."""

    words: tuple[str, ...]
    none: bool = False

    @property
    def choices(self) -> tuple[str, ...]:
        """All words."""
        return (*self.words, "none") if self.none else self.words

    @property
    def name(self) -> str:
        """What is expected."""
        return in_words(_names(self))

    def check(self, value: Value, path: str, problems: list[Problem]) -> str | None:
        """The word."""
        match value:
            case Scalar(value="none") if self.none:
                return None
            case Scalar(value=None, text=text) if self.none and text:  # without text it is a key alone
                return None
            case Scalar(value=str(text)) if text in self.words:
                return text
            case Scalar(value=str(text)) if close := difflib.get_close_matches(text, self.choices, 1):
                hint = f'did you mean "{close[0]}"?'
                problems.append(
                    value.place.problem(path, f"expected {self.name}, got {describe(value)}; {hint}")
                )
                return None
        _refuse(self, value, path, problems)
        return None

    def schema(self) -> Schema:
        """JSON Schema."""
        return {"enum": [*self.choices, None] if self.none else list(self.words)}


class ListOf(NamedTuple):
    """A list of one type; becomes a tuple."""

    item: Type
    least: int = 0

    @property
    def name(self) -> str:
        """What is expected."""
        return "a list that is not empty" if self.least else "a list"

    def check(self, value: Value, path: str, problems: list[Problem]) -> tuple[Any, ...] | None:
        """The items."""
        if not isinstance(value, Items) or len(value.items) < self.least:
            _refuse(self, value, path, problems, _list_hint(self.item, value, path))
            return None
        return tuple(self.item.check(item, f"{path}[{i}]", problems) for i, item in enumerate(value.items))

    def schema(self) -> Schema:
        """JSON Schema."""
        return {"type": "array", "items": self.item.schema(), "minItems": self.least}


class MapOf(NamedTuple):
    """A mapping from names that match `pattern` to one type; null stays None."""

    item: Type
    pattern: str
    key_name: str
    name: str = "a mapping"

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
            null = isinstance(entry, Scalar) and entry.value is None
            checked[key] = None if null else self.item.check(entry, f"{path}.{key}", problems)
        return checked

    def schema(self) -> Schema:
        """JSON Schema."""
        item = {"anyOf": [self.item.schema(), {"type": "null"}]}
        return {
            "type": "object",
            "propertyNames": {"pattern": f"^{self.pattern}$"},
            "additionalProperties": item,
        }


class Either(NamedTuple):
    """The first type of the kind that the value is: lists, mappings and words are told apart by look."""

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
        return in_words([name for kind in self._types for name in _names(kind)])

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
                problems.extend(trial) if hinted else _refuse(
                    self, value, path, problems, self._hint(value, path)
                )
            return checked
        return chosen.check(value, path, problems)

    def _hint(self, value: Value, path: str) -> str:
        if self.text:
            return _quote_hint(self.text, value, path)
        return _list_hint(self.items.item, value, path) if isinstance(self.items, ListOf) else ""

    def schema(self) -> Schema:
        """JSON Schema."""
        return {"anyOf": [kind.schema() for kind in self._types]}


def in_words(names: Sequence[str]) -> str:
    """a, b or c"""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _names(kind: Type) -> Sequence[str]:
    return [f'"{word}"' for word in kind.choices] if isinstance(kind, Choice) else [kind.name]


class Field(NamedTuple):
    """One key of a record: its type, a line of explanation and how its default reads."""

    kind: Type
    doc: str
    default: str = ""


class Record(NamedTuple):
    """A mapping with known keys; becomes a dict of those that were given.

    `foreign` maps names that other tools use to ours; `later` names keys that are planned.
    """

    fields: Mapping[str, Field]
    foreign: Mapping[str, str] = {}
    later: Sequence[str] = ()
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
            return place.problem(path, f"unknown key: {key} is called {self.foreign[key]} here")
        if key in self.later:
            return place.problem(path, f"{key} is not supported by this version of distlaunch")
        close = difflib.get_close_matches(key, self.fields, 1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(self.fields)}"
        return place.problem(path, f"unknown key; {hint}")

    def schema(self) -> Schema:
        """JSON Schema."""
        properties = {
            key: {**entry.kind.schema(), "description": _described(entry)}
            for key, entry in self.fields.items()
        }
        required = {"required": list(self.required)} if self.required else {}
        return {"type": "object", "additionalProperties": False, "properties": properties, **required}


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


def _described(entry: Field) -> str:
    return f"{entry.doc} Default: {entry.default}." if entry.default else entry.doc
