"""Reads a job from a path, --set values and arguments."""

import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import JobError, Problem, UsageError, reason
from distlaunch.job.build import build_spec
from distlaunch.job.document import (
    VERBATIM,
    Entries,
    Items,
    Place,
    Scalar,
    Value,
    at,
    job_text,
    override,
    setting,
    value_of,
    word_at,
    words_of,
)
from distlaunch.job.nodes import HostEntry, Surroundings, host_entries, parse_hostfile, users_and_hosts
from distlaunch.job.spec import JobSpec
from distlaunch.job.text import home_error
from distlaunch.job.types import Either, ListOf, Record, Tree, Type
from distlaunch.job.yaml_document import MAX_DEPTH, parse
from distlaunch.schedulers import allocation_in, job_keys, load, sections, title_of
from distlaunch.wording import counted

COMMAND_LINE = "the command line"
"""The name used instead of a path for a job without a file."""
MAX_BYTES = 1 << 20
STDIN = "-"
PIPED_NAME = "job"
"""Default name of a job whose file has no name."""


class Typed(Frozen):
    """Parts of a job on the command line: module, hosts, number of ranks, and the file to save the job to."""

    module: str | None = None
    hosts: str | None = None
    ranks: int | None = None
    save: str | None = None


class _Spelled(Tree):
    """A job to be saved. In arguments and variables, `0.10` and `yes` must keep their spelling."""

    def _plain(self, value: Value, path: str, problems: list[Problem]) -> Any:
        if isinstance(value, Scalar) and isinstance(value.value, int | float):
            return VERBATIM + value.text
        return super()._plain(value, path, problems)


def load_job(
    path: str | None, overrides: Sequence[str] = (), extra_args: Sequence[str] = (), more: Typed | None = None
) -> JobSpec:
    """Return the job of a YAML file or a script, with ``key=value`` `overrides` and `extra_args`.

    Without a `path`, `more` or the overrides name the program. Raises `JobError` with every problem, or
    `UsageError` if the file can't be read.
    """
    spec, document, directory = load_document(path, overrides, extra_args, typed := more or Typed())
    if typed.save is not None:
        keys = _Spelled().check(document, "", [])
        write_new("--save", typed.save, job_text(keys, (), job_keys(keys).fields), directory)
    return spec


def with_code(spec: JobSpec) -> JobSpec:
    """Return `spec` with a snapshot of the code to copy to the nodes, if any. Raises `DistlaunchError`."""
    if not spec.sync.tree:
        return spec
    from distlaunch.launch.snapshot import with_tree  # few jobs bring their code

    return with_tree(spec)


def check_not_simulated(spec: JobSpec, on: str = "") -> None:
    """Raise `JobError` if this machine or the host `on`, such as a login node, would simulate the nodes."""
    simulated = not spec.allocation and spec.one_machine and len(spec.nodes) > 1
    if spec.sections and simulated and "launcher" not in spec.places:
        title = " or ".join(title_of(key.replace("_", "-")) for key in spec.sections)
        from shlex import quote

        file = quote(spec.source) if spec.invocation.file else "job.yaml"
        where = f"--on {quote(on)} " if on else ""
        submit = f"`distlaunch submit {where}{file}` submits it to {title}"
        submit += "" if spec.invocation.file else " (`distlaunch dry-run --save job.yaml …` writes that file)"
        here = f"to simulate {len(spec.nodes)} nodes on {on or 'this machine'}, use --set launcher=local"
        raise spec.error("nodes", f"not in an allocation (no variables of {title} are set): {submit}; {here}")


def load_document(
    path: str | None, overrides: Sequence[str], extra_args: Sequence[str], typed: Typed
) -> tuple[JobSpec, Value, str]:
    """Return a job as `load_job` does, its document, and the directory to which its paths are relative."""
    _check_twice(typed, overrides)
    path, document = _document(path, typed.module, overrides)
    if typed.hosts is not None and isinstance(document, Entries):
        document = _on_hosts(document, typed.hosts)
    document = _completed(document, overrides, extra_args)
    spec = _built(document, path)
    if typed.ranks is not None:
        per_node = [node.procs for node in _built(_overridden(document, "procs_per_node=null"), path).nodes]
        # None: the job doesn't set the node's number of ranks, so the node gets a share of the rest.
        share = (typed.ranks - sum(procs or 0 for procs in per_node)) // (per_node.count(None) or 1)
        document = override(document, ["procs_per_node"], value_of(max(share, 1), Place("-n")))
        spec = _built(document, path)
        if (total := sum(node.procs or 0 for node in spec.nodes)) != typed.ranks:
            what = f"the job would have {total} ranks on {counted(len(spec.nodes), 'node')}"
            shares = "hosts without their own number get equal shares"
            why = shares if None in per_node else "the sum of the hosts' own numbers"
            hint = "choose another number, or set it for each host, as in -H a:2,b:4"
            raise UsageError(f"-n {typed.ranks}: {what} ({why}); {hint}")
    return spec, document, os.getcwd() if is_piped(path) else os.path.dirname(os.path.realpath(path))


def _check_twice(typed: Typed, overrides: Sequence[str]) -> None:
    """Raise `UsageError` if an option and --set set the same key."""
    for option, value, keys, what in (
        ("-H", typed.hosts, "nodes|hostfile", "nodes"),
        ("-n", typed.ranks, "procs_per_node", "ranks"),
    ):
        for found in [match for text in overrides if value and (match := re.match(f"({keys})=", text))]:
            raise UsageError(f"{option} and --set {found[1]} both set the {what}; remove one of them")


def _document(path: str | None, module: str | None, overrides: Sequence[str]) -> tuple[str, Value]:
    """Return the path of the job file, or COMMAND_LINE, and the document."""
    if not (path or module or any(re.match("(script|module|command)=", text) for text in overrides)):
        raise UsageError("specify a job file or a script, as in `distlaunch run train.py -n 4`")
    if path is not None and module is not None:
        hint = "; if it is the job file, set module in it instead" if path.endswith((".yaml", ".yml")) else ""
        what = f"{path!r} can't be used with -m; to pass it to the module, put it after --{hint}"
        raise UsageError(f"-m {module}: {what}")
    if path is not None and not path.endswith(".py"):
        return path, parse(read_job(path), source_of(path))
    kind, word = ("module", module or "") if path is None else ("script", path)
    keys = {"name": os.path.basename(word).removesuffix(".py"), kind: word} if word else {}
    return COMMAND_LINE, value_of(keys, Place(COMMAND_LINE))


def _on_hosts(document: Entries, hosts: str) -> Entries:
    """Set nodes to the HOST or HOST:PROCS from -H. Hosts in the job file keep their other settings."""
    place, nodes, listed = Place("-H"), at(document, "nodes"), list[Value]()
    known: dict[str, tuple[str | None, Entries]] = {}
    try:
        for item in nodes.items if isinstance(nodes, Items) else ():
            record = item if isinstance(item, Entries) else Entries(((Scalar("host", place), item),), place)
            pairs = users_and_hosts(str(word_at(record, "host")), place)
            known |= {host: (user, record) for user, host in pairs}
        for host, user, procs in [each for word in words_of(hosts) for each in host_entries([word])]:
            login, record = known.get(host, (None, Entries((), place)))
            for key, value in (("host", host), ("user", user or login), ("procs", procs)):
                record = record.with_key(key, value_of(value, place)) if value else record
            listed.append(record if record.entries[1:] else record.entries[0][1])
    except ValueError as error:
        raise UsageError(f"-H: {error}") from None
    document = document.with_key("hostfile", Scalar(None, place, unset=True))
    return document.with_key("nodes", Items(tuple(listed), place))


def write_new(option: str, path: str, text: str, directory: str) -> None:
    """Write a new job file in `directory`, to which its paths are relative. Raises `UsageError`."""
    if os.path.dirname(os.path.realpath(path)) != directory:
        raise UsageError(
            f"{option} {path}: save the job in {directory}; its paths are relative to that directory"
        )
    try:
        with open(path, "x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except BaseException:  # a full disk, Ctrl-C
                os.unlink(path)
                raise
    except OSError as error:
        raise UsageError(f"{option} {path}: {reason(error)}") from None


def read_job(path: str) -> str:
    """Return the text of a job file or of another launcher's file. Raises `UsageError` for a program."""
    from shlex import quote  # only a mistake needs it

    if path.endswith(".py"):
        hint = f"`distlaunch dry-run {quote(path)} --save job.yaml` creates one"
        raise UsageError(f"{path} is a script, not a job file: {hint}")
    text = read_text(path)
    if text.startswith("#!") and "\n#SBATCH" in text:
        hint = f"submit it with sbatch, or convert it with `distlaunch import sbatch {quote(path)}`"
        raise UsageError(f"{source_of(path)} is a Slurm batch script, not a job file: {hint}")
    return text


def job_of(
    text: str,
    path: str,
    overrides: Sequence[str] = (),
    extra_args: Sequence[str] = (),
    submitted: bool = False,
    in_image: bool = False,
) -> JobSpec:
    """Return the job described by the text from `path`. A `submitted` job gets the nodes that it requests.

    `in_image` is as in `Surroundings`. Raises `JobError` or `UsageError`, as `load_job` does.
    """
    document = _completed(parse(text, source_of(path)), overrides, extra_args)
    return _built(document, path, submitted, in_image)


def _completed(document: Value, overrides: Sequence[str], extra_args: Sequence[str]) -> Value:
    for setting_text in overrides:
        document = _overridden(document, setting_text)
    return _with_args(document, extra_args) if extra_args else document


def _built(document: Value, path: str, submitted: bool = False, in_image: bool = False) -> JobSpec:
    # An unknown key may be a scheduler's section.
    keys = [key for key, _, _ in document.walk()] if isinstance(document, Entries) else []
    around = _surroundings(path)._replace(submitted=submitted, in_image=in_image, sections=sections(keys))
    if not submitted:
        around = _with_hosts(around, document)
    return build_spec(document, source_of(path), around._replace(hostfile=_hostfile(document, around)))


def _with_hosts(around: Surroundings, document: Value) -> Surroundings:
    """Add the hosts of the scheduler's allocation, or the pods that the document selects."""
    if selected := _pods(document):
        from distlaunch.kubernetes.pods import pods_here, reach_pod  # few jobs run in pods

        allocation = pods_here(**selected)
        return around._replace(allocation=allocation, reach=partial(reach_pod, selected["namespace"]))
    given = allocation_in(os.environ, needed=not _names_hosts(document))
    if given is None:
        return around
    reach = partial(load(given.scheduler).reach, given, here=os.uname().nodename)
    return around._replace(allocation=given, reach=reach)


def _names_hosts(document: Value) -> bool:
    """Check whether the job file itself determines the hosts, instead of a scheduler."""
    known = word_at(document, "launcher") in ("local", "kubernetes")
    return known or isinstance(at(document, "nodes"), Items) or at(document, "hostfile") is not None


def _pods(document: Value) -> dict[str, Any]:
    """Return the pod selection of a job with `launcher: kubernetes`; {} without a selector."""
    keys = ("selector", "namespace", "container")
    given: dict[str, Any] = {key: word_at(document, "kubernetes", key) for key in keys}
    strings = all(value is None or isinstance(value, str) for value in given.values())
    wanted = word_at(document, "launcher") == "kubernetes" and given["selector"]
    return given if strings and wanted else {}


def _surroundings(path: str) -> Surroundings:
    file, home = "" if is_piped(path) else os.path.realpath(path), os.path.expanduser("~")
    directory, name = (os.path.dirname(file), None) if file else (os.getcwd(), PIPED_NAME)
    return Surroundings(directory, home, os.environ, name=name, file=file)


def source_of(path: str) -> str:
    """Return the name of a file for messages."""
    return "standard input" if path == STDIN else path


def is_piped(path: str) -> bool:
    """Check whether a file has no directory: standard input, or the shell's <(command)."""
    return path == STDIN or path.startswith("/dev/") or not os.path.isfile(path)


def read_text(path: str) -> str:
    """Return the text of a file of at most MAX_BYTES; "-" is standard input. Raises `UsageError`."""
    try:
        with open(0 if path == STDIN else path, "rb", closefd=path != STDIN) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        stem, suffix = os.path.splitext(path)
        other = stem + {".yaml": ".yml", ".yml": ".yaml"}.get(suffix, suffix)
        hint = f"; did you mean {other}?" if other != path and os.path.exists(other) else ""
        raise UsageError(f"{path}: {reason(error)}{hint}") from None
    except ValueError:
        raise UsageError(f"{path!r} contains a null character") from None
    program = "; to run a program, write `command: [./PROGRAM]` in a YAML file"
    hint = program if data.startswith(b"\x7fELF") else ""
    if len(data) > MAX_BYTES:
        raise UsageError(f"{source_of(path)}: larger than {MAX_BYTES >> 20} MiB{hint}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source_of(path)}: not UTF-8 text (byte {error.start}){hint}") from None


def _overridden(document: Value, text: str) -> Value:
    """Return `document` with one --set applied, where null removes the key. Raises `UsageError`."""
    path, equals, value = _as_text(text).partition("=")
    if not equals or not path:
        raise UsageError(f"--set {text}: expected key=value, for example --set timeouts.job=1h")
    source = f"--set {path}"
    new = parse(value, source)
    # An empty value, or one that YAML reads as a comment, or whose end it does.
    is_empty = isinstance(new, Scalar) and new.value is None and not new.text
    if isinstance(new, Scalar) and (is_empty or re.match(r"\s+#", value.strip().removeprefix(new.text))):
        new = Scalar(value, new.place, value)
    steps = [step for part in path.split(".") for step in part.replace("]", "").split("[")]
    if len(steps) > MAX_DEPTH:
        raise UsageError(f"{source[:60]}…: deeper than {MAX_DEPTH} levels")
    # For a variable that the file doesn't set, null passes on the caller's value.
    callers = steps[-2:-1] == ["env"] and at(document, *steps) is None
    if isinstance(new, Scalar) and new.value is None and not callers:
        new = new._replace(unset=True)
    try:
        return override(_opened(document, steps), steps, new)
    except KeyError as error:
        raise UsageError(f"--set {text}: {error.args[0]}") from None


def _opened(document: Value, steps: list[str]) -> Value:
    """Return `document` with shorthands along the path `steps` expanded to maps.

    Raises KeyError if `steps` lead to a list item that the file doesn't have.
    """
    kind: Type | None = job_keys(steps[:1])
    for depth, step in enumerate(steps):
        found, inner = at(document, *steps[:depth]), kind.inner(step) if kind else None
        if isinstance(kind, Record) and kind.main and isinstance(found, Scalar) and found.value is not None:
            whole = Entries(((Scalar(kind.main, found.place), found),), found.place)
            document = override(document, steps[:depth], whole)
        is_item = isinstance(kind, ListOf | Either) and inner and step.isdecimal()
        if is_item and not isinstance(found, Items | Entries):
            key = ".".join(steps[:depth])
            text = f"{key} is not a list in the job file, so its items can't be set"
            raise KeyError(f"{text}; set the whole list: {setting(key, '[…]')}")
        kind = inner
    return document


def _as_text(argument: str) -> str:
    """Decode an argument as UTF-8, independently of the locale. Raises `UsageError`."""
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        raise UsageError(f"--set {argument}: not UTF-8 text") from None


def _with_args(value: Value, extra_args: Sequence[str], of_node: bool = False) -> Value:
    """Add arguments to those of the job, and to those of each node that has its own."""
    if not isinstance(value, Entries):
        return value  # a mistake, which the check reports, or only a host name
    for key in ("nodes", "spares"):
        if isinstance(nodes := value.get(key), Items):
            items = tuple(_with_args(node, extra_args, of_node=True) for node in nodes.items)
            value = value.with_key(key, Items(items, nodes.place))
    place, given = Place("--"), value.get("args")
    if isinstance(given, Items) or not (given or of_node):
        more = (Scalar(argument, place) for argument in extra_args)
        value = value.with_key("args", Items((*(given.items if given else ()), *more), place))
    return value


def _hostfile(document: Value, around: Surroundings) -> tuple[HostEntry, ...] | None:
    """Return the entries of the job's hostfile; None = the job has no hostfile."""
    given, named = at(document, "hostfile"), word_at(document, "hostfile")
    if given is None or not isinstance(named, str) or "\0" in named or home_error(named):
        return None  # missing, or a mistake that the check reports
    path = around.path(named)
    try:
        return parse_hostfile(read_text(path), path)
    except UsageError as error:
        raise JobError([given.place.problem("hostfile", str(error))]) from None
