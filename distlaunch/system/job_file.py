"""Reads job files: from a path, with --set and arguments, to a job."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from distlaunch.errors import JobError, Problem, UsageError, reason
from distlaunch.job.build import build_spec
from distlaunch.job.document import (
    MAX_DEPTH,
    Entries,
    Items,
    Place,
    Scalar,
    Value,
    override,
    setting,
)
from distlaunch.job.fields import JOB, with_sections
from distlaunch.job.hosts import HostEntry, parse_hostfile
from distlaunch.job.paths import home_error
from distlaunch.job.reading import Surroundings
from distlaunch.job.spec import JobSpec
from distlaunch.job.types.records import Field
from distlaunch.schedulers import allocation_in, load, sections
from distlaunch.system.yaml_document import parse

MAX_BYTES = 1 << 20
STDIN = "-"
PIPED_NAME = "job"
"""The name of a job whose file has none."""


def load_job(path: str, overrides: Sequence[str] = (), extra_args: Sequence[str] = ()) -> JobSpec:
    """The job of a YAML file, with ``key=value`` `overrides` and `extra_args` for the script.

    Raises `JobError` with every problem, or `UsageError` when the file can't be read.
    """
    return job_of(read_job(path), path, overrides, extra_args)


def read_job(path: str) -> str:
    """The text of a job file. Raises `UsageError`."""
    if path.endswith(".py"):
        raise UsageError(f"{path} is a script, not a job file: write a job file with `script: {path}`")
    return read_text(path)


def job_of(
    text: str,
    path: str,
    overrides: Sequence[str] = (),
    extra_args: Sequence[str] = (),
    submitted: bool = False,
    in_image: bool = False,
) -> JobSpec:
    """The job of a text that was read from `path`; one that is `submitted` has the nodes that it asks for.

    `in_image` is as in `Surroundings`. Raises `JobError`, or `UsageError`, as `load_job`.
    """
    document = parse(text, source_of(path))
    for setting_text in overrides:
        document = _overridden(document, setting_text)
    if extra_args:
        document = _with_args(document, extra_args)
    around = _surroundings(path, submitted)._replace(in_image=in_image, sections=_sections(document))
    if not submitted:
        around = _with_hosts(around, document)
    return build_spec(document, source_of(path), around._replace(hostfile=_hostfile(document, around)))


def _sections(document: Value) -> dict[str, Field]:
    """The schedulers' sections that a document may have; a key that is no other may be one."""
    keys = [key for key, _, _ in document.walk()] if isinstance(document, Entries) else []
    return sections(set(keys) - JOB.fields.keys())


def _with_hosts(around: Surroundings, document: Value) -> Surroundings:
    """With the hosts that a scheduler, or the document's selector of pods, gives the job."""
    if asked := _pods(document):
        from distlaunch.kubernetes.running import pods_here, reach_pod  # few jobs run in pods

        allocation = pods_here(**asked)
        return around._replace(allocation=allocation, reach=partial(reach_pod, asked["namespace"]))
    given = allocation_in(os.environ, needed=not _names_hosts(document))
    if given is None:
        return around
    reach = partial(load(given.scheduler).reach, given, here=os.uname().nodename)
    return around._replace(allocation=given, reach=reach)


def _names_hosts(document: Value) -> bool:
    """Whether a job says itself where it runs: no scheduler needs to be asked."""
    if not isinstance(document, Entries):
        return False
    launcher = document.get("launcher")
    told = isinstance(launcher, Scalar) and launcher.value in ("local", "kubernetes")
    return told or isinstance(document.get("nodes"), Items) or document.get("hostfile") is not None


def _pods(document: Value) -> dict[str, Any]:
    """What tells the pods of a job with `launcher: kubernetes`; nothing if it lacks that."""
    launcher = document.get("launcher") if isinstance(document, Entries) else None
    section = document.get("kubernetes") if isinstance(document, Entries) else None
    if not isinstance(section, Entries) or not (
        isinstance(launcher, Scalar) and launcher.value == "kubernetes"
    ):
        return {}
    given = {key: section.get(key) for key in ("selector", "namespace", "container")}
    values = {key: value.value if isinstance(value, Scalar) else None for key, value in given.items()}
    strings = all(value is None or isinstance(value, str) for value in values.values())
    return values if strings and values["selector"] else {}


def _surroundings(path: str, submitted: bool) -> Surroundings:
    piped = is_piped(path)
    folder = _working_directory() if piped else os.path.dirname(os.path.realpath(path))
    return Surroundings(
        folder,
        os.path.expanduser("~"),
        os.environ,
        name=PIPED_NAME if piped else None,
        piped=piped,
        submitted=submitted,
    )


def name_in(path: str) -> str:
    """The name of a file's job, whatever else is in it. Raises `JobError`, or `UsageError` as `load_job`."""
    document = parse(read_text(path), path)
    named = document.get("name") if isinstance(document, Entries) else None
    given = named.value if isinstance(named, Scalar) else None
    return given if isinstance(given, str) else os.path.splitext(os.path.basename(path))[0]


def source_of(path: str) -> str:
    """How a message names a file."""
    return "standard input" if path == STDIN else path


def is_piped(path: str) -> bool:
    """Whether a file has no place of its own: standard input, or a shell's <(command)."""
    return path == STDIN or path.startswith("/dev/") or not os.path.isfile(path)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(f"can't read the current directory: {error.strerror}") from None


def read_text(path: str) -> str:
    """The text of a file of at most MAX_BYTES, "-" is standard input. Raises `UsageError`."""
    try:
        with open(0 if path == STDIN else path, "rb", closefd=path != STDIN) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: {reason(error)}") from None
    except ValueError:
        raise UsageError(f"{path!r} is not a valid file name") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES >> 20} MiB: not a job file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from None


def _overridden(document: Value, text: str) -> Value:
    path, equals, value = _as_text(text).partition("=")
    if not equals or not path:
        raise UsageError(f"--set {text}: expected key=value, for example --set timeouts.job=1h")
    source = f"--set {path}"
    new = parse(value, source)
    if (
        isinstance(new, Scalar) and new.value is None and not new.text
    ):  # nothing, or what YAML takes for a comment
        new = Scalar(value, new.place, value)
    steps = [step for part in path.split(".") for step in part.replace("]", "").split("[")]
    if len(steps) > MAX_DEPTH:
        raise UsageError(f"{source[:60]}…: deeper than {MAX_DEPTH} levels")
    if refused := _itemless(document, steps, value):
        raise UsageError(f"--set {text}: {refused}")
    new = _moved(new, Place(source, typed=value))
    if isinstance(new, Scalar) and new.value is None and not _is_callers(document, steps):
        new = new._replace(unset=True)
    try:
        return override(_spelled_out(document, steps), steps, new)
    except KeyError as error:
        raise UsageError(f"--set {text}: {error.args[0]}") from None


def _is_callers(document: Value, steps: list[str]) -> bool:
    """Whether null means the caller's value: for a variable that the file does not set."""
    return steps[-2:-1] == ["env"] and _found(document, steps) is None


def _itemless(document: Value, steps: list[str], value: str) -> str | None:
    """What to write if `steps` lead to an item of a list that the file does not have."""
    from distlaunch.job.reference import list_at  # few jobs are run with a --set

    job = with_sections(sections(set(steps[:1]) - JOB.fields.keys()))
    key, at, inner = list_at(job, steps)
    above = _found(document, steps[:at])
    if not at or isinstance(above, Items | Entries):
        return None
    item = value
    for step in reversed(inner):
        item = f"{{{step}: {item}}}"
    if inner and steps[0] in _SHORT and inner != [_SHORT[steps[0]][1]]:
        item = f"{{{_SHORT[steps[0]][1]}: …, {item[1:]}"
    whole = setting(key, f"[{item}]")
    return f"{key} is not a list in the job file, so its items can't be set; set the whole list: {whole}"


def _spelled_out(document: Value, steps: list[str]) -> Value:
    """`document` with a mapping where `steps` lead into one that stands there as its main value alone."""
    depth, key = _SHORT.get(steps[0], (0, ""))
    short = _found(document, steps[:depth]) if 0 < depth < len(steps) else None
    if not isinstance(short, Scalar) or short.value is None:
        return document
    whole = Entries(((Scalar(key, short.place), short),), short.place)
    return override(document, steps[:depth], whole)


_SHORT = {"nodes": (2, "host"), "spares": (2, "host"), "restarts": (1, "max")}
"""Key → how deep below it is what may be given as one value, and that value's key."""


def _found(value: Value | None, steps: list[str]) -> Value | None:
    for step in steps:
        match value:
            case Items(items=items) if step.isdecimal() and int(step) < len(items):
                value = items[int(step)]
            case Entries():
                value = value.get(step)
            case _:
                return None
    return value


def _as_text(argument: str) -> str:
    """An argument whose bytes are UTF-8, whatever the locale takes them for. Raises `UsageError`."""
    try:
        argument.encode()
    except UnicodeEncodeError:  # Python keeps bytes that the locale does not know as lone surrogates
        try:
            return os.fsencode(argument).decode()
        except UnicodeError:
            raise UsageError(f"--set {argument}: not UTF-8 text") from None
    return argument


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
        return document  # a mistake: the check reports it
    before = given.items if given else ()
    return document.with_key("args", Items((*before, *more), place))


def _hostfile(document: Value, around: Surroundings) -> tuple[HostEntry, ...] | None:
    named = document.get("hostfile") if isinstance(document, Entries) else None
    if not isinstance(named, Scalar) or not isinstance(named.value, str):
        return None  # not there, or a mistake that the check reports
    if "\0" in named.value or home_error(named.value):
        return None  # not there, or a mistake that the check reports
    path = around.path(named.value)
    problems: list[Problem] = []
    entries = parse_hostfile(read_text(path), path, problems)
    if problems:
        raise JobError(problems)
    return tuple(entries)
