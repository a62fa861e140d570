"""Plain explanations of YAML syntax errors, with corrections."""

import re
from collections.abc import Callable
from typing import NamedTuple

from distlaunch.job.document import as_list, in_quotes

Mark = tuple[int, int]
"""Line and column, from 0."""


class Mistake:
    """A parser error: message, enclosing construct and its start (`since`), and all lines of the text.

    `line` is the line of the error; `before` and `rest` are its parts before and after the error.
    `start_line` is the line where the construct starts.
    """

    def __init__(self, error: str, within: str, at: Mark, since: Mark, lines: tuple[str, ...]) -> None:
        self.error, self.within, self.at, self.since, self.lines = error, within, at, since, lines
        self.line, self.start_line = ("".join(lines[mark[0] : mark[0] + 1]) for mark in (at, since))
        self.before, self.rest = self.line[: at[1]], self.line[at[1] :].strip()


class Hint(NamedTuple):
    """An explanation, its place, and a correction: `right` instead of `wrong`."""

    words: str
    at: Mark
    wrong: str = ""
    right: str = ""


def explained(mistake: Mistake) -> Hint | None:
    """Return an explanation if the mistake is a common one."""
    for error, within, explain in _EXPLANATIONS:
        fits = re.search(error, mistake.error) and re.search(within, mistake.within)
        if fits and (hint := explain(mistake)):
            return hint
    return None


def _quoted(words: str, at: Mark, wrong: str) -> Hint:
    return Hint(f"{words}; quote it: ", at, wrong, in_quotes(wrong))


def _tab(mistake: Mistake) -> Hint | None:
    if mistake.line[: mistake.at[1] + 1].strip(" ").startswith("\t"):
        return Hint("tabs can't indent: use spaces", mistake.at)
    return None


def _second_document(mistake: Mistake) -> Hint:
    words = "a second document starts here, but a job file holds one job: put the other in its own file"
    return Hint(words, mistake.at)


def _unclosed(mistake: Mistake) -> Hint:
    return Hint(f"this {mistake.start_line[mistake.since[1]]} is not closed", mistake.since)


def _colon(mistake: Mistake) -> Hint | None:
    """Find a key without a space after its colon. The parser may report this a line later."""
    return _no_space(mistake, mistake.at[0]) or _no_space(mistake, mistake.at[0] - 1)


def _no_space(mistake: Mistake, number: int) -> Hint | None:
    line = mistake.lines[number] if 0 <= number < len(mistake.lines) else ""
    found = re.match(r"\s*(?:- )?(([A-Za-z_]\w*):)([^\s/].*)", line)
    if not found:
        return None
    at = (number, found.end(1) - 1)
    return Hint("put a space after the colon: ", at, found[1] + found[3], f"{found[1]} {found[3]}")


def _no_colon(mistake: Mistake) -> Hint:
    text = mistake.start_line.strip()
    if spaced := _no_space(mistake, mistake.since[0]):
        return spaced
    if found := re.fullmatch(r"([A-Za-z_]\w*)\s*=\s*(.+)", text):
        words = "write a colon between a key and its value: "
        return Hint(words, mistake.since, text, f"{found[1]}: {found[2]}")
    return Hint(f'"{text[:60]}" is not followed by a colon; write key: value', mistake.since)


def _bad_start(mistake: Mistake) -> Hint | None:
    """Explain a plain value whose first character has a special meaning in YAML."""
    at = mistake.at if "cannot start any token" in mistake.error else mistake.since
    found = re.match(r"\s*(?:- )?(?:[\w.-]+: +)?([\[\"'{]).*([\]\"'}]) +$", mistake.lines[at[0]][: at[1]])
    if found and found[1] + found[2] in ("[]", "{}", "''", '""'):  # such as `[ -f x ] || exit`
        return _after_value(Mistake(mistake.error, mistake.within, at, at, mistake.lines))
    word = _word(mistake.lines[at[0]], at[1])
    return _quoted(f"an unquoted value can't start with {word[0]}", at, word) if word.strip() else None


def _word(line: str, column: int) -> str:
    """Return the value at `column`: the rest of the line, or inside brackets up to a comma."""
    before, rest = line[:column], re.sub(r"\s#.*", "", line[column:])
    inside = any(before.count(mark) > before.count(end) for mark, end in ("[]", "{}"))
    return (re.split(r"[,\]}]", rest)[0] if inside else rest.rstrip(",")).strip()


def _nested_bracket(mistake: Mistake) -> Hint | None:
    """Explain [ or {, which starts a nested list or map, inside a plain value of a list."""
    if found := re.search(r"[^\s,\[\"']+\[[0-9, -]+\]", mistake.line):
        return Hint("quote a range inside a list: ", mistake.at, found[0], in_quotes(found[0]))
    start = re.search(r"[^\s,\[\]{}\"']+$", mistake.before)
    rest = re.match(r"(?:\[[^\[\]]*\]|\{[^{}]*\}|[^\s,\[\]{}])+", mistake.line[mistake.at[1] :])
    if not start or not rest or rest[0][0] not in "[{":
        return None
    return _quoted(f"an unquoted value in a list can't contain {rest[0][0]}", mistake.at, start[0] + rest[0])


def _unclosed_bracket(mistake: Mistake) -> Hint:
    after = mistake.rest
    if mistake.at[0] > mistake.since[0] or not after:
        return _unclosed(mistake)
    if after.startswith(":"):
        item = re.split(r"[,\[{]\s*", mistake.before)[-1] + re.split(r"\s*[,\]}]", after)[0]
        value = item.partition(": ")[2] if "mapping" in mistake.within else item
        return _quoted('an unquoted value can\'t contain ": "', mistake.at, value)
    return Hint(f"a comma is missing before {re.split(r'[,}]|]', after)[0][:20]}", mistake.at)


def _colon_in_value(mistake: Mistake) -> Hint | None:
    found = re.match(r"\s*(?:- )?[\w.-]+: +(\S.*)", mistake.line)
    if not found or found.start(1) > mistake.at[1]:
        return None
    return _quoted('an unquoted value can\'t contain ": "', mistake.at, found[1].rstrip())


def _indentation(mistake: Mistake) -> Hint | None:
    begins = re.match(r"\s*(?:- )?[\w.-]+$|\s*$", mistake.before)
    if not begins or not mistake.line.strip():
        return None
    words = "this line's indentation doesn't match the lines above it: "
    return Hint(f"{words}the keys of a map must line up, and so must the items of a list", mistake.at)


def _after_value(mistake: Mistake) -> Hint:
    """Explain text after the closing quote or bracket of a value."""
    found = re.match(r"\s*(?:- )?(?:[\w.-]+: +)?(?:- )?([\"'{\[].*)", mistake.line)
    if not found or found.start(1) >= mistake.at[1] - 1:
        return Hint("a quote from an earlier line is still open here; close it on that line", mistake.at)
    value, rest = found[1].rstrip(), mistake.rest
    words = f"unexpected {rest[:20]} after the end of the value"
    if value[0] == "[" and not re.match(r"[|&;<>]", rest):
        return Hint(f"{words}: remove it, or put it in the list", mistake.at)
    whole = value[1:-1] if value[0] == value[-1] == "'" else value
    return Hint(f"{words}; quote the whole: ", mistake.at, value, in_quotes(whole))


def _list_on_the_line(mistake: Mistake) -> Hint:
    value = mistake.rest
    if value == "-":
        return _quoted("an unquoted value can't be just a dash", mistake.at, value)
    words = "put each list item on its own line, or the list in brackets: "
    return Hint(words, mistake.at, value, as_list(" ".join(value[1:].split())))


def _escape(mistake: Mistake) -> Hint | None:
    found = re.match(r'"((?:\\.|[^"\\])*)"', mistake.start_line[mistake.since[1] :])
    if not found:
        return None
    words = "in double quotes a backslash starts an escape; to keep it, use single quotes: "
    return Hint(words, mistake.at, found[0], "'" + found[1].replace("'", "''") + "'")


def _question_mark(mistake: Mistake) -> Hint | None:
    found = re.search(r"(?:[\[,:] *)(\?) *(?:[,\]]|$)", mistake.start_line)
    if not found:
        return None
    return _quoted("an unquoted value can't be just a question mark", (mistake.since[0], found.start(1)), "?")


def _missing_value(mistake: Mistake) -> Hint:
    after = mistake.rest
    if "block node" in mistake.within and after:
        return _quoted(f"an unquoted value can't start with {after[0]}", mistake.at, after)
    if after.startswith("-"):
        return Hint("list items in brackets take no dashes: [a, b]", mistake.at)
    return Hint(f"a value is missing before {after[0]}" if after else "a bracket is not closed", mistake.at)


_EXPLANATIONS: tuple[tuple[str, str, Callable[[Mistake], Hint | None]], ...] = (
    ("", "", _tab),
    ("another document", "", _second_document),
    ("end of stream", "quoted scalar", _unclosed),
    ("mapping values", "", _colon),
    ("expected ':'", "", _no_colon),
    ("alphabetic or numeric|cannot start any token", "", _bad_start),
    ("", "scanning a (tag|block)", _bad_start),
    ("mapping keys|',' or", "", _question_mark),
    ("", "^while parsing a flow", _nested_bracket),
    ("',' or|<stream end>", "", _unclosed_bracket),
    ("mapping values", "", _colon_in_value),
    ("mapping values|expected key|expected '-'|<block end>", "", _indentation),
    ("expected key|expected '-'|<block end>|<document start>", "", _after_value),
    ("sequence entries", "", _list_on_the_line),
    ("escape character", "", _escape),
    ("expected (the )?node content", "", _missing_value),
)
"""Patterns for an error and its construct, and the function that explains them. The first match is used."""
