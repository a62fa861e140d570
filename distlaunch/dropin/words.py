"""A shell command line taken apart without a shell: commands, their words, and what only a shell fills in."""

import re
from typing import NamedTuple

from distlaunch.errors import UsageError

_FILLED = r"\$\{[^}]*\}|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`"
_PIECE = re.compile(
    rf"""
      (?P<joined>\\\n)
    | (?P<space>[ \t\r\n]+)
    | (?P<redirect>&>>?|[0-9]*(?:>>|>&|>\||<<<|<<|<>|<&|>|<))
    | (?P<operator>&&|\|\||\|&|[|&;])
    | '(?P<single>[^']*)'
    | "(?P<double>(?:\\.|{_FILLED}|[^"\\$`]|\$(?![({{]))*)"
    | \\(?P<escaped>.)
    | (?P<filled>{_FILLED})
    | (?P<plain>(?:[^ \t\r\n'"\\|&;<>()`$]|\$(?![({{]))+)
    """,
    re.VERBOSE | re.DOTALL,
)
_VARIABLE = re.compile(rf"(?<!\\)(\$(?:\w+|[@*])|{_FILLED})")


class Command(NamedTuple):
    """One simple command, and the operator behind it: `&&`, `|`, `;` …

    A shell would have put values for `variables`; `filled` are the words that have one.
    """

    words: tuple[str, ...]
    filled: frozenset[str] = frozenset()
    variables: tuple[str, ...] = ()
    redirected: tuple[str, ...] = ()
    operator: str = ""


class _Reader:
    """Makes words of pieces, and commands of words."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self._begin()

    def _begin(self) -> None:
        self._words: list[str] = []
        self._filled: set[str] = set()
        self._variables: list[str] = []
        self._redirected: list[str] = []
        self._redirect = ""
        self._word: str | None = None
        self._found: list[str] = []

    def take(self, kind: str, text: str) -> None:
        """The next piece."""
        if kind in ("space", "redirect", "operator"):
            self._end_word()
        if kind == "redirect":
            self._redirect = text
        elif kind == "operator":
            self.end(text)
        elif kind not in ("space", "joined"):
            self._word = (self._word or "") + _meant(kind, text)
            self._found += _VARIABLE.findall(text) if kind in ("plain", "double", "filled") else []

    def end(self, operator: str = "") -> None:
        """The command is whole."""
        self._end_word()
        if self._words or operator:
            variables, redirected = tuple(dict.fromkeys(self._variables)), tuple(self._redirected)
            filled = frozenset(self._filled)
            self.commands.append(Command(tuple(self._words), filled, variables, redirected, operator))
        self._begin()

    def _end_word(self) -> None:
        if self._word is None:
            return
        if self._redirect:
            space = "" if self._redirect.endswith("&") else " "
            self._redirected.append(f"{self._redirect}{space}{self._word}")
        else:
            self._words.append(self._word)
            self._variables += self._found
            self._filled |= {self._word} if self._found else set()
        self._word, self._redirect, self._found = None, "", []


def shell_commands(text: str) -> tuple[Command, ...]:
    """The commands of a line in POSIX sh's quoting, with nothing expanded. Raises `UsageError`."""
    reader = _Reader()
    at = 0
    while at < len(text):
        found = _PIECE.match(text, at)
        if not found:
            raise UsageError(f"the command line, character {at + 1}: {_refused(text[at])}")
        reader.take(str(found.lastgroup), found[str(found.lastgroup)])
        at = found.end()
    reader.end()
    return tuple(reader.commands)


def _refused(character: str) -> str:
    if character in "'\"`":
        return f"this {character} is not closed"
    if character == "$":
        return "this $( or ${ is not closed"
    if character == "\\":
        return "a backslash at the end continues nothing"
    return f"{character} belongs to the shell; quote it, or give only the command inside"


def _meant(kind: str, text: str) -> str:
    """What a quoted piece stands for: between double quotes a backslash protects only these."""
    return re.sub(r'\\(\n|[$`"\\])', lambda found: found[1].strip("\n"), text) if kind == "double" else text
