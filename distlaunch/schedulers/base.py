"""The interface to a scheduler, batch scripts, and the checks before a job is submitted."""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import UsageError
from distlaunch.job.spec import AllocatedNode, Allocation, JobSpec
from distlaunch.job.text import path_in
from distlaunch.job.types import LINE, Field, Integer, Lines, ListOf, Record, Text, seconds_in
from distlaunch.schedulers import queue
from distlaunch.schedulers.task import SET_BY_A_SCRIPT, Names, Task, numbered_task
from distlaunch.supervisor.events import AllocationReported
from distlaunch.transports.transport import Local, Transport

# An ignored signal can't kill distlaunch during its start, before it handles signals.
_TRAPS = "trap : INT TERM; trap '' USR1 USR2"
TRAP = ("", "# distlaunch handles the signals of termination warnings.", _TRAPS)
MAX_NAME = 200

# Sections of the job file

NODES = Field(
    Integer(1, 4096), "Nodes to allocate; set this higher than nodes to allow for spares: rest.", "nodes"
)
QUEUE = Field(LINE, "Queue.")
SETUP = Field(Lines(), "Shell commands to run on the first node before anything else, such as module load.")
FOREIGN = {"walltime": "time", "time_limit": "time", "options": "extra", "modules": "setup"}
_ARRAY = "an array would start the same job many times; submit each job separately"
_WHY = {
    "nodes": "set nodes",
    "requeue": "set restarts.requeue",
    "signal": "set slurm.signal",
    "array": _ARRAY,
    "output": "the job's output goes to logs.dir",
    "wait": "use `submit --wait`",
    "cluster": "set SLURM_CLUSTERS, or use `submit --on HOST` with a host of that cluster",
}


class TimeLimit(Text):
    """A time such as 12h, which `written` converts, or a time in the scheduler's own format (`own`)."""

    def __init__(self, examples: str, own: str, written: Callable[[int], str]) -> None:
        super().__init__(f"a time such as {examples}", rf"{own}(?:[0-9]+[dhms])+")
        self.written = written

    def made(self, checked: Any) -> Any:
        """Return the time in the scheduler's format."""
        seconds = seconds_in(checked)
        return checked if seconds is None else self.written(int(seconds))


def other_options(command: str, example: str, taken: str, pattern: str = r"-[A-Za-z][^\0\n]*") -> Field:
    """Return the key for additional options of a scheduler's command.

    The options must not match `taken`. The names of its groups stand for reasons.
    """

    def mistake(option: str) -> str | None:
        try:
            words = shlex.split(option)  # it may be several options
        except ValueError:
            words = [option]
        found = next(filter(None, (re.match(taken, word) for word in words)), None)
        return found and f"{found[0]} can't be used: {_WHY.get(found.lastgroup or '', 'distlaunch sets it')}"

    kind = Text(f'an option such as "{example}"', pattern, mistake)
    return Field(ListOf(kind), f"Additional options for {command}.")


def section(keys: Mapping[str, Field], extra: Field, **foreign: str) -> Record:
    """Return a section of the job file with these keys and those common to all schedulers."""
    every = {"nodes": NODES, **keys, "setup": SETUP, "extra": extra}
    return Record(every, foreign={**FOREIGN, **foreign})


# The interface


class Call(Frozen):
    """The command that a batch script runs: its words, and its input, if any."""

    words: tuple[str, ...]
    stdin: str | None = None


class Scheduler:
    """The interface to a scheduler that reads options from comments in batch scripts.

    Methods without an implementation must be overridden, except those needed only with `answers`. A scheduler
    with a different kind of script overrides `script`.
    """

    name = ""
    """The value of `--to`. The section of the job file has the same name, with underscores for hyphens."""
    title = ""
    """The display name."""
    step = "job"
    """The name for a group of tasks, in messages."""
    answers = False
    """Whether the scheduler can report why a job ended (`fate_argv`, `fate`) and requeue it (`requeue`)."""
    chooses = "set nodes to the number of nodes"
    """Advice for a job that lists its hosts."""
    section: Record
    """The keys of the scheduler's section in the job file."""
    tasks: Names | None = None
    """The variables of tasks, if the scheduler numbers tasks node by node."""
    mark = ""
    """The text that begins an option line in a batch script."""
    harmless: tuple[str, ...] = ("USR1", "USR2")
    """Signals that don't end the job if they arrive while the batch script is still running its setup."""
    waits = False
    """Whether a batch script runs the call in the background, so that `closing` has to wait for it."""
    ends: tuple[str, ...] = ()
    """The command that cancels a job."""
    hurries: tuple[str, ...] = ()
    """The command that sends a signal to a running job; () = none."""
    over: "re.Pattern[str] | None" = None
    """Pattern of the error messages that the scheduler's commands print for a job that has ended."""
    withholds = ""
    """The variable with a job's ID, if the scheduler shows a job's output only after the job has ended."""

    @property
    def key(self) -> str:
        """Return the key of the scheduler's section in the job file."""
        return self.name.replace("-", "_")

    def asked(self, spec: JobSpec) -> Mapping[str, Any]:
        """Return the scheduler's section of the job file."""
        return spec.sections.get(self.key, {})

    # Inside a job

    def listing(self, environ: Mapping[str, str]) -> str | tuple[str, ...]:
        """Return the file or the command that lists a job's hosts; "" = variables list them."""
        return ""

    def allocation(self, environ: Mapping[str, str], listed: str) -> Allocation | None:
        """Return the allocation of a process with this environment; `listed` is the content of `listing`.

        Raises ValueError for invalid content.
        """
        raise NotImplementedError

    def read_allocation(self, environ: Mapping[str, str], needed: bool = True) -> Allocation | None:
        """Return the allocation. If it isn't `needed`, return None if it can't be read from variables.

        Raises `UsageError`.
        """
        listing = self.listing(environ)
        if not needed:
            with suppress(ValueError, UsageError):
                return None if listing else self.allocation(environ, "")
            return None
        listed = queue.read_hosts(listing, self.title) if listing else ""
        try:
            return self.allocation(environ, listed)
        except ValueError as error:
            where = listing if isinstance(listing, str) else " ".join(listing)
            advice = queue.INSTEAD if where else SET_BY_A_SCRIPT
            where = where or f"{self.title} variables"
            raise UsageError(f"can't read the allocation from {where}: {error}; {advice}") from None

    def reach(self, allocation: Allocation, node: AllocatedNode, here: str) -> Transport | None:
        """Return the transport from this host, `here`, to a host of an allocation; None = ssh."""
        command = self.command(node.host)
        local = _short(node.host) in ("localhost", _short(here))
        return Local(deaf=command is not None and command.deaf) if local else command

    def command(self, host: str) -> Transport | None:
        """Return a transport that starts a command, with stdin, on a host of the job; None = ssh."""
        return None

    def task(self, environ: Mapping[str, str]) -> Task:
        """Locate a process with this environment among the scheduler's tasks. Raises `UsageError`."""
        if self.tasks is None:
            why = f"{self.title} doesn't number its tasks"
            how = "use `mpirun distlaunch exec` (Open MPI or MPICH), or `distlaunch run job.yaml`"
            raise UsageError(f"{why}: {how}")
        return numbered_task(self.tasks, environ, self.title, self.read_allocation)

    # Submitting a job

    def gpus(self, spec: JobSpec) -> int | None:
        """Return the number of GPUs per node that the section requests; 0 = unknown, None = no request."""
        gpus = self.asked(spec).get("gpus")
        return gpus if gpus is None or isinstance(gpus, int) else 0

    def node_count(self, spec: JobSpec) -> int:
        """Return the number of nodes to allocate."""
        return self.asked(spec).get("nodes") or (len(spec.nodes) if "nodes" in spec.places else 1)

    def mistakes(self, spec: JobSpec) -> Iterable[tuple[str, str]]:
        """List mistakes that make the job fail regardless of its nodes: (path in the job file, text)."""
        return ()

    def remarks(self, spec: JobSpec) -> Iterable[str]:
        """List messages about effects of submitting the job that the user may not expect."""
        if spec.nodes[0].gpus is None and self.gpus(spec) is None:
            advice = "to get some, set gpus_per_node to the number per node; 0 declares a CPU job"
            yield f"the job requests no GPUs; {advice}"

    def options(self, spec: JobSpec, followed: bool) -> Iterable[str]:
        """List the options for the batch script, except those in `extra`. `followed` is as in `script`."""
        raise NotImplementedError

    def opening(self, spec: JobSpec) -> Sequence[str]:
        """Return the lines that come after the options in the script of a followed job."""
        if not self.withholds:
            return ()
        path = queue.output_path(shlex.quote(spec.logs.directory), f'"${self.withholds}"', self.name)
        comment = f"# {self.title} itself shows a job's output only after the job has ended."
        return "", comment, f"exec >>{path} 2>&1"

    def closing(self, spec: JobSpec) -> Sequence[str]:
        """Return the lines that come after the call."""
        return ()

    def script(self, spec: JobSpec, call: Call, followed: bool = False) -> str:
        """Return a readable batch script that runs `call`.

        The script has options, the lines of `setup`, traps, and the call. The output of a `followed` job goes
        to the directory of its runs, and `stop` sends the job a termination warning. Jobs from `submit` are
        followed; those from `export` are not.
        """
        lines, extra = self.asked(spec).get("setup") or (), self.asked(spec).get("extra", ())
        options = (*self.options(spec, followed), *extra)
        head = ["#!/bin/bash", *(f"{self.mark} {option}" for option in options)]
        closing = self.closing(spec)
        lines = [*lines, "set +eu; trap - ERR  # the last lines must run"] if lines and closing else lines
        before = ["", f"trap : {' '.join(self.harmless)}", *lines] if lines else []
        head += [*(self.opening(spec) if followed else ()), *before, *TRAP]
        run = _run_lines(call, " &" if self.waits else "")
        return "\n".join([*head, "", *run, *closing, ""])

    def submit(self, script: str) -> str:
        """Submit the script at a path, and return the job's ID. Raises `DistlaunchError`."""
        raise NotImplementedError

    def look(self, jobs: Sequence[str]) -> dict[str, queue.Queued]:
        """Return the states of these jobs by ID, omitting jobs that the queue has forgotten.

        Raises `DistlaunchError`.
        """
        raise NotImplementedError

    def array_tasks(self, job: str) -> dict[str, str]:
        """Return the job IDs of an array's tasks that are in the queue, by their names, such as `12_3`.

        For such a name, return only that task, even if it has just ended. Jobs that aren't arrays have none.
        Raises `DistlaunchError`.
        """
        return {}

    def cancel(self, job: str, at_once: bool = False) -> None:
        """Cancel a pending or running job. Raises `DistlaunchError`.

        With `at_once`, send a signal first, because distlaunch kills the ranks at the second signal.
        """
        if at_once and self.hurries:
            queue.call(self.title, *self.hurries, job, forgives=queue.ANYTHING)  # the job may not be running
            queue.pause_for_another_wish()
        queue.call(self.title, *self.ends, job, forgives=self.over)

    def fate_argv(self, job: str) -> list[str]:
        """Return the command whose output `fate` parses. Its time zone is UTC."""
        raise NotImplementedError

    def fate(self, starts: int, text: str, now: float) -> AllocationReported:
        """Return why a job ended. The job had been started `starts` times before; `now` is the Unix time."""
        raise NotImplementedError

    def requeue(self, job: str, environ: Mapping[str, str]) -> None:
        """Requeue the job that has this environment.

        Raises `DistlaunchError`; `UsageError` if the scheduler refuses it for good.
        """
        raise NotImplementedError


def _short(host: str) -> str:
    """Return a host name without the domain, or an address unchanged."""
    return host if host[:1].isdigit() or ":" in host else host.partition(".")[0].lower()


# Shared by schedulers


def check_submitted(spec: JobSpec, scheduler: Scheduler) -> None:
    """Raise `JobError` for mistakes that would make the job fail regardless of its nodes.

    Assumes that the nodes have the same files as this machine.
    """
    spec.refuse(_mistakes(spec, scheduler))


def _mistakes(spec: JobSpec, scheduler: Scheduler) -> Iterator[tuple[str, str]]:
    """Yield (path in the job file, text) of each mistake."""
    asked = scheduler.asked(spec)
    for path in ("nodes[0]", "hostfile"):
        if path in spec.places:
            yield path.partition("[")[0], f"{scheduler.title} chooses the hosts: {scheduler.chooses}"
    if "spares[0]" in spec.places or ("spares" in spec.places and not asked.get("nodes")):
        total = f"{scheduler.key}.nodes to the total number of nodes, including spares"
        yield "spares", f"{scheduler.title} chooses the hosts: set spares: rest, and {total}"
    if "launcher" in spec.places and spec.pool and all(node.reach.here for node in spec.pool):
        yield "launcher", "a submitted job runs on its own nodes: remove launcher: local"
    if spec.restarts.requeue and not scheduler.answers:
        yield "restarts.requeue", f"distlaunch can't requeue {scheduler.title} jobs; remove this key"
    yield from scheduler.mistakes(spec)
    if not asked.get("setup"):  # setup may create missing files
        yield from _missing(spec)


def _missing(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Report a workdir, program or interpreter that is missing here, and so probably on every node."""
    workdir = os.path.expanduser(spec.program.workdir)
    if not os.path.isdir(workdir):
        yield "workdir", f"{workdir} does not exist"
        return
    program = spec.program
    script = os.path.expanduser(path_in(workdir, program.words[0]))
    if program.placed and not os.path.isfile(script):
        yield ("command" if program.kind == "command" else program.kind), f"{script} does not exist"
    # The interpreter in an image can't be checked from here.
    python = "" if spec.container else program.python or ""
    if "/" in python and not os.path.isfile(os.path.expanduser(python)):
        yield "python", f"{python} does not exist"


def workers(spec: JobSpec, gpus: object = None) -> int:
    """Return the number of workers per node if the job determines it, else 1."""
    node = spec.nodes[0]
    return node.procs or node.gpus or (gpus if isinstance(gpus, int) else 0) or 1


def workdir(spec: JobSpec) -> str:
    """Return an existing directory for the output of a script that isn't followed."""
    return os.path.expanduser(spec.program.workdir)


def plain_name(name: str) -> str:
    """Convert a job's name to one that most schedulers accept: without blanks, beginning with a letter."""
    plain = re.sub(r"[^A-Za-z0-9_.+-]", "_", name)[:MAX_NAME]
    return plain if plain[:1].isalpha() else f"job_{plain}"


def _run_lines(call: Call, ending: str) -> list[str]:
    """Return the lines that run `call`, with its input in a here-document."""
    line = shlex.join(call.words)
    if call.stdin is None:
        return [f"{line}{ending}"]
    end = "END_OF_JOB"
    while re.search(rf"^{end}$", call.stdin, re.MULTILINE):
        end += "_"
    return [f"{line} <<'{end}'{ending}", call.stdin.rstrip("\n"), end]


def given(asked: Mapping[str, Any], flags: Mapping[str, str]) -> Iterator[str]:
    """Yield the option for each key of `flags` that is set."""
    for key, flag in flags.items():
        if asked.get(key) is not None:
            yield option(flag, asked[key])


def option(flag: str, value: object) -> str:
    """Return an option as a line of a script, quoted as in a shell."""
    return f"{flag}{shlex.quote(str(value))}"


def clock(seconds: int) -> str:
    """Format seconds as hours, minutes and seconds, such as `36:00:00`."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


WALLTIME = TimeLimit('"12h" or "36:00:00"', r"[0-9]+:[0-9]{2}:[0-9]{2}|", clock)
