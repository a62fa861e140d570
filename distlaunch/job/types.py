"""The types of keys in a job file.

Each type checks a value with its place, and has a JSON Schema. msgspec and pydantic don't keep line numbers,
and would add 34 and 73 ms to every launch. msgspec also stops at the first error.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, AnyStr

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import Problem
from distlaunch.job.document import (
    Entries,
    Items,
    Place,
    Scalar,
    Value,
    as_command,
    as_list,
    colon_hint,
    describe,
    in_quotes,
    is_unset,
    nearest,
    records_hint,
    unquoted,
    words_of,
)
from distlaunch.job.text import value_error
from distlaunch.wording import size_words

Schema = dict[str, Any]
Checked = Mapping[str, Any]
"""The checked values of a record's given keys; None = refused."""
Mistake = Callable[[str], "str | None"]
"""A function that returns why a text with valid syntax can't be used, or None."""
REFUSED: Any = object()
"""The result of `Type.read` for a value of the wrong type."""


class Type:
    """A type of values. `check` returns the converted value, or adds to the problems and returns None.

    `name` is the expected type in error messages.
    """

    name = "a map of settings"
    mistake: Mistake | None = None
    unit = ""
    """Suffix of the field that holds the value, such as `_s`."""
    parts: "Sequence[tuple[str, Type]]" = ()
    """(suffix in the reference, type) of contained values; the suffix "" = the value itself."""

    def read(self, value: Scalar) -> Any:
        """Return the converted value of a scalar, or REFUSED if it has the wrong type."""
        return REFUSED

    def check(self, value: Value, path: str, problems: list[Problem]) -> Any:
        """Return the converted value, or None for a mistake."""
        read = self.read(value) if isinstance(value, Scalar) else REFUSED
        if read is REFUSED:
            return self.refuse(value, path, problems)
        if wrong := self.mistake(read) if self.mistake else None:
            problems.append(value.place.problem(path, wrong))
            return None
        return read

    def refuse(self, value: Value, path: str, problems: list[Problem]) -> Any:
        """Report that the value has the wrong type, and return None."""
        text = f"expected {self.name}, got {describe(value)}{self.hint(value, path)}"
        problems.append(value.place.problem(path, text))

    def hint(self, value: Value, path: str) -> str:
        """Return a correction, preceded by a semicolon, such as quotes around a word that YAML misreads."""
        text = unquoted(value)
        if not text or self.read(Scalar(text, value.place)) is REFUSED:
            return ""
        return f"; quote it: {value.place.instead(text, in_quotes(text))}"

    def schema(self) -> Schema:
        """Return the JSON Schema of the type."""
        return {"type": "object"}

    def made(self, checked: Any) -> Any:
        """Convert a checked value to its value in the job."""
        return checked

    def inner(self, step: str) -> "Type | None":
        """Return the type of the value at a key or list index, if known."""
        inner = (kind if suffix else kind.inner(step) for suffix, kind in self.parts)
        return next(filter(None, inner), None)

    def sections(self, path: str) -> "list[tuple[Record, str]]":
        """Return the records inside this type, each with the prefix of its keys in the reference."""
        return [section for suffix, kind in self.parts for section in kind.sections(path + suffix)]


# Single values


class Text(Type):
    """A string. YAML numbers and dates are refused, because their original spelling is lost."""

    def __init__(
        self, name: str = "a string", pattern: str = r"[^\0]*", mistake: Mistake | None = None
    ) -> None:
        self.name, self.pattern, self.mistake = name, pattern, mistake

    def read(self, value: Scalar) -> Any:
        """Return the string."""
        text = value.value
        return text if isinstance(text, str) and re.fullmatch(self.pattern, text, re.DOTALL) else REFUSED

    def schema(self) -> Schema:
        """Return the JSON Schema."""
        # JSON Schema uses JavaScript patterns, which spell NUL differently.
        return {"type": "string", "pattern": f"^(?:{self.pattern})$".replace("\\0", "\\u0000")}


def compiled(text: AnyStr) -> re.Pattern[AnyStr]:
    """Compile a regular expression. Raises ValueError with an explanation."""
    try:
        return re.compile(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (re.error, OverflowError) as error:
        raise ValueError(str(error)) from None


class Word(Type):
    """A string, or any other scalar in its original spelling: arguments and variables."""

    name = "a string"

    def __init__(self, mistake: Mistake | None = None) -> None:
        self.mistake = mistake

    def read(self, value: Scalar) -> Any:
        """Return the string."""
        text = value.value if isinstance(value.value, str) else value.text
        return REFUSED if value.value is None or "\0" in text else text

    def schema(self) -> Schema:
        """Return the JSON Schema."""
        return {"type": ["string", "number", "boolean"]}


class Integer(Type):
    """An integer from `least` to `most`."""

    def __init__(self, least: int = 0, most: int | None = None) -> None:
        self.least, self.most = least, most
        self.name = f"an integer ≥ {least}" if most is None else f"an integer from {least} to {most}"

    def read(self, value: Scalar) -> Any:
        """Return the number."""
        number = value.value
        fits = type(number) is int and self.least <= number <= (self.most or number)
        return number if fits else REFUSED

    def hint(self, value: Value, path: str) -> str:
        """Return a correction that writes the number without quotes, or without a second equals sign."""
        text = str(value.value) if isinstance(value, Scalar) and isinstance(value.value, str) else ""
        found = re.fullmatch("=?([0-9]{1,9})", text)
        if not found or self.read(Scalar(int(found[1]), value.place)) is REFUSED:
            return ""
        key = "" if value.place.typed else f"{path.rpartition('.')[2]}: "
        return f"; write {key}{value.place.instead(text, str(int(found[1])))}"

    def schema(self) -> Schema:
        """Return the JSON Schema."""
        most = {} if self.most is None else {"maximum": self.most}
        return {"type": "integer", "minimum": self.least, **most}


MAX_DURATION_S = 1e9
"""Seconds: about thirty years. A longer duration must be a typo."""
_PART = r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)"
_DURATION = r"(?:[0-9]+(?:\.[0-9]+)?\s*(?:ms|s|m|h|d)\s*)+"
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Duration(Type):
    """A duration such as `500ms`, `30s`, `1h30m` or `7d`, or a number of seconds; becomes seconds."""

    unit = "_s"

    def __init__(self, least_s: int = 0) -> None:
        self.least_s = least_s
        least = f" ≥ {least_s}s" if least_s else ""
        self.name = f'a duration{least} such as "30s" or "10m"'

    def read(self, value: Scalar) -> Any:
        """Return seconds."""
        seconds = seconds_in(value.value) if isinstance(value.value, str) else value.value
        if seconds is None or isinstance(seconds, bool) or not self.least_s <= seconds <= MAX_DURATION_S:
            return REFUSED
        return float(seconds)

    def schema(self) -> Schema:
        """Return the JSON Schema."""
        return {"type": ["string", "number"], "pattern": f"^(?:{_DURATION})$", "minimum": self.least_s}


def seconds_in(text: str) -> float | None:
    """Return the seconds of a text such as `1h30m`, or None if it isn't a duration."""
    if not re.fullmatch(_DURATION, text):
        return None
    return sum(float(number) * UNITS_S[unit] for number, unit in re.findall(_PART, text))


def duration_text(seconds: float) -> str:
    """Format a duration in the longest unit that divides it: `90s`, `5m`."""
    units = ((f"{seconds / size:g}{unit}", size) for unit, size in reversed(UNITS_S.items()))
    return next((text for text, size in units if size >= 1 and seconds % size == 0), f"{seconds:g}s")


_SIZES = {"": 1} | {n + i: b**k for k, n in enumerate("KMGT", 1) for i, b in (("", 1000), ("i", 1024))}


class Size(Type):
    """A size such as `500MiB` or `2GB`, or a number of bytes; becomes bytes."""

    name = 'a size such as "500MiB" or "2GB"'
    pattern = r"([1-9][0-9]{0,11})\s*([KMGT]i?)?B?"

    def read(self, value: Scalar) -> Any:
        """Return bytes."""
        found = re.fullmatch(self.pattern, value.text) if isinstance(value.value, str | int) else None
        return int(found[1]) * _SIZES[found[2] or ""] if found else REFUSED

    def schema(self) -> Schema:
        """Return the JSON Schema."""
        return {"type": ["string", "integer"], "pattern": f"^(?:{self.pattern})$", "minimum": 1}


class OrNone(Type):
    """A value of some type, or the word `none`, which becomes None."""

    def __init__(self, kind: Type) -> None:
        self.kind, self.name, self.unit = kind, f'{kind.name}, or "none"', kind.unit

    def read(self, value: Scalar) -> Any:
        """Return the value, or None."""
        return None if value.value == "none" else self.kind.read(value)

    def schema(self) -> Schema:
        """Return the JSON Schema."""
        return {"anyOf": [self.kind.schema(), {"const": "none"}]}


class Switch(Type):
    """A boolean, true or false."""

    name = "true or false"

    def read(self, value: Scalar) -> Any:
        """Return the boolean."""
        return value.value if isinstance(value.value, bool) else REFUSED

    def schema(self) -> Schema:
        """Return the JSON Schema."""
        return {"type": "boolean"}


class Choice(Type):
    """One of a few words. With `none`, the word `none` and null are also allowed, and become None."""

    def __init__(self, words: tuple[str, ...], none: bool = False) -> None:
        self.words, self.none = words, none
        self.choices = (*words, "none") if none else words
        self.name = _in_words(_names_of(self))

    def read(self, value: Scalar) -> Any:
        """Return the word, or None."""
        word = value.value
        null = word is None and value.text  # without text, the value is empty
        if self.none and (word == "none" or null):
            return None
        return word if word in self.words else REFUSED

    def hint(self, value: Value, path: str) -> str:
        """Return the most similar choice."""
        text = value.value if isinstance(value, Scalar) else None
        close = nearest(text, self.choices) if isinstance(text, str) else ""
        return f'; did you mean "{close}"?' if close else ""

    def schema(self) -> Schema:
        """Return the JSON Schema."""
        return {"enum": [*self.choices, None] if self.none else list(self.words)}


def _in_words(names: Sequence[str]) -> str:
    """Join names: a, b or c."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _names_of(kind: Type) -> Sequence[str]:
    """Return the name of a type, or each word of a choice."""
    return [f'"{word}"' for word in kind.choices] if isinstance(kind, Choice) else [kind.name]


# Lists and mappings


class ListOf(Type):
    """A list of values of one type; the `first` item may have another type. Becomes a tuple."""

    def __init__(self, item: Type, least: int = 0, first: Type | None = None) -> None:
        self.item, self.least, self.first = item, least, first or item
        self.parts = [("[]", item)]
        self.name = "a non-empty list" if least else "a list"

    def check(self, value: Value, path: str, problems: list[Problem]) -> Any:
        """Return the checked items."""
        if not isinstance(value, Items) or len(value.items) < self.least:
            return self.refuse(value, path, problems)
        return tuple(
            (self.item if i else self.first).check(item, f"{path}[{i}]", problems)
            for i, item in enumerate(value.items)
        )

    def hint(self, value: Value, path: str) -> str:
        """Return a correction that writes the value as a list."""
        match value:
            case Entries() if value.entries and isinstance(self.item, Record) and self.item.main:
                return records_hint(value, {*self.item.fields, *self.item.foreign}, self.item.main)
            case Entries() if not isinstance(self.item, Record):
                return f"; each item must be {self.item.name}"
            case Scalar(value=str(text)) if text.strip(" ,"):
                words = (Scalar(word, value.place, word) for word in words_of(text))
                if any(self.item.read(word) is REFUSED for word in words):
                    return f"; each item must be {self.item.name}"
                key = "" if value.place.typed else f"{path.rpartition('.')[2]}: "
                listed = as_command(text) if path in ("command", "notify.command") else as_list(text)
                return f"; write {key}{value.place.instead(text, listed)}"
            case Scalar(value=int(number)) if self.item.read(value) is not REFUSED:
                return f"; write {path.rpartition('.')[2]}: [{number}]"
        return ""

    def schema(self) -> Schema:
        """Return the JSON Schema."""
        return {"type": "array", "items": self.item.schema(), "minItems": self.least}


class MapOf(Type):
    """A map from names that match `pattern` to values of one type. With `nulls`, null is kept as None."""

    def __init__(self, item: Type, pattern: str, key_name: str, nulls: bool = True) -> None:
        self.item, self.pattern, self.key_name, self.nulls = item, pattern, key_name, nulls
        self.parts = [(".NAME", item)]

    def check(self, value: Value, path: str, problems: list[Problem]) -> Any:
        """Return the checked entries."""
        if not isinstance(value, Entries):
            return self.refuse(value, path, problems)
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

    def hint(self, value: Value, path: str) -> str:
        """Return a correction that writes the value as a map."""
        return _mapping_hint(value)

    def schema(self) -> Schema:
        """Return the JSON Schema."""
        item = self.item.schema()
        names = {"pattern": f"^{self.pattern}$"}
        entries = {"anyOf": [item, {"type": "null"}]} if self.nulls else item
        return {"type": "object", "propertyNames": names, "additionalProperties": entries}


class Either(Type):
    """One of several types, chosen by the kind of value: number, word, list or map."""

    def __init__(
        self,
        number: Type | None = None,
        text: Type | None = None,
        items: Type | None = None,
        entries: Type | None = None,
    ) -> None:
        self.number, self.text, self.items, self.entries = number, text, items, entries
        self.types = [kind for kind in (number, text, items, entries) if kind]
        self.parts = [("", kind) for kind in self.types]
        self.name = _in_words([name for kind in self.types for name in _names_of(kind)])

    def _choose(self, value: Value) -> Type | None:
        """Return the type for this kind of value, or None."""
        if isinstance(value, Items):
            return self.items
        if isinstance(value, Entries):
            return self.entries
        if isinstance(value.value, bool):
            return None
        return self.number if isinstance(value.value, int | float) else self.text

    def read(self, value: Scalar) -> Any:
        """Return the value, converted by the chosen type."""
        chosen = self._choose(value)
        return chosen.read(value) if chosen else REFUSED

    def check(self, value: Value, path: str, problems: list[Problem]) -> Any:
        """Return the value, checked by the chosen type."""
        chosen = self._choose(value)
        no_word = isinstance(value, Scalar) and self.read(value) is REFUSED
        if chosen is None or (no_word and not (isinstance(chosen, Choice) and chosen.hint(value, path))):
            return self.refuse(value, path, problems)
        return chosen.check(value, path, problems)

    def hint(self, value: Value, path: str) -> str:
        """Return a correction for the most likely type."""
        if self.number and isinstance(value, Scalar) and (hint := self.number.hint(value, path)):
            return hint
        listed = isinstance(self.items, ListOf)
        if self.text and not (listed and isinstance(value, Entries)):
            return Type.hint(self.text, value, path)
        return self.items.hint(value, path) if self.items and listed else ""

    def schema(self) -> Schema:
        """Return the JSON Schema."""
        return {"anyOf": [kind.schema() for kind in self.types]}


class Lines(Either):
    """Lines of text: one string of several lines, or a list of lines; becomes a tuple."""

    def __init__(self) -> None:
        super().__init__(text=SOME_TEXT, items=ListOf(LINE))

    def made(self, checked: Any) -> Any:
        """Return the lines."""
        return tuple(checked.rstrip("\n").split("\n") if isinstance(checked, str) else checked)


class Tree(Type):
    """A map of any depth, passed on to another program; becomes dicts, lists and scalars."""

    def __init__(self, name: str = "a map of settings") -> None:
        self.name = name

    def check(self, value: Value, path: str, problems: list[Problem]) -> Any:
        """Return the map as plain data."""
        plain = self._plain if isinstance(value, Entries) else self.refuse
        return plain(value, path, problems)

    def _plain(self, value: Value, path: str, problems: list[Problem]) -> Any:
        """Return a value as plain data. Report NUL characters in `problems`."""
        match value:
            case Scalar():
                if "\0" in str(value.value):
                    Text("text without NUL").refuse(value, path, problems)
                return value.value
            case Items():
                return [self._plain(item, f"{path}[{i}]", problems) for i, item in enumerate(value.items)]
            case Entries():
                given = ((key, entry) for key, _, entry in value.walk() if not is_unset(entry))
                return {key: self._plain(entry, f"{path}.{key}", problems) for key, entry in given}


# Records


class Field(Frozen):
    """One key of a record: its type, a one-line explanation, and the field for its value.

    The value is stored in `field` (None = the field with the key's name) of the type that the record `makes`,
    or of `part`, a part of that type. The field's default is the key's default. `told` describes the default
    in words, or adds to it.
    """

    kind: Type
    doc: str
    told: str = ""
    field: str | None = None
    default: Any = None
    part: Any = None


BUILT = ""
"""Value of `field` for a key that has no field."""


def built(kind: Type, doc: str, told: str = "", default: Any = None) -> Field:
    """Return a key that needs code in job/build.py; `default` replaces a missing value."""
    return Field(kind, doc, told, BUILT, default)


def by_their_names(**ours: str) -> dict[str, str]:
    """Map the names that other tools use to keys. Each argument lists the names for its key."""
    return {name: key for key, names in ours.items() for name in names.split()}


class Record(Type):
    """A map with known keys; becomes a dict of the given keys.

    `makes` is the frozen type whose fields hold the values; None = a dict without the defaults. `foreign`
    maps names that other tools use to keys. The value of the `main` key can replace the whole record. As
    with `dict`, keys can be passed in a map or as keyword arguments.
    """

    def __init__(
        self,
        fields: Mapping[str, Field] = MappingProxyType({}),
        makes: Any = None,
        *,
        foreign: Mapping[str, str] = MappingProxyType({}),
        required: Sequence[str] = (),
        title: str = "",
        main: str = "",
        **more: Field,
    ) -> None:
        self.fields, self.makes, self.foreign = {**fields, **more}, makes, foreign
        self.required, self.main = required, main
        plain = f"a map with {' and '.join(required)}" if required else "a map of settings"
        self.name = title or (f"{self.fields[main].kind.name} or {plain}" if main else plain)

    def read(self, value: Scalar) -> Any:
        """Return the value, converted by the type of the main key."""
        return self.fields[self.main].kind.read(value) if self.main else REFUSED

    def check(self, value: Value, path: str, problems: list[Problem]) -> Any:
        """Return the checked values of the given keys."""
        if isinstance(value, Scalar) and self.read(value) is not REFUSED:
            return {self.main: self.fields[self.main].kind.check(value, path, problems)}
        if not isinstance(value, Entries):
            self.refuse(value, path, problems)
            return None
        checked = {}
        for key, at, entry in value.walk():
            inner = f"{path}.{key}" if path else key
            if key not in self.fields:
                problems.append(self._unknown(key, at.place, inner, entry))
            elif not is_unset(entry):
                checked[key] = self.fields[key].kind.check(entry, inner, problems)
        given = (key for key, _, entry in value.walk() if not is_unset(entry))
        meant = {self.foreign.get(key, key.partition(":")[0]) for key in given}
        missing = (key for key in self.required if key not in meant)
        problems.extend(value.place.problem(path, f"{key} is missing") for key in missing)
        return checked

    def hint(self, value: Value, path: str) -> str:
        """Return a correction that writes the value as a map, or as the value of the main key."""
        return _mapping_hint(value) or super().hint(value, path)

    def _unknown(self, key: str, place: Place, path: str, entry: Value) -> Problem:
        """Return the problem for an unknown key, naming the key that was probably meant."""
        section, _, inner = self.foreign.get(key, "").partition(".")
        if hint := colon_hint(key, place):
            return place.problem(path, hint)
        if key in self.foreign and not (inner and isinstance(entry, Entries)):
            return place.problem(path, f"unknown key; use {self.foreign[key]}")
        close = section or nearest(key, self.fields)  # a map is probably meant as the section
        hint = f"did you mean {close}?" if close else f"known keys: {', '.join(self.fields)}"
        return place.problem(path, f"unknown key; {hint}")

    def schema(self) -> Schema:
        """Return the JSON Schema."""
        properties = {
            key: {**entry.kind.schema(), "description": self._described(key)}
            for key, entry in self.fields.items()
        }
        required = {"required": list(self.required)} if self.required else {}
        whole = {"type": "object", "additionalProperties": False, "properties": properties, **required}
        return {"anyOf": [self.fields[self.main].kind.schema(), whole]} if self.main else whole

    def _described(self, key: str) -> str:
        default = self.default_text(key)
        return f"{self.fields[key].doc} Default: {default}." if default else self.fields[key].doc

    def inner(self, step: str) -> Type | None:
        """Return the type of a key."""
        return self.fields[step].kind if step in self.fields else None

    def sections(self, path: str) -> "list[tuple[Record, str]]":
        """Return this record."""
        return [(self, f"{path}.")]

    def field_of(self, key: str) -> str:
        """Return the field for the value of a key, or BUILT."""
        entry = self.fields[key]
        return key + entry.kind.unit if entry.field is None else entry.field

    def fields_of(self, checked: Mapping[str, Any], part: Any = None) -> dict[str, Any]:
        """Return the fields and values of the given keys for `makes` or `part`, except `built` keys."""
        return {
            field: self.fields[key].kind.made(value)
            for key, value in checked.items()
            if self.fields[key].part is part and (field := self.field_of(key))
        }

    def made(self, checked: Any) -> Any:
        """Return an object of type `makes`, or a dict, with the given keys. `built` keys aren't allowed."""
        fields = self.fields_of(checked)
        if self.makes:
            return self.makes(**fields)
        return {name: value for name, value in fields.items() if value != self.default(name)}

    def value(self, checked: Mapping[str, Any], key: str) -> Any:
        """Return the given value of a key, or its default."""
        return checked[key] if key in checked else self.default(key)

    def default(self, key: str) -> Any:
        """Return the default of a key; None = determined elsewhere."""
        entry = self.fields[key]
        known = getattr(entry.part or self.makes, "_field_defaults", {})
        return known.get(self.field_of(key), entry.default)

    def default_text(self, key: str) -> str:
        """Return the default of a key as text."""
        entry, value = self.fields[key], self.default(key)
        match value:
            case None:
                text = "none" if entry.kind.read(Scalar("none", Place(""))) is None else ""
            case bool():
                text = str(value).lower()
            case float():
                text = duration_text(value)
            case int() if isinstance(entry.kind, Size):
                text = size_words(value).replace(" ", "")
            case int() | str():
                text = str(value)
            case _:
                text = ""  # can't be expressed as text
        return text + entry.told


def _mapping_hint(value: Value) -> str:
    text = value.value if isinstance(value, Scalar) and isinstance(value.value, str) else ""
    hint = colon_hint(text, value.place)
    return hint and f"; {hint}"


# Types shared by several sections

ENV = MapOf(Word(value_error), r"[A-Za-z_][A-Za-z0-9_]*", "a variable name")
SOME_TEXT = Text("a non-empty string", r"[^\0]+")
LINE = Text("a non-empty single-line string", r"[^\0\n]+")
