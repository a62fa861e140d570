"""YAML: read as job files have it, bounded, with places and without aliases, and written for every parser."""

import re
from collections.abc import Iterable
from typing import Any

import yaml

from distlaunch.errors import JobError, Problem
from distlaunch.job.document import MAX_DEPTH, OVERRIDE, Entries, Items, Place, Scalar, Value, in_quotes

_LINE_END = "\r\n|[\r\n\x85\u2028\u2029]"
"""As YAML has it, which counts lines by it."""
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse(text: str, source: str) -> Value:
    """The document in `text`, from `source`. Raises `JobError` naming the place of what YAML or we refuse."""
    problems: list[Problem] = []
    try:
        loader = _Loader(text)
        _check_events(text, source, problems)
        if problems:
            raise JobError(problems)
        node = loader.get_single_node()
        value = _value(loader, node, source, problems) if node else Scalar(None, Place(source))
    except yaml.MarkedYAMLError as error:
        raise JobError([_not_yaml(error, text, source)]) from None
    except yaml.YAMLError as error:
        raise JobError([Place(source).problem("", f"not YAML: {error}".splitlines()[0])]) from None
    if problems:
        raise JobError(problems)
    return value


def _not_yaml(error: yaml.MarkedYAMLError, text: str, source: str) -> Problem:
    from distlaunch.job.yaml_errors import Mistake, explained  # most files are YAML

    mark, since = error.problem_mark or error.context_mark, error.context_mark or error.problem_mark
    said, within = str(error.problem or ""), str(error.context or "")
    if not mark or not since:
        return Place(source).problem("", f"not YAML: {said or within}")
    lines = tuple(re.split(_LINE_END, text))
    told = explained(Mistake(said, within, (mark.line, mark.column), (since.line, since.column), lines))
    if not told:
        return Place(source, mark.line + 1, mark.column + 1).problem("", f"not YAML: {said or within}")
    place = Place(source, told.at[0] + 1, told.at[1] + 1, text if source.startswith(OVERRIDE) else "")
    return place.problem("", told.words + (place.instead(told.wrong, told.right) if told.wrong else ""))


def _check_events(text: str, source: str, problems: list[Problem]) -> None:
    """Refuse aliases and deep nesting before anything recursive sees them."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if refused := _refused_feature(event):
            problems.append(_feature_problem(*refused, _place(event, source, text)))
            return
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            problems.append(_place(event, source).problem("", f"nested more than {MAX_DEPTH} levels deep"))
            return


def _refused_feature(event: yaml.Event) -> tuple[str, str] | None:
    """What a value begins with that a job file can't have, and the value as it was written."""
    if isinstance(event, yaml.AliasEvent):
        return "aliases (*name)", f"*{event.anchor}"
    if isinstance(event, yaml.ScalarEvent) and event.anchor and not event.value:
        return "anchors (&name)", f"&{event.anchor}"
    tag = getattr(event, "tag", None) or ""
    if isinstance(event, yaml.ScalarEvent) and tag.startswith("!"):
        return "tags (!name)", f"{tag} {event.value}".strip()
    return None


def _feature_problem(feature: str, word: str, place: Place) -> Problem:
    fixed = place.instead(word, in_quotes(word))
    return place.problem(
        "", f"{feature} are not allowed in a job file; if it is plain text, quote it: {fixed}"
    )


def _place(marked: yaml.Event | yaml.Node, source: str, text: str = "") -> Place:
    """Where it stands; `text` is the whole that was parsed."""
    mark, typed = marked.start_mark, text if source.startswith(OVERRIDE) else ""
    return Place(source, mark.line + 1, mark.column + 1, typed) if mark else Place(source)


def _value(loader: yaml.SafeLoader, node: yaml.Node, source: str, problems: list[Problem]) -> Value:
    place = _place(node, source)
    if isinstance(node, yaml.SequenceNode):
        return Items(tuple(_value(loader, item, source, problems) for item in node.value), place)
    if isinstance(node, yaml.MappingNode):
        return _mapping(loader, node, source, problems)
    return _scalar(loader, node, place)


def _scalar(loader: yaml.SafeLoader, node: yaml.Node, place: Place) -> Scalar:
    if node.tag not in _SCALAR_TAGS or (node.tag in _NUMBERS and len(node.value) > MAX_NUMBER):
        # A date, say: we have no use for one, and its spelling is what was meant.
        return Scalar(node.value, place, node.value)
    try:
        return Scalar(loader.construct_object(node), place, node.value)
    except (
        ValueError,
        KeyError,
        IndexError,
        ArithmeticError,
    ):  # a tag that does not fit, such as !!bool maybe
        return Scalar(node.value, place, node.value)


_NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})
MAX_NUMBER = 40
"""Characters of a number: YAML's base 60 takes quadratic time, and Python prints at most 4300 digits."""
_SCALAR_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null"))


def _mapping(
    loader: yaml.SafeLoader, node: yaml.MappingNode, source: str, problems: list[Problem]
) -> Entries:
    entries: list[tuple[Scalar, Value]] = []
    seen: dict[str, Place] = {}
    for key_node, value_node in node.value:
        place = _place(key_node, source)
        if not isinstance(key_node, yaml.ScalarNode):
            braces = isinstance(key_node, yaml.MappingNode) and key_node.flow_style
            hint = "; quote a value that begins with {{" if braces else ""
            problems.append(place.problem("", f"a key must be a word{hint}"))
            continue
        key = key_node.value
        if key in seen:
            problems.append(place.problem(key, f"duplicate key; the first is on line {seen[key].line}"))
        seen.setdefault(key, place)
        entries.append((Scalar(key, place), _value(loader, value_node, source, problems)))
    return Entries(tuple(entries), _place(node, source))


# Writing

_PLAIN = r"[A-Za-z/][A-Za-z0-9_./-]*"
_BLOCK = r"[!-~](?:[ -~]*[!-~])?(?:\n(?:[ -~]*[!-~])?)+"
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = re.fullmatch(_PLAIN, text) and text.lower() not in _WORDS
    style = None if plain else "|" if re.fullmatch(_BLOCK, text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _string)


def yaml_text(documents: Iterable[Any]) -> str:
    """One document after another, quoted so that every parser reads the same.

    Kubernetes' takes 1e-4 for a number, PyYAML for a word.
    """
    text: str = yaml.dump_all(
        documents,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf"),
        explicit_start=True,
    )
    return text
