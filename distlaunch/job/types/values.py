"""Types of single values: each checks a value with its place and knows its JSON schema.

Our own and small, since msgspec and pydantic know no line numbers, msgspec stops at the first error,
and they would add 34 and 73 ms to every launch.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from distlaunch.errors import Problem
from distlaunch.job.document import Entries, Scalar, Value, describe
from distlaunch.job.regex import compiled
from distlaunch.job.types.hints import nearest, quote_hint

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


def refuse(kind: Type, value: Value, path: str, problems: list[Problem], hint: str = "") -> None:
    """Note that `value` is not of that type; `hint` begins with a semicolon."""
    problems.append(value.place.problem(path, f"expected {kind.name}, got {describe(value)}{hint}"))


class Text(NamedTuple):
    """A string; numbers and dates that YAML recognised are refused, since their spelling is lost."""

    name: str = "a string"
    pattern: str = r"[^\0]*"

    def check(self, value: Value, path: str, problems: list[Problem]) -> str | None:
        """The string."""
        match value:
            case Scalar(value=str(text)) if re.fullmatch(self.pattern, text, re.DOTALL):
                return text
        word = isinstance(value, Scalar) and isinstance(value.value, str)
        refuse(self, value, path, problems, "" if word else quote_hint(value, path, self.check))
        return None

    def schema(self) -> Schema:
        """JSON Schema."""
        # JSON Schema's patterns are JavaScript's: NUL is spelled otherwise there.
        return {"type": "string", "pattern": f"^(?:{self.pattern})$".replace("\\0", "\\u0000")}


class Regex(NamedTuple):
    """A regular expression, as Python has it; where `group` says around what, one with a group."""

    name: str = "a regular expression"
    group: str = ""

    def check(self, value: Value, path: str, problems: list[Problem]) -> str | None:
        """Its text."""
        text = Text(self.name, r"[^\0]+").check(value, path, problems)
        try:
            groups = compiled(text or "").groups
        except ValueError as error:
            problems.append(value.place.problem(path, f"expected {self.name}: {error}"))
            return None
        if text and self.group and not groups:
            problems.append(value.place.problem(path, f"expected a group around {self.group}"))
            return None
        return text

    def schema(self) -> Schema:
        """JSON Schema."""
        return {"type": "string", "format": "regex"}


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
        refuse(self, value, path, problems, quote_hint(value, path, self.check) if odd else "")
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
        refuse(self, value, path, problems)
        return None

    def schema(self) -> Schema:
        """JSON Schema."""
        limits = {"minimum": self.least, "maximum": self.most}
        return {"type": "integer", **{key: limit for key, limit in limits.items() if limit is not None}}


MAX_DURATION_S = 1e9
"""Some thirty years: more is a typing error."""
_PART = r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)"
_DURATION = r"(?:[0-9]+(?:\.[0-9]+)?\s*(?:ms|s|m|h|d)\s*)+"
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


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
            refuse(self, value, path, problems)
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
        case Scalar(value=str(text)):
            return seconds_in(text)
    return None


def seconds_in(text: str) -> float | None:
    """The seconds of a text such as `1h30m`; None where it is none."""
    if not re.fullmatch(_DURATION, text):
        return None
    return sum(float(number) * UNITS_S[unit] for number, unit in re.findall(_PART, text))


def duration_text(seconds: float) -> str:
    """A duration in the longest unit that divides it: `90s`, `5m`."""
    units = ((f"{seconds / size:g}{unit}", size) for unit, size in reversed(UNITS_S.items()))
    return next((text for text, size in units if size >= 1 and seconds % size == 0), f"{seconds:g}s")


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
            refuse(self, value, path, problems)
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
        refuse(self, value, path, problems)
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
        return in_words(names_of(self))

    def check(self, value: Value, path: str, problems: list[Problem]) -> str | None:
        """The word."""
        match value:
            case Scalar(value="none") if self.none:
                return None
            case Scalar(value=None, text=text) if self.none and text:  # without text it is a key alone
                return None
            case Scalar(value=str(text)) if text in self.words:
                return text
            case Scalar(value=str(text)) if close := nearest(text, self.choices):
                refuse(self, value, path, problems, f'; did you mean "{close}"?')
                return None
        refuse(self, value, path, problems)
        return None

    def schema(self) -> Schema:
        """JSON Schema."""
        return {"enum": [*self.choices, None] if self.none else list(self.words)}


def in_words(names: Sequence[str]) -> str:
    """a, b or c"""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def names_of(kind: Type) -> Sequence[str]:
    """What is expected, word by word of a choice."""
    return [f'"{word}"' for word in kind.choices] if isinstance(kind, Choice) else [kind.name]
