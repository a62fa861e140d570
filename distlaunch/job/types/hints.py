"""Hints on values written differently from what their key, or YAML, expects."""

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from distlaunch.errors import Problem
from distlaunch.job.document import (
    Entries,
    Place,
    Scalar,
    Value,
    as_list,
    in_quotes,
    setting,
    words_of,
)

Check = Callable[[Value, str, list[Problem]], Any]
"""The check of a type: the value at a path, converted, or None and a problem more."""


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The one of the `known` words that `word` may have been meant for; "" = none."""
    import difflib  # only a mistake needs it

    return next(iter(difflib.get_close_matches(word, list(known), 1, likeness)), "")


def colon_hint(text: str, place: Place) -> str:
    """How to write a key and its value where the space between them was forgotten."""
    found = re.fullmatch(r"([A-Za-z_]\w*):([^\s/].*)", text)
    return f"put a space after the colon: {place.instead(text, f'{found[1]}: {found[2]}')}" if found else ""


def list_hint(value: Value, path: str, item: str, check: Check) -> str:
    """How to write a list whose items, called `item`, were given as one string."""
    match value:
        case Scalar(value=str(text)) if text.strip(" ,"):
            trial: list[Problem] = []
            for word in words_of(text):
                check(Scalar(word, value.place, word), path, trial)
            if trial:
                return f"; each item must be {item}"
            return f"; write {value.place.entry(path.rpartition('.')[2], text, as_list(text))}"
    return ""


def records_hint(value: Entries, keys: Collection[str], main: str) -> str:
    """How to write as a list one record of these keys, or several that were given as a mapping of names."""
    names = [key for key, _, _ in value.walk()]
    if set(names) & set(keys):
        return f"; start each list item with a dash, even a single one: - {names[0]}: …"
    if not value.place.typed:
        return f"; write - {main}: {names[0]}"
    listed = ", ".join(f"{{{main}: {name}}}" for name in names)
    return f"; write {setting(value.place.source, f'[{listed}]')}"


def quote_hint(value: Value, path: str, check: Check) -> str:
    """How to write a string that YAML has read as something else."""
    text = _unquoted(value)
    trial: list[Problem] = []
    if not text or check(Scalar(text, value.place), path, trial) is None:
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
