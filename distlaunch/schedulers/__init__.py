"""Schedulers: Slurm, Grid Engine, PBS, LSF, Flux, and those that other packages add.

All that is particular to a scheduler is in one module, whose `scheduler` is a `Scheduler`: how a job's hosts
are read from its environment and how they are reached, its tasks, its section of the job file, its batch
script, its queue, and what the end of a job means there. `TABLE` has a line for each.

A scheduler of another package is an entry point of the group `distlaunch.schedulers`, NAME = MODULE:OBJECT.
Its section of the job file and `--to NAME` find it; in its jobs the variable DISTLAUNCH_SCHEDULER has to be
its name, because looking for entry points takes half as long as starting a job.

Shared by all: `script` (batch scripts), `queue` (what a scheduler's commands and files say), `task` (ranks
that are started task by task).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import DistlaunchError, UsageError
from distlaunch.job.allocation import AllocatedNode, Allocation

if TYPE_CHECKING:
    from distlaunch.job.spec import JobSpec
    from distlaunch.job.types import Field, Record
    from distlaunch.schedulers.queue import Queued
    from distlaunch.schedulers.task import Names, Task
    from distlaunch.supervisor.events import AllocationTold
    from distlaunch.transports.transport import Transport


class Entry(Frozen):
    """A line of the table: a scheduler's module, and the variables that show that a process is in its job.

    Each of `marks` lists variables of which only its jobs have all, unless `unless` is set, too. Its tasks
    have their number in `rank`, and the number of their nodes in `nodes`.
    """

    module: str
    marks: tuple[str, ...]
    rank: str = ""
    nodes: str = ""
    unless: str = ""

    def started(self, environ: Mapping[str, str]) -> bool:
        """Tell whether a process with this environment is in one of the scheduler's jobs."""
        marked = any(all(map(environ.get, mark.split())) for mark in self.marks)
        return marked and not environ.get(self.unless)


_HERE = "distlaunch.schedulers"
TABLE: Mapping[str, Entry] = MappingProxyType(
    {
        "slurm": Entry(f"{_HERE}.slurm", ("SLURM_JOB_ID",), "SLURM_PROCID", "SLURM_STEP_NUM_NODES"),
        "grid-engine": Entry(f"{_HERE}.grid_engine", ("JOB_ID PE_HOSTFILE", "JOB_ID SGE_TASK_ID HOSTNAME")),
        "pbs": Entry(f"{_HERE}.pbs", ("PBS_JOBID PBS_NODEFILE",)),
        "lsf": Entry(
            f"{_HERE}.lsf", ("LSB_JOBID LSB_MCPU_HOSTS", "LSB_JOBID LSB_DJOB_HOSTFILE"), "JSM_NAMESPACE_RANK"
        ),
        "flux": Entry(
            *(f"{_HERE}.flux", ("FLUX_JOB_ID", "FLUX_URI"), "FLUX_TASK_RANK", "FLUX_JOB_NNODES"),
            unless="FLUX_PROXY_REMOTE",  # `flux proxy` sets FLUX_URI on a machine that is outside
        ),
    }
)
"""By name; the first whose job a process is in is meant."""
DEFAULT = "slurm"
"""The scheduler where nothing says which."""
NAMED = "DISTLAUNCH_SCHEDULER"
"""The variable that names the scheduler of the job that a process is in, if the table can't tell."""
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID")


class Call(Frozen):
    """The command that a batch script runs: its words, and what it reads from standard input, if anything."""

    words: tuple[str, ...]
    stdin: str | None = None


class Scheduler:
    """The interface to a scheduler; what has no default, each must have."""

    name = ""
    """As `--to` has it; its section of the job file is named like it, with underscores."""
    title = ""
    """As people call it."""
    step = "job"
    """What its tasks belong to."""
    answers = False
    """Whether it has `fate_argv`, `fate` and `requeue`: tells what becomes of a job, and starts it again."""
    warns = True
    """Whether ranks of any of its jobs receive a termination warning when the job is cancelled."""
    chooses = "set nodes to the number of nodes"
    """What to do instead of listing hosts."""
    section: "Record"
    """The keys of its section of the job file, by what they mean."""
    tasks: "Names | None" = None
    """The variables of tasks that it starts node by node."""

    @property
    def key(self) -> str:
        """Return the key of the scheduler's section in the job file."""
        return self.name.replace("-", "_")

    def asked(self, spec: "JobSpec") -> Mapping[str, Any]:
        """Return what the job file's section for the scheduler has."""
        return spec.sections.get(self.key, {})

    # Inside a job

    def listing(self, environ: Mapping[str, str]) -> str | tuple[str, ...]:
        """Return the file, or the command, that lists a job's hosts; "" = variables do."""
        return ""

    def allocation(self, environ: Mapping[str, str], listed: str) -> Allocation | None:
        """Return the allocation of a process with this environment; `listed` is what its listing says.

        Raises ValueError for nonsense.
        """
        raise NotImplementedError

    def read_allocation(self, environ: Mapping[str, str], needed: bool = True) -> Allocation | None:
        """Return the allocation, wherever it is listed; if it is not `needed`, only if variables list it.

        Raises `UsageError`.
        """
        listing, listed = self.listing(environ), ""
        if listing and not needed:
            return None
        if listing:
            from distlaunch.schedulers.queue import read_hosts

            listed = read_hosts(listing, self.title)
        try:
            return self.allocation(environ, listed)
        except ValueError as error:
            where = (listing if isinstance(listing, str) else " ".join(listing)) or "the environment"
            raise UsageError(f"can't read the allocation from {where}: {error}") from None

    def reach(self, allocation: Allocation, node: AllocatedNode, here: str) -> "Transport | None":
        """Return what reaches a host of an allocation from this one, `here`; None = ssh."""
        if _short(node.host) in ("localhost", _short(here)):
            from distlaunch.transports.transport import Local

            return Local()
        return self.command(node.host)

    def command(self, host: str) -> "Transport | None":
        """Return the command that starts another one, with stdin, on a host of the job; None = ssh."""
        return None

    def task(self, environ: Mapping[str, str]) -> "Task":
        """Locate a process with this environment among the scheduler's tasks. Raises `UsageError`."""
        if self.tasks is None:
            told = f"{self.title} starts no tasks that know their number"
            raise UsageError(f"{told}: use `distlaunch run job.yaml`")
        from distlaunch.schedulers.task import numbered_task

        return numbered_task(self.tasks, environ, self.title, self.read_allocation)

    # Jobs for its queue

    def gpus(self, spec: "JobSpec") -> int | None:
        """Count the GPUs of each node that the section requests, 0 = not known; None = no word on GPUs."""
        gpus = self.asked(spec).get("gpus")
        return gpus if gpus is None or isinstance(gpus, int) else 0

    def with_gpus(self, spec: "JobSpec") -> "JobSpec":
        """Return the job with the GPUs that it requests, where it does not say how many it uses."""
        return spec.with_gpus(self.gpus(spec) or 0)

    def mistakes(self, spec: "JobSpec") -> Iterable[tuple[str, str]]:
        """List what can't work, whatever the queue gives: (path in the job file, what is wrong)."""
        return ()

    def script(self, spec: "JobSpec", call: Call, followed: bool = False) -> str:
        """Write the batch script of a job, as a person might, which runs `call`.

        The output of a job that is to be `followed` goes to the directory of its runs, and `stop` warns it.
        """
        raise NotImplementedError

    def submit(self, script: str) -> str:
        """Submit the script of that path, and return the job's ID. Raises `DistlaunchError`."""
        raise NotImplementedError

    def look(self, jobs: Sequence[str]) -> "dict[str, Queued]":
        """Return what the queue says of these jobs, by their IDs; it may know nothing of some.

        Raises `DistlaunchError`.
        """
        raise NotImplementedError

    def cancel(self, job: str, at_once: bool = False) -> None:
        """End a job, waiting or running; `at_once` leaves its ranks no time, as far as that can be asked.

        Raises `DistlaunchError`.
        """
        raise NotImplementedError

    def fate_argv(self, job: str) -> list[str]:
        """Return the command that prints what `fate` reads."""
        raise NotImplementedError

    def fate(self, starts: int, text: str, now: float) -> "AllocationTold":
        """Tell what becomes of a job that was started `starts` times before; `now` is Unix time."""
        raise NotImplementedError

    def requeue(self, job: str) -> None:
        """Have a job start again. Raises `DistlaunchError`."""
        raise NotImplementedError


@cache
def load(name: str) -> Scheduler:
    """Return the scheduler of that name. Raises `DistlaunchError` for one that is not known here."""
    if name in TABLE:
        found: Scheduler = import_module(TABLE[name].module).scheduler
        return found
    for point in _entry_points():
        if point.name == name:
            loaded: Scheduler = point.load()
            return loaded
    raise DistlaunchError(f"this version of distlaunch can't ask {name}")


def names() -> list[str]:
    """List the names of all schedulers, those of the table first."""
    return [*TABLE, *(point.name for point in _entry_points() if point.name not in TABLE)]


def _entry_points() -> "Iterable[Any]":
    from importlib.metadata import entry_points  # as expensive as half a start

    return entry_points(group="distlaunch.schedulers")


def title_of(name: str) -> str:
    """Return what people call a scheduler; one that is not known here goes by its name."""
    try:
        return load(name).title
    except DistlaunchError:
        return name


def scheduler_in(environ: Mapping[str, str]) -> str | None:
    """Return the name of the scheduler that has started a process with this environment."""
    started = (name for name, entry in TABLE.items() if entry.started(environ))
    return environ.get(NAMED) or next(started, None)


def allocation_in(environ: Mapping[str, str], needed: bool = True) -> Allocation | None:
    """Return the allocation of a process with this environment; `needed` is as in `read_allocation`.

    Raises `DistlaunchError`.
    """
    name = scheduler_in(environ)
    return load(name).read_allocation(environ, needed) if name else None


def task_in(environ: Mapping[str, str]) -> "Task":
    """Locate a process with this environment among its scheduler's tasks. Raises `DistlaunchError`."""
    started = (name for name, entry in _inner() if entry.rank in environ)
    return load(next(started, None) or scheduler_in(environ) or DEFAULT).task(environ)


def task_number(environ: Mapping[str, str]) -> int | None:
    """Return a task's number; None = not known. Tasks of a step for each node all have the same.

    mpirun's number comes before the scheduler's, which may have started one task for all of it.
    """
    variables = (*_MPI_RANKS, *(entry.rank for _, entry in _inner()), "JOB_COMPLETION_INDEX")
    texts = (environ.get(name, "") for name in variables)
    return next((int(text) for text in texts if text.isdecimal()), None)


def step_nodes(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the scheduler of this process's step, and on how many nodes it runs; 1 outside of a step."""
    texts = ((name, environ.get(entry.nodes, "")) for name, entry in _inner())
    return next(((name, int(text)) for name, text in texts if text.isdecimal()), ("", 1))


def _inner() -> list[tuple[str, Entry]]:
    """Return the table from its end: a Flux instance may run inside a job of Slurm or LSF."""
    return list(TABLE.items())[::-1]


def sections(keys: Iterable[str] | None = None) -> "dict[str, Field]":
    """Return the schedulers' sections of a job file with `keys`; all for None, or if a key is unknown."""
    from distlaunch.job.fields import JOB
    from distlaunch.job.types import built

    own = [""] if keys is None else [key for key in keys if key not in JOB.fields]
    wanted = [key.replace("_", "-") for key in own]
    known = names() if any(name not in TABLE for name in wanted) else wanted
    found = map(load, known)
    return {
        each.key: built(each.section, f"What `submit` and `export {each.name}` ask of {each.title}.")
        for each in found
    }


def job_keys(keys: Iterable[str] | None = None) -> "Record":
    """Return what a job file with `keys` may have, schedulers' sections included, as `sections` does."""
    from distlaunch.job.fields import with_sections

    return with_sections(sections(keys))


def _short(host: str) -> str:
    """Strip a host's name of its domain; an address stays whole."""
    return host if host[:1].isdigit() or ":" in host else host.partition(".")[0].lower()
