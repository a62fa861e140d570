"""A shell command line taken apart without a shell."""

import re
from typing import NamedTuple

from distlaunch.errors import UsageError

_PIECE = re.compile(
    r"""
      (?P<joined>\\\n)
    | (?P<space>[ \t\r\n]+)
    | '(?P<single>[^']*)'
    | "(?P<double>(?:\\.|[^"\\])*)"
    | \\(?P<escaped>.)
    | (?P<plain>[^ \t\r\n'"\\|&;<>()]+)
    """,
    re.VERBOSE | re.DOTALL,
)
_VARIABLE = re.compile(r"(?<!\\)(\$(?:\w+|\{[^}]*\}|\()|`)")


class ShellWords(NamedTuple):
    """The words, and what a shell would have put a value for, as it is written there."""

    words: tuple[str, ...]
    variables: tuple[str, ...] = ()


def shell_words(text: str) -> ShellWords:
    """The words of one command in POSIX sh's quoting, with nothing expanded. Raises `UsageError`."""
    words: list[str] = []
    variables: list[str] = []
    word: str | None = None
    for found in _pieces(text):
        kind = str(found.lastgroup)
        if kind == "space":
            words += [] if word is None else [word]
            word = None
        elif kind != "joined":
            word = (word or "") + _meant(kind, found[kind])
        if kind in ("plain", "double"):
            variables += _VARIABLE.findall(found[kind])
    words += [] if word is None else [word]
    return ShellWords(tuple(words), tuple(dict.fromkeys(variables)))


def _pieces(text: str) -> list[re.Match[str]]:
    pieces: list[re.Match[str]] = []
    at = 0
    while at < len(text):
        found = _PIECE.match(text, at)
        if not found:
            raise UsageError(f"the command line, character {at + 1}: {_refused(text[at])}")
        pieces.append(found)
        at = found.end()
    return pieces


def _refused(character: str) -> str:
    if character in "'\"":
        return f"this {character} is not closed"
    if character == "\\":
        return "a backslash stands at the end"
    return f"{character} is the shell's; give the launcher's command alone, or quote it"


def _meant(kind: str, text: str) -> str:
    """What a quoted piece stands for: between double quotes a backslash protects only these."""
    return re.sub(r'\\(\n|[$`"\\])', lambda found: found[1].strip("\n"), text) if kind == "double" else text
