"""The Python API: jobs, their runs, and functions that are called on every rank.

    import distlaunch as dl

    with dl.Job.load("job.yaml", nodes=["gpu-a", "gpu-b"]).start() as run:
        for line in run.logs(follow=True, rank=0):
            print(line.text)
        print(run.wait().exit_status)

A child process controls each run, independently of this process. Any thread may use a run. Like the commands,
the API reads a run's state from the run directory.
"""

import asyncio
import base64
import contextlib
import html
import json
import os
import pickle
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from numbers import Number
from types import FunctionType
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.check.findings import Report
from distlaunch.cli.function import MARK
from distlaunch.cli.job_file import Typed, check_not_simulated, load_job
from distlaunch.errors import DistlaunchError, Exit, JobError, Problem, UsageError
from distlaunch.job.document import Place, flow_text, value_of
from distlaunch.job.keys import JOB
from distlaunch.job.spec import JobSpec
from distlaunch.launch.addresses import plan_without_nodes
from distlaunch.launch.node_check import check as check_nodes
from distlaunch.observers.observer import Observer, Printed
from distlaunch.plan.placement import LaunchPlan
from distlaunch.plan.shell_text import shell_text
from distlaunch.plan.workers import planned_workers
from distlaunch.runs.following import interrupt
from distlaunch.runs.html import page, write_page
from distlaunch.runs.replay import Playback
from distlaunch.runs.report import report_of
from distlaunch.runs.run import Run as Status
from distlaunch.runs.run import directories, document_in, find, living, remembered, run_in
from distlaunch.runs.why import Explanation, explain
from distlaunch.wording import exit_words

LOOK_S = 0.05
"""Seconds between two checks of a run directory."""
_CONTROLLER = "import sys; sys.path[0] = sys.argv[1]; from distlaunch.cli.child import enter; enter()"
MAX_CALL = 1 << 20
"""Maximum bytes of a packed call, which is passed to the ranks as arguments."""
MAX_WORD = 100_000
"""Maximum characters of one argument; Linux allows 128 KiB."""


class RunError(DistlaunchError):
    """The error for a failed run. `result` contains the root cause."""

    def __init__(self, result: "Result") -> None:
        super().__init__(f"{result.run}: {result.why}")
        self.result = result
        self.root_cause = result.root_cause


class RankError(RunError):
    """The error for a rank of `call` without a result. `traceback` is its exception's traceback, if any."""

    def __init__(self, result: "Result", rank: int, traceback: str) -> None:
        super().__init__(result)
        self.rank, self.traceback = rank, traceback

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (super().__str__(), self.traceback)))


class RootCause(Frozen):
    """The reason why a run failed: the `rank` or `node` at its root, if any, and the rank's `last_output`.

    `kind` is exception, exit, signal, oom, collective, stall or node_lost; None for any other cause.
    """

    text: str
    kind: str | None
    rank: int | None
    node: str | None
    last_output: tuple[str, ...]


class Result(Frozen):
    """The result of a run.

    `state` is SUCCEEDED, FAILED, CANCELLED or LOST. `exit_status` is the exit status of `distlaunch run`.
    `statuses` maps each rank to its exit status in the last attempt (None = lost). `directory` is the run
    directory.
    """

    run: str
    state: str
    exit_status: int
    why: str
    root_cause: RootCause | None
    attempts: int
    seconds: float
    statuses: Mapping[int, int | None]
    directory: str

    @property
    def ok(self) -> bool:
        """Return whether the job succeeded."""
        return self.state == "SUCCEEDED"

    def check(self) -> "Result":
        """Return this result, or raise `RunError` if the job did not succeed."""
        if not self.ok:
            raise RunError(self)
        return self

    def _repr_html_(self) -> str:
        return _table([("run", self.run), ("state", self.state), ("root cause", self.why or "none")])


class Line(Frozen):
    """A line of output: its text without the newline, its rank, and whether it was printed to stderr."""

    rank: int
    text: str
    stderr: bool
    attempt: int


class Plan:
    """A job's plan, as printed by `dry-run`: where each rank runs, and its variables."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan, self._workers = plan, planned_workers(plan)

    @property
    def ranks(self) -> tuple[tuple[int, str, int], ...]:
        """Return (rank, node, local rank) for each rank."""
        parts = self._plan.nodes
        return tuple((part.ranks[local], part.label, local) for part in parts for local in range(part.procs))

    def env(self, rank: int) -> dict[str, str]:
        """Return the variables that distlaunch sets for a rank. Raises IndexError."""
        for worker in (each for workers in self._workers.values() for each in workers):
            if worker.rank == rank:
                own = {name: value.text for name, value in worker.env.items() if not value.inherited}
                return {**worker.defaults, **own, **worker.contract}
        raise IndexError(f"the job has no rank {rank}")

    def to_shell(self) -> str:
        """Return shell commands that start the ranks without distlaunch."""
        return shell_text(self._plan, self._workers)

    def _repr_html_(self) -> str:
        return _table([(str(rank), f"{node}:{local}") for rank, node, local in self.ranks])


class Job:
    """A job, from a job file or from keys. Raises `JobError` with every problem, before anything is started.

    `nodes` is a number or a list of hosts. Any key of a job file can be passed, as in `restarts={"max": 3}`,
    or with a dot, as in `**{"timeouts.stop": "5s"}`. Keys override those in the file.
    """

    def __init__(
        self,
        script: str | os.PathLike[str] | None = None,
        *,
        module: str | None = None,
        nodes: int | Sequence[str] | None = None,
        args: Sequence[Any] = (),
        _file: str | None = None,
        **keys: Any,
    ) -> None:
        directory = _current_directory()
        if script or _file:  # -m would exclude these
            keys["module"], module = module, None
        given = {"script": script, "nodes": list(nodes) if isinstance(nodes, tuple) else nodes, **keys}
        settings = {name: value for name, value in given.items() if value is not None}
        overrides = []
        for name, value in settings.items():
            overrides.append(f"{name}={flow_text(_plain(name, value, _path_text))}")
        if not _file and str(script).endswith(".py"):  # gives the job its name
            _file, overrides = str(script), overrides[1:]
        words = _words(args)
        self.spec: JobSpec = load_job(_file, overrides, words, Typed(module))
        request = {"path": _file, "overrides": overrides, "args": words, "module": module}
        self._request: dict[str, Any] = {**request, "directory": directory}  # for `cli.child`

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, args: Sequence[Any] = (), **keys: Any) -> "Job":
        """Return the job described by a job file. `keys` override those in the file."""
        return cls(_file=os.fspath(path), args=args, **keys)

    def plan(self) -> Plan:
        """Return the plan, without contacting any node. Raises `JobError`."""
        return Plan(plan_without_nodes(self.spec))

    def check(self) -> Report:
        """Connect to the nodes and return any problems, as `distlaunch check` does. Raises `JobError`."""
        check_not_simulated(self.spec)
        return check_nodes(self.spec)

    def start(self) -> "Run":
        """Start the job. Return its run once all ranks are running or it has ended. Raises `JobError`."""
        return Run(*_started(self._request))

    def run(self) -> "Result":
        """Run the job, and return its result. Ctrl-C stops the job."""
        with self.start() as run:
            return run.wait()


def _current_directory() -> str:
    """Return the current directory, where relative paths and `runs` are. Raises `DistlaunchError`."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise DistlaunchError("the current directory no longer exists: os.chdir to one that does") from None


def _plain(name: str, value: Any, other_text: Callable[[Any], str]) -> Any:
    """Return the value of a key as in a job file. Raises `UsageError` if `other_text` raises TypeError."""
    try:
        return json.loads(json.dumps(value, default=other_text))
    except (TypeError, ValueError) as error:
        hint = "use strings, numbers, lists and dicts"
        raise UsageError(f"{name}: can't be written to a job file: {error}; {hint}") from None


def _words(args: Any) -> list[str]:
    """Return arguments as words. Raises `JobError` for what a job file can't have as `args`."""
    # A number of another library, such as numpy, keeps its own spelling.
    given = _plain("args", args, lambda value: str(value) if isinstance(value, Number) else _path_text(value))
    problems: list[Problem] = []
    words = JOB.fields["args"].kind.check(value_of(given, Place("Job")), "args", problems)
    if problems:
        raise JobError(problems)
    return list(words)


def _path_text(value: Any) -> str:
    """Return a path as text. Raises TypeError for other values."""
    if isinstance(value, os.PathLike) and isinstance(path := os.fspath(value), str):
        return path
    raise TypeError(f"{value!r:.80} has the type {type(value).__name__}")


def _started(request: Mapping[str, Any]) -> "tuple[str, str, subprocess.Popen[bytes]]":
    """Start a controller. Return the run's ID, its directory and the process. Raises `DistlaunchError`."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CONTROLLER, os.path.dirname(os.path.dirname(__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=request["directory"],
        start_new_session=True,  # Ctrl-C reaches only this process, which then stops the job
    )
    assert child.stdin
    assert child.stdout
    try:
        child.stdin.write(json.dumps({**request, "program": os.getpid()}).encode() + b"\n")
        child.stdin.flush()
        known = json.loads(child.stdout.readline() or b"{}")
        if "run" in known:
            child.stdout.readline()  # all ranks are running, or the run has ended
            return known["run"], known["directory"], child
    except BaseException:
        _dismiss(child)
        raise
    _dismiss(child)
    was = "was " if child.returncode < 0 else ""
    what = f"before the job started, its controller {was}{exit_words(child.returncode)}"
    raise DistlaunchError(known.get("error", f"{what}; a traceback, if any, is on stderr"))


def _dismiss(child: "subprocess.Popen[bytes]") -> None:
    """Make a controller stop its job and exit."""
    for pipe in filter(None, (child.stdin, child.stdout)):
        with contextlib.suppress(OSError):
            pipe.close()
    child.wait()


class Logs:
    """The lines of a run's output. Iterate over them only once, with `for` or `async for`.

    With `marked`, the lines include the results of `call`.
    """

    def __init__(self, run: "Run", follow: bool, rank: int | None, marked: bool = False) -> None:
        self._run, self._follow, self._rank, self._marked = run, follow, rank, marked

    def _steps(self) -> Generator[list[Line], None, None]:
        """Yield the new lines found by each check. With `follow`, also check after the run has ended."""
        lines = _Lines(self._marked)
        wanted = lambda entry: self._rank in (None, entry.rank)  # noqa: E731
        with contextlib.closing(Playback(self._run.directory, lines, wanted)) as playback:
            over = False
            while not over:
                over = not self._follow or self._run.over
                playback.catch_up()
                yield lines.taken(over)

    def __iter__(self) -> Iterator[Line]:
        """Yield the lines. If `follow` is set, wait for further lines until the run ends."""
        with contextlib.closing(self._steps()) as steps:
            for found in steps:
                yield from found
                if self._follow and not found:
                    time.sleep(LOOK_S)

    async def __aiter__(self) -> AsyncIterator[Line]:
        """Yield the lines, as `__iter__` does."""
        with contextlib.closing(self._steps()) as steps:
            for found in steps:
                for line in found:
                    yield line
                if self._follow and not found:
                    await asyncio.sleep(LOOK_S)


class Run:
    """A run of a job. A `with` statement stops the run at the end of the block."""

    def __init__(self, run: str, directory: str, child: "subprocess.Popen[bytes] | None" = None) -> None:
        self.id, self.directory, self._child = run, directory, child

    @classmethod
    def attach(cls, run: str) -> "Run":
        """Find a run by its ID or a unique prefix, its directory, or the name or file of its job."""
        _current_directory()
        found = find(run)
        return cls(found.id, found.directory)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        if self._child:
            self.stop()

    def _status(self) -> Status:
        found = run_in(self.directory) or living(self.id) or remembered(self.id)
        if found is None:
            why = f"its run directory {self.directory} was removed or renamed"
            kept = "distlaunch torchrun removes its own after a success"
            raise DistlaunchError(f"{self.id}: {why} ({kept})")
        return found

    @property
    def state(self) -> str:
        """Return the run's state, such as RUNNING."""
        return self._status().status.state.value

    @property
    def over(self) -> bool:
        """Return whether the run has ended. If so, reap the controller's process."""
        child = self._child  # another thread may do this at the same time
        if child and child.poll() is not None:
            _dismiss(child)
            self._child = None
        return self._child is None and not self._status().alive

    def wait(self, timeout: float | None = None) -> Result:
        """Wait until the run ends, and return the result. Raises TimeoutError after `timeout` seconds."""
        show, until = _progress(), None if timeout is None else time.monotonic() + timeout
        while not self.over:
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"{self.id} has not ended within {timeout:g} s")
            show(self)
            time.sleep(LOOK_S)
        show(self)
        return self.result()

    def __await__(self) -> Generator[Any, None, Result]:
        """Wait until the run ends, and return the result."""
        return self._ended().__await__()

    async def _ended(self) -> Result:
        while not self.over:
            await asyncio.sleep(LOOK_S)
        return self.result()

    def result(self) -> Result:
        """Return the result. Raises `DistlaunchError` if the run has not ended."""
        run = self._status()
        if run.alive:
            raise DistlaunchError(f"{self.id} has not ended")
        known, status = document_in(self.directory), run.status
        cause = known.get("cause") or {"text": status.why}
        last_output = tuple(cause.get("last_output") or ())
        root = RootCause(cause["text"], cause.get("kind"), cause.get("rank"), cause.get("node"), last_output)
        return Result(
            self.id,
            status.state.value,
            int(Exit.NODE_LOST) if status.exit_status is None else status.exit_status,
            status.why,
            root if root.text else None,
            len(known.get("restarts", ())) + 1,
            known.get("seconds", status.since - status.began),
            {each["rank"]: each["status"] for each in known.get("workers", ())},
            self.directory,
        )

    def logs(self, follow: bool = False, rank: int | None = None) -> Logs:
        """Return the output of all ranks, or of one; `follow` waits for more until the run ends."""
        return Logs(self, follow, rank)

    def why(self) -> Explanation:
        """Explain why the run failed, or what it is waiting for, as `distlaunch why` does."""
        return explain(self._status(), with_stacks=True)

    def report(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the HTML page of `distlaunch report`. If `path` is set, write the page there, too."""
        text = page(report_of(self._status()))
        if path is not None:
            write_page(os.fspath(path), text, self.id)
        return text

    def stop(self) -> Result:
        """Stop the ranks, killing them after the job's `timeouts.stop`, and return the result."""
        if not self.over:
            interrupt(self._status())
        return self.wait()

    def detach(self) -> str:
        """Let the run outlive the `with` block and this process. Return the run's ID."""
        if self._child and self._child.stdin:
            with contextlib.suppress(OSError):
                self._child.stdin.write(b"detach\n")
                self._child.stdin.close()
            self._child = None
        return self.id

    def _repr_html_(self) -> str:
        status = self._status().status
        return _table([("run", self.id), ("state", status.state.value), ("nodes", status.where)])


def list_runs() -> list[Run]:
    """List the active runs of this user, as `distlaunch ps` does."""
    _current_directory()
    known = (run_in(directory) for directory in directories().values())
    return [Run(each.id, each.directory) for each in known if each and each.alive]


def call(function: Callable[..., Any] | str, *args: Any, procs: int = 1, **more: Any) -> list[Any]:
    """Call a function on every rank, and return the results in rank order. Ctrl-C stops the job.

    `function` is "package.module:name", or a function. Lambdas, methods, nested functions and those of
    `__main__` need cloudpickle. `procs` is the number of ranks per node. Job file keys in `more`, such as
    `nodes`, apply to the job. All other arguments are passed to the function. Raises `RankError` if a rank
    did.
    """
    keys = {name: value for name, value in more.items() if name.partition(".")[0] in JOB.fields}
    for key in keys.keys() & {"procs_per_node", "module"}:
        raise UsageError(f"call() doesn't take {key}: it runs `function`, on `procs` ranks per node")
    packed = _packed_call(function, args, {name: value for name, value in more.items() if name not in keys})
    job = Job(module="distlaunch", procs_per_node=procs, **keys)
    job._request["call"] = packed
    with job.start() as run:
        result = run.wait()
    if not result.ok:
        cause = result.root_cause
        if cause is None or cause.rank is None:
            raise RunError(result)
        errors = [line.text for line in run.logs(rank=cause.rank) if line.stderr]
        begins = max((i for i, text in enumerate(errors) if text.startswith("Traceback")), default=0)
        raise RankError(result, cause.rank, "\n".join(errors[begins:]))
    last = [line for line in Logs(run, False, None, marked=True) if line.attempt == result.attempts - 1]
    marked = {line.rank: line.text for line in last if line.text.startswith(MARK)}
    if missing := sorted(result.statuses.keys() - marked):
        raise RankError(result._replace(why=f"rank {missing[0]} exited without a result"), missing[0], "")
    return [_unpacked(result, rank, marked[rank][len(MARK) :]) for rank in sorted(marked)]


def _unpacked(result: Result, rank: int, packed: str) -> Any:
    """Return what a rank has returned. Raises `RankError`."""
    try:
        return pickle.loads(zlib.decompress(base64.b64decode(packed)))  # noqa: S301 (from the user's own rank)
    except Exception as error:  # of any kind, from the class of the result
        why = f"the result of rank {rank} can't be unpickled: {type(error).__name__}: {error}"
        raise RankError(result._replace(why=why), rank, "") from error


def _packed_call(function: Callable[..., Any] | str, args: Any, kwargs: Any) -> list[str]:
    """Pack a call into the arguments of `distlaunch.cli.function`."""
    if isinstance(function, str):
        module, colon, name = function.partition(":")
        if not colon:
            raise UsageError(f'{function!r}: specify the function as "package.module:name"')
        target: tuple[str | None, Any] = module, name
    elif _is_importable(function):
        target = function.__module__, function.__qualname__
    else:
        try:
            import cloudpickle
        except ImportError:
            name = getattr(function, "__qualname__", str(function))
            text = f"the ranks can't import {name}: define it at the top level of a module"
            hint = "that you import, or pip install 'distlaunch[call]' here and on the nodes"
            raise UsageError(f"{text} {hint}") from None
        target = None, cloudpickle.dumps(function)
    whole = pickle.dumps((sys.version_info[:2], *target, pickle.dumps((args, kwargs))))
    packed = base64.b64encode(zlib.compress(whole)).decode()
    if len(packed) > MAX_CALL:
        text = f"the function and its data are too large: {len(packed)} bytes (at most {MAX_CALL})"
        raise UsageError(f"{text}; pass the path of a file with the data")
    return [packed[at : at + MAX_WORD] for at in range(0, len(packed), MAX_WORD)]


def _is_importable(function: Callable[..., Any]) -> bool:
    """Return whether ranks can import a function by name. They can't import a method, partial or lambda."""
    plain = isinstance(function, FunctionType | type) and function.__module__ != "__main__"
    return plain and "<" not in function.__qualname__


class _Lines(Observer):
    """A collector of whole output lines. Lines with a result of `call` are collected only if requested."""

    def __init__(self, marked: bool) -> None:
        super().__init__()
        self._marked = marked
        self._rests: dict[tuple[int, int, int], bytes] = {}
        self._lines: list[Line] = []

    def printed(self, output: Printed) -> None:
        """Handle output from a rank."""
        place = output.rank, output.stream, output.attempt
        *whole, self._rests[place] = (self._rests.get(place, b"") + output.data).split(b"\n")
        for data in whole:
            self._add(place, data)

    def _add(self, place: tuple[int, int, int], data: bytes) -> None:
        rank, stream, attempt = place
        text = data.decode(errors="replace")
        if self._marked or not text.startswith(MARK):
            self._lines.append(Line(rank, text, stream == 1, attempt))

    def taken(self, over: bool) -> list[Line]:
        """Return the lines since the last call; once the run is `over`, also return the incomplete ones."""
        for place, data in self._rests.items() if over else ():
            if data:
                self._add(place, data)
        lines, self._lines = self._lines, []
        return lines


def _progress() -> Callable[[Run], None]:
    """Return a function that shows a run's progress: a live table in a notebook, nothing elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    if not shell or not hasattr(shell, "kernel"):
        return lambda run: None
    from IPython.display import HTML, display

    handle, shown = display(HTML(""), display_id=True), [""]

    def show(run: Run) -> None:
        text = run._repr_html_()
        if text != shown[0]:
            shown[0] = text
            handle.update(HTML(text))

    return show


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
