"""A parsed document whose every value knows its place."""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from distlaunch.errors import Problem


class Place(NamedTuple):
    """Where a value stands: the file as the user named it; line and column from 1, 0 = nowhere."""

    source: str
    line: int = 0
    column: int = 0

    def problem(self, path: str, text: str) -> Problem:
        """A problem with what stands here."""
        return Problem(self.source, self.line, self.column, path, text)


class Scalar(NamedTuple):
    """A string, number, boolean or null; `text` is how it was spelled."""

    value: str | int | float | bool | None
    place: Place
    text: str = ""


class Items(NamedTuple):
    """A list."""

    items: "tuple[Value, ...]"
    place: Place


class Entries(NamedTuple):
    """A mapping, in order; keys are strings and occur once."""

    entries: "tuple[tuple[Scalar, Value], ...]"
    place: Place

    def walk(self) -> "Iterator[tuple[str, Scalar, Value]]":
        """(key, where the key stands, value) in order."""
        return ((str(key.value), key, value) for key, value in self.entries)

    def get(self, name: str) -> "Value | None":
        """The value of a key, or None."""
        return next((value for key, _, value in self.walk() if key == name), None)

    def with_key(self, name: str, new: "Value") -> "Entries":
        """This mapping with one key set."""
        kept = tuple(entry for entry in self.entries if entry[0].value != name)
        return Entries((*kept, (Scalar(name, new.place), new)), self.place)


Value = Scalar | Items | Entries


def describe(value: Value) -> str:
    """How an error message shows what it got."""
    match value:
        case Items():
            return "a list" if value.items else "an empty list"
        case Entries():
            return "a mapping"
        case Scalar(value=str(text)):
            return f'"{text}"' if len(text) <= 60 else f'"{text[:57]}…"'
        case Scalar(value=None, text=text):
            return "~, which YAML reads as null: quote it" if text == "~" else "nothing"
        case Scalar(value=bool(flag)):
            return str(flag).lower()
        case Scalar():
            return str(value.value)


def counted(number: int, noun: str) -> str:
    """So many for people: `1 rank`, `3 ranks`."""
    return f"{number} {noun}" + ("s" if number != 1 else "")


def as_list(text: str) -> str:
    """How YAML writes the words of `text`, which stand between blanks, or else between commas, as a list."""
    words = text.split() if re.search(r"\s", text.strip()) else re.findall(r"(?:\[[^\]]*\]|[^,\[])+|\[", text)
    return f"[{', '.join(map(_in_list, filter(None, (word.strip(' ,') for word in words))))}]"


def _in_list(word: str) -> str:
    plain = re.fullmatch(r"[\w./@%+=~-]+", word) and word not in ("-", "=")
    return word if plain else json.dumps(word, ensure_ascii=False)


def override(root: Value, path: list[str], new: Value) -> Value:
    """`root` with the value at `path` (keys and list indices) replaced. KeyError says what is wrong."""
    if not path:
        return new
    step, rest = path[0], path[1:]
    if isinstance(root, Items):
        if not re.fullmatch("[0-9]{1,9}", step) or int(step) >= len(root.items):
            raise KeyError(f"no item {step}: the list has {counted(len(root.items), 'item')}, counted from 0")
        items = list(root.items)
        items[int(step)] = override(items[int(step)], rest, new)
        return Items(tuple(items), root.place)
    if isinstance(root, Scalar) and root.value is not None:
        raise KeyError(f"{describe(root)} has no key {step}")
    entries = root if isinstance(root, Entries) else Entries((), new.place)
    return entries.with_key(step, override(entries.get(step) or Scalar(None, new.place), rest, new))
