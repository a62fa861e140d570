"""Reads YAML with positions and limits, but without aliases, and writes YAML that all parsers agree on."""

import contextlib
import re
from collections.abc import Iterable
from typing import Any

import yaml

from distlaunch.errors import JobError, Problem
from distlaunch.job.document import OVERRIDE, Entries, Items, Place, Scalar, Value, in_quotes

_LINE_END = "\r\n|[\r\n\x85\u2028\u2029]"
"""Regular expression for YAML line breaks."""
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_DEPTH = 20
"""Maximum levels of nested lists and maps."""
MAX_NUMBER = 40
"""Maximum characters of a number. Parsing base 60 takes quadratic time; Python prints at most 4300 digits."""
_NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})
_SCALARS = frozenset({*_NUMBERS, *(f"tag:yaml.org,2002:{name}" for name in ("str", "bool", "null"))})
_TAGS = _SCALARS | {"tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"}


def parse(text: str, source: str) -> Value:
    """Parse `text` from `source`. Raises `JobError` with the place of invalid or refused YAML."""
    reader = _Reader(text, source)
    try:
        value = reader.document()
    except yaml.MarkedYAMLError as error:
        reader.problems = [_not_yaml(error, text, source)]
    except yaml.YAMLError as error:
        reader.problems = [Place(source).problem("", f"not YAML: {error}".splitlines()[0])]
    if reader.problems:
        raise JobError(reader.problems)
    return value


def _not_yaml(error: yaml.MarkedYAMLError, text: str, source: str) -> Problem:
    """Return the problem with text that PyYAML can't parse, with an explanation of common mistakes."""
    from distlaunch.job.yaml_errors import Mistake, explained  # most files are valid YAML

    mark, since = error.problem_mark or error.context_mark, error.context_mark or error.problem_mark
    message, within = str(error.problem or ""), str(error.context or "")
    unexplained = f"not YAML: {message or within}"
    if not mark or not since:
        return Place(source).problem("", unexplained)
    lines = tuple(re.split(_LINE_END, text))
    hint = explained(Mistake(message, within, (mark.line, mark.column), (since.line, since.column), lines))
    place = _place(source, text, *(hint.at if hint else (mark.line, mark.column)))
    correction = place.instead(hint.wrong, hint.right) if hint and hint.wrong else ""
    return place.problem("", hint.words + correction if hint else unexplained)


def _place(source: str, text: str, line: int, column: int) -> Place:
    """Return a position in `text`. Values from the command line have no line and column."""
    on_line = source.startswith(OVERRIDE)
    return Place(source, typed=text) if on_line else Place(source, line + 1, column + 1)


def _refused_feature(event: yaml.Event) -> tuple[str, str] | None:
    """Return the name of a YAML feature that job files can't use, with its spelling if it may be text."""
    if isinstance(event, yaml.AliasEvent):
        return "aliases (*name)", f"*{event.anchor}"
    if isinstance(event, yaml.ScalarEvent) and event.anchor and not event.value:
        return "anchors (&name)", f"&{event.anchor}"
    tag = getattr(event, "tag", None)
    if tag and tag not in _TAGS:
        if not isinstance(event, yaml.ScalarEvent):
            return "tags (!name)", ""
        return "tags (!name)", f"{tag.replace('tag:yaml.org,2002:', '!!')} {event.value}".strip()
    return None


class _Reader:
    """A reader that converts YAML text to values and collects problems."""

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source
        self.problems: list[Problem] = []

    def document(self) -> Value:
        """Return the whole document. Raises `YAMLError`."""
        self._check_events()
        if self.problems:
            return Scalar(None, Place(self.source))
        self.loader = _Loader(self.text)
        node = self.loader.get_single_node()
        return self._value(node) if node else Scalar(None, Place(self.source))

    def _check_events(self) -> None:
        """Refuse aliases and deep nesting before any recursive code runs."""
        depth = 0
        for event in yaml.parse(self.text, Loader=_Loader):
            if refused := _refused_feature(event):
                (feature, word), place = refused, self._place(event)
                advice = place.instead(word, in_quotes(word)) if word else ""
                text = f"{feature} are not allowed in a job file"
                text += f"; if it is plain text, quote it: {advice}" if advice else ""
                self.problems.append(place.problem("", text))
                return
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                text = f"nested more than {MAX_DEPTH} levels deep"
                self.problems.append(self._place(event).problem("", text))
                return

    def _place(self, marked: yaml.Event | yaml.Node) -> Place:
        mark = marked.start_mark
        return _place(self.source, self.text, mark.line, mark.column) if mark else Place(self.source)

    def _value(self, node: yaml.Node) -> Value:
        if isinstance(node, yaml.SequenceNode):
            return Items(tuple(map(self._value, node.value)), self._place(node))
        return self._mapping(node) if isinstance(node, yaml.MappingNode) else self._scalar(node)

    def _scalar(self, node: yaml.Node) -> Scalar:
        value = node.value
        # Other scalars, such as dates, keep their spelling.
        if node.tag in _SCALARS and (node.tag not in _NUMBERS or len(value) <= MAX_NUMBER):
            # The value may not match its tag, as in !!bool maybe.
            with contextlib.suppress(ValueError, KeyError, IndexError, ArithmeticError):
                value = self.loader.construct_object(node)
        return Scalar(value, self._place(node), node.value)

    def _mapping(self, node: yaml.MappingNode) -> Entries:
        """Convert a map. Keys that aren't words, or that occur twice, are problems."""
        entries: list[tuple[Scalar, Value]] = []
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            place = self._place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                braces = isinstance(key_node, yaml.MappingNode) and key_node.flow_style
                hint = "; quote a value that begins with {{" if braces else ""
                self.problems.append(place.problem("", f"a key must be a word{hint}"))
                continue
            key = key_node.value
            if key in lines:
                text = f"duplicate key; the first is on line {lines[key]}"
                self.problems.append(place.problem(key, text))
            lines.setdefault(key, key_node.start_mark.line + 1)
            entries.append((Scalar(key, place), self._value(value_node)))
        return Entries(tuple(entries), self._place(node))


# Writing

_PLAIN = r"[A-Za-z/][A-Za-z0-9_./-]*"
_BLOCK = r"[!-~](?:[ -~]*[!-~])?(?:\n(?:[ -~]*[!-~])?)+"
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Make PyYAML write a repeated object in full, not as an alias."""
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Represent a string plainly, as a block or in double quotes. Called by PyYAML."""
    plain = re.fullmatch(_PLAIN, text) and text.lower() not in _WORDS
    style = None if plain else "|" if re.fullmatch(_BLOCK, text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _string)


def yaml_text(documents: Iterable[Any]) -> str:
    """Write documents with enough quotes that all parsers read them alike.

    For example, 1e-4 is a number in Kubernetes and a string in PyYAML.
    """
    layout: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": float("inf")}
    text: str = yaml.dump_all(documents, Dumper=_Dumper, explicit_start=True, **layout)
    return text
