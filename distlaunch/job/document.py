"""Parsed YAML, whose every value knows its place, and how messages show it and correct it."""

import json
import re
from collections.abc import Collection, Iterable, Iterator

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import Problem
from distlaunch.wording import counted


class Place(Frozen):
    """Where a value stands: the file as the user named it; line and column from 1, 0 = nowhere.

    `typed` is the whole value of the --set, which `source` names, that it came with.
    """

    source: str
    line: int = 0
    column: int = 0
    typed: str = ""

    def problem(self, path: str, text: str) -> Problem:
        """A problem with what stands here."""
        return Problem(self.source, self.line, self.column, path, text)

    def instead(self, wrong: str, right: str) -> str:
        """How to write `right` in place of `wrong`: on the command line, the whole --set."""
        if not self.typed:
            return right
        value = re.sub(rf"(?<![\w.]){re.escape(wrong)}(?![\w.])", lambda _: right, self.typed, count=1)
        return setting(self.source, value)


OVERRIDE = "--set "
"""Begins the source of what stands on the command line, and not in a file."""


def setting(source: str, value: str) -> str:
    """What a shell is given to have `value` where a --set, named by `source`, has another."""
    import shlex  # only a mistake needs it

    return OVERRIDE + shlex.quote(f"{source.removeprefix(OVERRIDE)}={value}")


class Scalar(Frozen):
    """A string, number, boolean or null; `text` is how it was spelled. `unset` = as if it were not there."""

    value: str | int | float | bool | None
    place: Place
    text: str = ""
    unset: bool = False


class Items(Frozen):
    """A list."""

    items: "tuple[Value, ...]"
    place: Place


class Entries(Frozen):
    """A mapping, in order; keys are strings and occur once."""

    entries: "tuple[tuple[Scalar, Value], ...]"
    place: Place

    def walk(self) -> "Iterator[tuple[str, Scalar, Value]]":
        """(key, where the key stands, value) in order."""
        return ((str(key.value), key, value) for key, value in self.entries)

    def get(self, name: str) -> "Value | None":
        """The value of a key, or None."""
        return next((value for key, _, value in self.walk() if key == name and not is_unset(value)), None)

    def with_key(self, name: str, new: "Value") -> "Entries":
        """This mapping with one key set."""
        kept = tuple(entry for entry in self.entries if entry[0].value != name)
        return Entries((*kept, (Scalar(name, new.place), new)), self.place)


Value = Scalar | Items | Entries


def is_unset(value: Value) -> bool:
    """Whether a key counts as not given, as does a section whose keys have all been taken out."""
    if isinstance(value, Entries):
        return bool(value.entries) and all(is_unset(entry) for _, entry in value.entries)
    return isinstance(value, Scalar) and value.unset


def at(value: Value | None, *steps: str) -> Value | None:
    """What keys and list indices lead to, or None."""
    for step in steps:
        match value:
            case Items(items=items) if step.isdecimal() and int(step) < len(items):
                value = items[int(step)]
            case Entries():
                value = value.get(step)
            case _:
                return None
    return value


def word_at(value: Value, *steps: str) -> str | int | float | bool | None:
    """The string, number or boolean that keys and list indices lead to, or None."""
    found = at(value, *steps)
    return found.value if isinstance(found, Scalar) else None


def override(root: Value, path: list[str], new: Value) -> Value:
    """`root` with the value at `path` (keys and list indices) replaced. KeyError says what is wrong."""
    if not path:
        return new
    step, rest = path[0], path[1:]
    if isinstance(root, Items):
        if not re.fullmatch("[0-9]{1,9}", step) or int(step) >= len(root.items):
            raise KeyError(f"index {step} is out of range: the list has {counted(len(root.items), 'item')}")
        items = list(root.items)
        items[int(step)] = override(items[int(step)], rest, new)
        return Items(tuple(items), root.place)
    if isinstance(root, Scalar) and root.value is not None:
        raise KeyError(f"{describe(root)} has no key {step}")
    entries = root if isinstance(root, Entries) else Entries((), new.place)
    return entries.with_key(step, override(entries.get(step) or Scalar(None, new.place), rest, new))


# What messages show, and what they say to write instead


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
            return ("~, which YAML reads as null" if text == "~" else text) or "nothing"
        case Scalar(text=text):
            read = str(value.value).lower()
            odd = text and text.lower() != read and re.fullmatch(r"[A-Za-z]+|.*[:_xob].*|0[0-9]+", text)
            return f"{text}, which YAML reads as {read}" if odd else read


def as_list(text: str) -> str:
    """How YAML writes the words of `text` as a list."""
    plain = r"(?![-=]$)[\w./@%+=~-]+"
    return f"[{', '.join(w if re.fullmatch(plain, w) else in_quotes(w) for w in words_of(text))}]"


def words_of(text: str) -> list[str]:
    """The words of `text`, which stand between blanks, or else between commas."""
    words = text.split() if re.search(r"\s", text.strip()) else re.findall(r"(?:\[[^\]]*\]|[^,\[])+|\[", text)
    return [word for word in (word.strip(" ,") for word in words) if word]


def in_quotes(text: str) -> str:
    """`text` as YAML writes a string that could be read as something else."""
    return json.dumps(text, ensure_ascii=False)


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The one of the `known` words that `word` may have been meant for; "" = none."""
    import difflib  # only a mistake needs it

    return next(iter(difflib.get_close_matches(word, list(known), 1, likeness)), "")


def colon_hint(text: str, place: Place) -> str:
    """How to write a key and its value where the space between them was forgotten."""
    found = re.fullmatch(r"([A-Za-z_]\w*):([^\s/].*)", text)
    return f"put a space after the colon: {place.instead(text, f'{found[1]}: {found[2]}')}" if found else ""


def records_hint(value: Entries, keys: Collection[str], main: str) -> str:
    """How to write as a list one record of these keys, or several that were given as a mapping of names."""
    names = [key for key, _, _ in value.walk()]
    if set(names) & set(keys):
        return f"; start each list item with a dash, even a single one: - {names[0]}: …"
    if not value.place.typed:
        return f"; write - {main}: {names[0]}"
    listed = ", ".join(f"{{{main}: {name}}}" for name in names)
    return f"; write {setting(value.place.source, f'[{listed}]')}"


def unquoted(value: Value) -> str:
    """What was meant as a string: a number, a switch, `{word}` or `word: word`."""
    match value:
        case Scalar(value=bool() | int() | float() | None, text=text):
            return text
        case Entries(entries=((Scalar(value=str(key)), Scalar(value=None, text="")),)):
            return f"{{{key}}}"
        case Entries(entries=((Scalar(value=str(key)), Scalar(text=text)),)):
            return f"{key}: {text}"
    return ""


def program_keys(text: str) -> dict[str, str]:
    """The keys for a script that was written as a command line; none for a mere path."""
    if found := re.fullmatch(r"(\S+\.py)\s+(\S.*)", text):
        return {"script": found[1], "args": as_list(found[2])}
    if found := re.fullmatch(r"((?:\S*/)?python[0-9.]*)\s+(-m\s+)?([^\s-]\S*)(?:\s+(\S.*))?", text):
        keys = {"module" if found[2] else "script": found[3]}
        keys |= {"args": as_list(found[4])} if found[4] else {}
        return keys if found[1] in ("python", "python3") else {**keys, "python": found[1]}
    if re.match(r"(?:\S*/)?(?:python[0-9.]*|bash|sh)\s", text):
        return {"command": as_list(text)}
    return {}
