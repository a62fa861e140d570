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
_COMMENT = re.compile(r"#[^\n]*")
_HOME = re.compile(r"~|[A-Za-z_]\w*=(?:.*:)?~", re.DOTALL)
_PATTERN = re.compile(r"[*?]|(?<!=)\[[^\],]+\]|\{[^{}]*(?:,|\.\.)[^{}]*\}")
_QUOTED = "\0"


class Command(NamedTuple):
    """One simple command, and the operator behind it: `&&`, `|`, `;` …

    A shell would have put values for `variables`; `filled` are the words that have one, `homes` those in
    which it would have replaced a ~, and `patterns` those from which it would have made others: *.pt, {1..3}.
    """

    words: tuple[str, ...]
    filled: frozenset[str] = frozenset()
    variables: tuple[str, ...] = ()
    redirected: tuple[str, ...] = ()
    operator: str = ""
    homes: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


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
        self._homes: list[str] = []
        self._patterns: list[str] = []
        self._remarks: list[str] = []
        self._redirect = ""
        self._bare = ""
        self._word: str | None = None
        self._found: list[str] = []

    @property
    def between_words(self) -> bool:
        """Whether a # would begin a comment here."""
        return self._word is None

    def take(self, kind: str, text: str) -> None:
        """The next piece."""
        if kind in ("space", "redirect", "operator"):
            self._end_word()
        if kind == "redirect":
            self._redirect = text
        elif kind == "operator":
            self.end(text)
        elif kind == "comment":
            self._remarks.append(text)
        elif kind not in ("space", "joined"):
            meant = _meant(kind, text)
            self._word = (self._word or "") + meant
            self._bare += meant if kind == "plain" else _QUOTED * max(1, len(meant))
            self._found += _VARIABLE.findall(text) if kind in ("plain", "double", "filled") else []

    def end(self, operator: str = "") -> None:
        """The command is whole."""
        self._end_word()
        if self._words or operator or self._remarks:
            command = Command(
                tuple(self._words),
                filled=frozenset(self._filled),
                variables=tuple(dict.fromkeys(self._variables)),
                redirected=tuple(self._redirected),
                operator=operator,
                homes=tuple(dict.fromkeys(self._homes)),
                patterns=tuple(dict.fromkeys(self._patterns)),
                remarks=tuple(self._remarks),
            )
            self.commands.append(command)
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
            self._homes += [self._word] if _HOME.match(self._bare) else []
            self._patterns += [self._word] if _PATTERN.search(self._bare) else []
        self._word, self._redirect, self._found, self._bare = None, "", [], ""


def shell_commands(text: str) -> tuple[Command, ...]:
    """The commands of a line in POSIX sh's quoting, with nothing expanded. Raises `UsageError`."""
    reader = _Reader()
    at = 0
    while at < len(text):
        if reader.between_words and (found := _COMMENT.match(text, at)):
            reader.take("comment", found[0])
        elif found := _PIECE.match(text, at):
            reader.take(str(found.lastgroup), found[str(found.lastgroup)])
        else:
            raise UsageError(f"the command line, character {at + 1}: {_refused(text[at])}")
        at = found.end()
    reader.end()
    return tuple(reader.commands)


def _refused(character: str) -> str:
    if character in "'\"`":
        return f"this {character} is not closed"
    if character == "$":
        return "this $( or ${ is not closed"
    if character == "\\":
        return "a backslash ends the command, with nothing to escape"
    return f"{character} is shell syntax; quote it, or give only the command inside"


def _meant(kind: str, text: str) -> str:
    """What a quoted piece stands for: between double quotes a backslash protects only these."""
    return re.sub(r'\\(\n|[$`"\\])', lambda found: found[1].strip("\n"), text) if kind == "double" else text
