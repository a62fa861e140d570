"""Parsed YAML with the position of every value, and corrections for error messages."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import Problem
from distlaunch.wording import counted


class Place(Frozen):
    """The place of a value: the file name as typed, and the line and column, from 1 (0 = unknown).

    For values from the command line, `source` names the option, and `typed` is its whole value.
    """

    source: str
    line: int = 0
    column: int = 0
    typed: str = ""

    def problem(self, path: str, text: str) -> Problem:
        """Return a problem with the value at this place."""
        return Problem(self.source, self.line, self.column, path, text)

    def instead(self, wrong: str, right: str) -> str:
        """Return `right`, which corrects `wrong`; for the command line, return the whole corrected --set."""
        if not self.typed:
            return right
        pattern = rf"(?<![\w.])([\"']?){re.escape(wrong)}\1(?![\w.])"  # the quotes belong to the wrong value
        value = re.sub(pattern, lambda _: right, self.typed, count=1)
        return setting(self.source, value)


OVERRIDE = "--set "
"""Prefix of `source` for values from the command line."""


def setting(source: str, value: str) -> str:
    """Return the --set named by `source`, with its value replaced by `value`, as shell words."""
    import shlex  # needed only for mistakes

    return OVERRIDE + shlex.quote(f"{source.removeprefix(OVERRIDE)}={value}")


class Scalar(Frozen):
    """A string, number, boolean or null; `text` is the original spelling. `unset` = treat as missing."""

    value: str | int | float | bool | None
    place: Place
    text: str = ""
    unset: bool = False


class Items(Frozen):
    """A list."""

    items: "tuple[Value, ...]"
    place: Place


class Entries(Frozen):
    """A map in its original order; keys are strings and are unique."""

    entries: "tuple[tuple[Scalar, Value], ...]"
    place: Place

    def walk(self) -> "Iterator[tuple[str, Scalar, Value]]":
        """Yield (key, key with its place, value) of each entry."""
        return ((str(key.value), key, value) for key, value in self.entries)

    def get(self, name: str) -> "Value | None":
        """Return the value of a key, or None."""
        return next((value for key, _, value in self.walk() if key == name and not is_unset(value)), None)

    def with_key(self, name: str, new: "Value") -> "Entries":
        """Return this map with one key set."""
        kept = tuple(entry for entry in self.entries if entry[0].value != name)
        return Entries((*kept, (Scalar(name, new.place), new)), self.place)


Value = Scalar | Items | Entries
Data = str | int | float | bool | None | Sequence["Data"] | Mapping[str, "Data"]


def value_of(data: Data, place: Place) -> Value:
    """Convert plain data to a value at `place`."""
    match data:
        case Mapping():
            entries = ((Scalar(key, place, key), value_of(value, place)) for key, value in data.items())
            return Entries(tuple(entries), place)
        case Sequence() if not isinstance(data, str):
            return Items(tuple(value_of(item, place) for item in data), place)
        case _:
            return Scalar(data, place, str(data))


def is_unset(value: Value) -> bool:
    """Check whether a key counts as missing because its value, or every key of its section, is unset."""
    if isinstance(value, Entries):
        return bool(value.entries) and all(is_unset(entry) for _, entry in value.entries)
    return isinstance(value, Scalar) and value.unset


def at(value: Value | None, *steps: str) -> Value | None:
    """Return the value at a path of keys and list indices, or None."""
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
    """Return the string, number or boolean at a path of keys and list indices, or None."""
    found = at(value, *steps)
    return found.value if isinstance(found, Scalar) else None


def override(root: Value, path: list[str], new: Value) -> Value:
    """Return `root` with the value at `path` (keys and list indices) replaced. Raises KeyError."""
    if not path:
        return new
    step, rest = path[0], path[1:]
    if isinstance(root, Items):
        if not step.isdecimal():
            advice = "choose an item, as in [0], or replace the whole list"
            raise KeyError(f"it is a list here, which has no key {step}; {advice}")
        if not re.fullmatch("[0-9]{1,9}", step) or int(step) >= len(root.items):
            raise KeyError(f"index {step} is out of range: the list has {counted(len(root.items), 'item')}")
        items = list(root.items)
        items[int(step)] = override(items[int(step)], rest, new)
        return Items(tuple(items), root.place)
    if isinstance(root, Scalar) and root.value is not None:
        raise KeyError(f"{describe(root)} has no key {step}; replace the whole value")
    entries = root if isinstance(root, Entries) else Entries((), new.place)
    return entries.with_key(step, override(entries.get(step) or Scalar(None, new.place), rest, new))


# Values and corrections in messages

_SHELL_SYNTAX = r"[;&|<>()$`'\"\\*?]|^\w+="


def describe(value: Value) -> str:
    """Format a value for error messages."""
    match value:
        case Items():
            return "a list" if value.items else "an empty list"
        case Entries():
            return "a map"
        case Scalar(value=str(text)):
            line = text.replace("\n", r"\n")
            return f'"{line}"' if len(line) <= 60 else f'"{line[:57]}…"'
        case Scalar(value=None, text=text):
            return ("~, which YAML reads as null" if text == "~" else text) or "nothing"
        case Scalar(text=text):
            read = str(value.value).lower()
            odd = text and text.lower() != read and re.fullmatch(r"[A-Za-z]+|.*[:_xob].*|0[0-9]+", text)
            return f"{text}, which YAML reads as {read}" if odd else read


def as_list(text: str) -> str:
    """Return the words of `text` as a YAML list."""
    plain = r"(?![-=]$)[\w./@%+=~-]+"
    return f"[{', '.join(w if re.fullmatch(plain, w) else in_quotes(w) for w in words_of(text))}]"


def words_of(text: str) -> list[str]:
    """Split `text` into words at blanks, or else at commas."""
    words = text.split() if re.search(r"\s", text.strip()) else re.findall(r"(?:\[[^\]]*\]|[^,\[])+|\[", text)
    return [word for word in (word.strip(" ,") for word in words) if word]


def as_command(text: str) -> str:
    """Return a command as a YAML list: its words, or a shell that runs it if it has shell syntax."""
    return f"[sh, -c, {in_quotes(text)}]" if re.search(_SHELL_SYNTAX, text) else as_list(text)


def in_quotes(text: str) -> str:
    """Quote `text` for YAML."""
    return json.dumps(text, ensure_ascii=False)


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return the `known` word that is most similar to `word`; "" = none."""
    import difflib  # needed only for mistakes

    return next(iter(difflib.get_close_matches(word, list(known), 1, likeness)), "")


def colon_hint(text: str, place: Place) -> str:
    """Return a hint about a key and a value without a space between them."""
    found = re.fullmatch(r"([A-Za-z_]\w*):([^\s/].*)", text)
    return f"put a space after the colon: {place.instead(text, f'{found[1]}: {found[2]}')}" if found else ""


def records_hint(value: Entries, keys: Collection[str], main: str) -> str:
    """Return a hint to write a list of records instead of a single record or a map keyed by name."""
    names = [key for key, _, _ in value.walk()]
    if set(names) & set(keys):
        return f"; start each list item with a dash, even a single one: - {names[0]}: …"
    if not value.place.typed:
        return f"; write - {main}: {names[0]}"
    listed = ", ".join(f"{{{main}: {name}}}" for name in names)
    return f"; write {setting(value.place.source, f'[{listed}]')}"


def unquoted(value: Value) -> str:
    """Return the string that the user probably meant by a number, a switch, `{word}` or `word: word`."""
    match value:
        case Scalar(value=bool() | int() | float() | None, text=text):
            return text
        case Entries(entries=((Scalar(value=str(key)), Scalar(value=None, text="")),)):
            return f"{{{key}}}"
        case Entries(entries=((Scalar(value=str(key)), Scalar(text=text)),)):
            return f"{key}: {text}"
    return ""


def program_keys(text: str) -> dict[str, str]:
    """Return the keys for a `script` that is a whole command line, or {} if it is just a path."""
    if found := re.fullmatch(r"(\S+\.py)\s+(\S.*)", text):
        return {"script": found[1], "args": as_list(found[2])}
    found = re.fullmatch(r"((?:\S*/)?python[0-9.]*)\s+(-m\s+)?([^\s-]\S*)(?:\s+(\S.*))?", text)
    if found and not re.search(_SHELL_SYNTAX, text):
        keys = {"module" if found[2] else "script": found[3]}
        keys |= {"args": as_list(found[4])} if found[4] else {}
        return keys if found[1] in ("python", "python3") else {**keys, "python": found[1]}
    if re.match(r"(?:\S*/)?(?:python[0-9.]*|bash|sh)\s", text):
        return {"command": as_command(text)}
    return {}


# Writing

VERBATIM = "\ud800"
"""The beginning of a text to write without quotes, such as 0.10. No text that was decoded contains it."""
WIDTH = 100
"""Maximum characters of a list or map written on one line. A longer one gets a line for each item."""


def job_text(keys: Mapping[str, Any], notes: Sequence[tuple[str, str]], order: Iterable[str]) -> str:
    """Return a job file: the comments whose key is "", then each key in order, preceded by its comments."""

    def comments(key: str) -> list[str]:
        return [f"# {_escaped(text)}" for text, about in notes if about == key]

    lines = [*comments(""), ""] if comments("") else []
    for key in order:
        lines += [*comments(key), *(_entry(key, keys[key]) if key in keys else ())]
    return "\n".join(lines) + "\n"


def _entry(key: str, value: Data) -> list[str]:
    flow = f"{key}: {flow_text(value)}"
    if len(flow) > WIDTH and isinstance(value, Mapping):
        return [f"{key}:", *(f"  {name}: {flow_text(item)}" for name, item in value.items())]
    if len(flow) > WIDTH and isinstance(value, (list, tuple)):
        return [f"{key}:", *(f"  - {flow_text(item)}" for item in value)]
    return [flow]


# A string that needs no quotes in YAML 1.1 and 1.2, in any context.
_PLAIN = re.compile(
    r"(?!(?:y|n|yes|no|on|off|true|false|null)\Z)"
    r"(?:(?:--?|\.{0,2}/)?[a-z_][a-z0-9_./@%+=~-]*|[0-9]+(?:s|m|h))",
    re.IGNORECASE | re.ASCII,
)


def flow_text(data: Data) -> str:
    """Return YAML on a single line, like JSON with fewer quotes."""

    def quoted(found: re.Match[str]) -> str:
        plain = found[1].removeprefix(VERBATIM)
        return plain if plain != found[1] or _PLAIN.fullmatch(plain) else _escaped(found[0])

    return re.sub(r'"((?:[^"\\]|\\.)*)"', quoted, json.dumps(data, ensure_ascii=False))


def _escaped(text: str) -> str:
    """Return `text` on one line, with YAML escapes for invisible characters."""
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)
