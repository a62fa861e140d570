"""A job file's text from its keys and comments."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from distlaunch.errors import UsageError
from distlaunch.job.build import Surroundings, build_spec
from distlaunch.job.document import Entries, Items, Place, Scalar, Value
from distlaunch.job.fields import JOB
from distlaunch.job.placeholders import literal

Data = str | int | float | bool | None | Sequence["Data"] | Mapping[str, "Data"]
WIDTH = 100
"""A list or mapping that is longer than this has a line for each item."""
NO_SCRIPT = "train.py"


class Note(NamedTuple):
    """A comment, above the key that it is about, or at the top."""

    text: str
    key: str = ""


class Draft(NamedTuple):
    """A job file in the making."""

    keys: Mapping[str, Data] = {}
    notes: tuple[Note, ...] = ()


def joined(parts: Iterable[Draft]) -> Draft:
    """All keys and notes; mappings of the same key are joined."""
    keys: dict[str, Data] = {}
    notes: list[Note] = []
    for part in parts:
        for key, value in part.keys.items():
            before = keys.get(key)
            both = isinstance(before, Mapping) and isinstance(value, Mapping)
            keys[key] = {**before, **value} if both else value  # type: ignore[dict-item]
        notes += part.notes
    return Draft(keys, tuple(dict.fromkeys(notes)))


def program_draft(words: Sequence[str]) -> Draft:
    """The script and its arguments, or a place for them."""
    if not words:
        return Draft({"script": NO_SCRIPT}, (Note("put your script here, and its args", "script"),))
    return Draft({"script": as_path(words[0]), **args_of(words[1:])})


def args_of(words: Sequence[str], first: Sequence[str] = ()) -> dict[str, Data]:
    """`args` if there are any: those of ours, then `words`, which arrive as they are."""
    args = [*first, *map(literal, words)]
    return {"args": args} if args else {}


def as_path(text: str) -> str:
    """A path as a shell has left it: a ~ that is still there is part of a name."""
    return f"./{text}" if text.startswith("~") else text


def check_draft(draft: Draft, source: str) -> None:
    """Raises `JobError` when no job file may say so, `UsageError` for what is no text."""
    text = "".join((*_texts(draft.keys), *(note.text for note in draft.notes)))
    if re.search("[\ud800-\udfff]", text):
        raise UsageError(f"{source}: not UTF-8 text")
    build_spec(_value(draft.keys, Place(source)), source, Surroundings("/", "/", {}))


def _texts(data: Data) -> list[str]:
    match data:
        case str():
            return [data]
        case Mapping():
            return [text for key, value in data.items() for text in (key, *_texts(value))]
        case Sequence():
            return [text for item in data for text in _texts(item)]
    return []


def _value(data: Data, place: Place) -> Value:
    match data:
        case Mapping():
            entries = ((Scalar(key, place, key), _value(value, place)) for key, value in data.items())
            return Entries(tuple(entries), place)
        case Sequence() if not isinstance(data, str):
            return Items(tuple(_value(item, place) for item in data), place)
        case _:
            return Scalar(data, place, str(data))


def draft_document(draft: Draft) -> dict[str, object]:
    """The same for machines."""
    keys = {key: draft.keys[key] for key in _order(draft) if key in draft.keys}
    return {"job": keys, "comments": [note.text for note in draft.notes]}


def draft_text(draft: Draft) -> str:
    """The job file: notes at the top, then the keys in the reference's order, their notes above them."""
    lines = [*_comments(draft, ""), ""] if _comments(draft, "") else []
    for key in _order(draft):
        lines += _comments(draft, key)
        lines += _entry(key, draft.keys[key]) if key in draft.keys else []
    return "\n".join(lines) + "\n"


def _order(draft: Draft) -> list[str]:
    wanted = {*draft.keys, *(note.key for note in draft.notes if note.key)}
    return [key for key in JOB.fields if key in wanted] + sorted(wanted - set(JOB.fields))


def _comments(draft: Draft, key: str) -> list[str]:
    return [f"# {_escaped(note.text)}" for note in draft.notes if note.key == key]


def _entry(key: str, value: Data) -> list[str]:
    flow = f"{key}: {flow_text(value)}"
    if len(flow) <= WIDTH or isinstance(value, str) or not value:
        return [flow]
    match value:
        case Mapping():
            return [f"{key}:", *(f"  {name}: {flow_text(item)}" for name, item in value.items())]
        case Sequence():
            return [f"{key}:", *(f"  - {flow_text(item)}" for item in value)]
    return [flow]


def flow_text(data: Data) -> str:
    """YAML on one line."""
    match data:
        case None:
            return "null"
        case bool():
            return str(data).lower()
        case str():
            return _string(data)
        case Mapping():
            return "{" + ", ".join(f"{key}: {flow_text(value)}" for key, value in data.items()) + "}"
        case Sequence():
            return "[" + ", ".join(map(flow_text, data)) + "]"
    return str(data)


# What YAML 1.1 and 1.2 both take for a string without quotes, whatever stands around it.
_PLAIN = re.compile(r"(?:--?|\.{0,2}/)?[A-Za-z_][A-Za-z0-9_./@%+=~-]*|[0-9]+(?:s|m|h)")
_NO_STRING = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def _string(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _NO_STRING:
        return text
    return '"' + _escaped(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _escaped(text: str) -> str:
    """`text` on one line, with what can't be seen as YAML's escapes."""
    return "".join(char if char.isprintable() else _escape(ord(char)) for char in text)


def _escape(code: int) -> str:
    if code in (9, 10):
        return {9: "\\t", 10: "\\n"}[code]
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
