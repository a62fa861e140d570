"""Reads job files: YAML with places, safe tags only, no aliases, no duplicate keys, bounded."""

import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from distlaunch.errors import JobError, Problem, UsageError
from distlaunch.job.build import Surroundings, build_spec
from distlaunch.job.document import Entries, Items, Place, Scalar, Value, override
from distlaunch.job.hosts import HostEntry, parse_hostfile
from distlaunch.job.paths import home_error
from distlaunch.job.spec import JobSpec

MAX_BYTES = 1 << 20
MAX_DEPTH = 20

_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_job(path: str, overrides: Sequence[str] = (), extra_args: Sequence[str] = ()) -> JobSpec:
    """The job of a YAML file, with ``key=value`` `overrides` and `extra_args` for the script.

    Raises `JobError` with every problem, or `UsageError` when the file can't be read.
    """
    document = parse(read_text(path), path)
    for text in overrides:
        document = _overridden(document, text)
    if extra_args:
        document = _with_args(document, extra_args)
    folder = str(Path(path).resolve().parent)
    around = Surroundings(folder, os.path.expanduser("~"), os.environ)
    return build_spec(document, path, around._replace(hostfile=_hostfile(document, around)))


def read_text(path: str) -> str:
    """The text of a file of at most MAX_BYTES. Raises `UsageError`."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"{path!r} is no file name") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES >> 20} MiB, which is no job file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from None


def parse(text: str, source: str) -> Value:
    """The document in `text`. Raises `JobError` naming the place of what YAML or we refuse."""
    problems: list[Problem] = []
    try:
        loader = _Loader(text)
        _check_events(text, source, problems)
        if problems:
            raise JobError(problems)
        node = loader.get_single_node()
        value = _value(loader, node, source, problems) if node else Scalar(None, Place(source))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(source, mark.line + 1, mark.column + 1) if mark else Place(source)
        raise JobError([place.problem("", f"not YAML: {error.problem or error.context}")]) from None
    except yaml.YAMLError as error:
        raise JobError([Place(source).problem("", f"not YAML: {error}".splitlines()[0])]) from None
    if problems:
        raise JobError(problems)
    return value


def _check_events(text: str, source: str, problems: list[Problem]) -> None:
    """Refuse aliases and deep nesting before anything recursive sees them."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            problems.append(
                _place(event, source).problem("", "aliases (*name) are not allowed in a job file")
            )
            return
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            problems.append(_place(event, source).problem("", f"nested deeper than {MAX_DEPTH} levels"))
            return


def _place(marked: yaml.Event | yaml.Node, source: str) -> Place:
    mark = marked.start_mark
    return Place(source, mark.line + 1, mark.column + 1) if mark else Place(source)


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
            problems.append(place.problem("", "a key must be a word"))
            continue
        key = key_node.value
        if key in seen:
            problems.append(place.problem(key, f"duplicate key; the first is on line {seen[key].line}"))
        seen.setdefault(key, place)
        entries.append((Scalar(key, place), _value(loader, value_node, source, problems)))
    return Entries(tuple(entries), _place(node, source))


def _overridden(document: Value, text: str) -> Value:
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise UsageError(f"--set {text}: write --set key=value, for example --set timeouts.job=1h")
    source = f"--set {path}"
    if not _is_text(text):
        raise UsageError(f"{source}: the value is not UTF-8 text")
    new = parse(value, source)
    steps = [step for part in path.split(".") for step in part.replace("]", "").split("[")]
    if len(steps) > MAX_DEPTH:
        raise UsageError(f"{source[:60]}…: deeper than {MAX_DEPTH} levels")
    try:
        return override(document, steps, _moved(new, Place(source)))
    except KeyError as error:
        raise UsageError(f"--set {text}: there is no {error.args[0]} to set") from None


def _is_text(text: str) -> bool:
    """Whether `text` came from valid UTF-8: other bytes of a command line are kept as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _moved(value: Value, place: Place) -> Value:
    """`value` standing at `place`: a command line has no lines and columns."""
    match value:
        case Scalar():
            return Scalar(value.value, place, value.text)
        case Items():
            return Items(tuple(_moved(item, place) for item in value.items), place)
        case Entries():
            return Entries(tuple((Scalar(k.value, place), _moved(v, place)) for k, v in value.entries), place)


def _with_args(document: Value, extra_args: Sequence[str]) -> Value:
    place = Place("--")
    more = tuple(Scalar(argument, place) for argument in extra_args)
    if not isinstance(document, Entries):
        return document
    given = document.get("args")
    if given is not None and not isinstance(given, Items):
        return document  # a mistake, to be told as such
    before = given.items if given else ()
    return document.with_key("args", Items((*before, *more), place))


def _hostfile(document: Value, around: Surroundings) -> tuple[HostEntry, ...] | None:
    named = document.get("hostfile") if isinstance(document, Entries) else None
    if not isinstance(named, Scalar) or not isinstance(named.value, str):
        return None  # not there, or a mistake that is told later
    if "\0" in named.value or home_error(named.value):
        return None  # not there, or a mistake that is told later
    path = around.path(named.value)
    problems: list[Problem] = []
    entries = parse_hostfile(read_text(path), path, problems)
    if problems:
        raise JobError(problems)
    return tuple(entries)
