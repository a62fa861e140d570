"""Schedulers: Slurm, Grid Engine, PBS, LSF, Flux, and those added by other packages.

Each scheduler has one module, whose `scheduler` is a `Scheduler` (see `base`). It finds a job's hosts and
reaches them, locates tasks, declares the section of the job file, writes the batch script, queries the queue,
and determines why a job ended. `TABLE` has an entry for each scheduler.

Another package can add a scheduler with an entry point NAME = MODULE:OBJECT in the group
`distlaunch.schedulers`. A section in the job file or `--to NAME` selects the scheduler. Its jobs must set
DISTLAUNCH_SCHEDULER to NAME, because searching for entry points takes half as long as starting a job.

All schedulers use `base` (the interface, batch scripts), `queue` (command output, files) and `task` (tasks
that become ranks).
"""

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import DistlaunchError, UsageError
from distlaunch.wording import listed

if TYPE_CHECKING:
    from distlaunch.job.spec import Allocation, JobSpec
    from distlaunch.job.types import Field, Record
    from distlaunch.schedulers.base import Scheduler
    from distlaunch.schedulers.task import Task


class Entry(Frozen):
    """An entry of the table: the variables by which a process recognizes the scheduler.

    A process belongs to a job of the scheduler if all variables in one of `marks` are set and `unless` isn't.
    The variables named by `rank`, `nodes` and `tasks` contain a task's number, the number of nodes and the
    number of tasks. `one_each` is the command that starts one task on each of {} nodes.
    """

    marks: tuple[str, ...]
    rank: str = ""
    nodes: str = ""
    tasks: str = ""
    one_each: str = ""
    unless: str = ""

    def started(self, environ: Mapping[str, str]) -> bool:
        """Return whether a process with this environment belongs to one of the scheduler's jobs."""
        marked = any(all(map(environ.get, mark.split())) for mark in self.marks)
        return marked and not environ.get(self.unless)


TABLE: Mapping[str, Entry] = {
    "slurm": Entry(
        ("SLURM_JOB_ID",),
        *("SLURM_PROCID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"),
        "srun --nodes={0} --ntasks={0} --ntasks-per-node=1",
    ),
    "grid-engine": Entry(("JOB_ID PE_HOSTFILE", "JOB_ID SGE_TASK_ID HOSTNAME")),
    "pbs": Entry(("PBS_JOBID PBS_NODEFILE",)),
    "lsf": Entry(("LSB_JOBID LSB_MCPU_HOSTS", "LSB_JOBID LSB_DJOB_HOSTFILE"), "JSM_NAMESPACE_RANK"),
    # `flux proxy` sets FLUX_URI on a machine outside the instance.
    "flux": Entry(
        ("FLUX_JOB_ID", "FLUX_URI"),
        *("FLUX_TASK_RANK", "FLUX_JOB_NNODES", "FLUX_JOB_SIZE"),
        "flux run --nodes={} --tasks-per-node=1",
        unless="FLUX_PROXY_REMOTE",
    ),
}
"""Schedulers by module name, in the order in which they are detected."""
DEFAULT = "slurm"
"""The scheduler to use if nothing else selects one."""
NAMED = "DISTLAUNCH_SCHEDULER"
"""The variable that names a process's scheduler if the scheduler isn't in the table."""
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID")


@cache
def load(name: str) -> "Scheduler":
    """Return the scheduler with that name. Raises `DistlaunchError` if it is unknown."""
    if name in TABLE:
        found: Scheduler = import_module(f"distlaunch.schedulers.{name.replace('-', '_')}").scheduler
        return found
    for point in _entry_points():
        if point.name == name:
            try:
                loaded: Scheduler = point.load()
            except Exception as error:  # it is someone else's code
                what = f"the scheduler {name} can't be loaded from {point.value}"
                raise DistlaunchError(f"{what}: {type(error).__name__}: {error}") from None
            return loaded
    known = f"distlaunch knows {listed([*TABLE])}; for another, install the package that adds it"
    raise DistlaunchError(f"unknown scheduler {name}: {known}; {NAMED} may have chosen it")


def names() -> list[str]:
    """List the names of all schedulers, beginning with the table."""
    return [*TABLE, *(point.name for point in _entry_points() if point.name not in TABLE)]


def _entry_points() -> "Iterable[Any]":
    from importlib.metadata import entry_points  # takes half as long as starting a job

    return entry_points(group="distlaunch.schedulers")


def target_of(spec: "JobSpec") -> str:
    """Return the scheduler of the job's only section, or the default.

    Raises `UsageError` if the user has to choose.
    """
    named = [key.replace("_", "-") for key in spec.sections]
    if len(named) > 1 and DEFAULT not in named:
        raise UsageError(f"the job has sections for {listed(named)}: choose one with --to")
    return named[0] if len(named) == 1 else DEFAULT


def title_of(name: str) -> str:
    """Return the display name of a scheduler, or `name` if the scheduler is unknown."""
    try:
        return load(name).title
    except DistlaunchError:
        return name


def scheduler_in(environ: Mapping[str, str]) -> str | None:
    """Return the name of the scheduler that started a process with this environment."""
    started = (name for name, entry in TABLE.items() if entry.started(environ))
    return environ.get(NAMED) or next(started, None)


def allocation_in(environ: Mapping[str, str], needed: bool = True) -> "Allocation | None":
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
    """Return the number of a task; None = unknown.

    Tasks may share a number if each node has its own step. mpirun's number overrides the scheduler's, because
    the scheduler may have started mpirun as a single task.
    """
    variables = (*_MPI_RANKS, *(entry.rank for _, entry in _inner()), "JOB_COMPLETION_INDEX")
    texts = (environ.get(name, "") for name in variables)
    return next((int(text) for text in texts if text.isdecimal()), None)


def step_title(name: str) -> str:
    """Return the name of a scheduler's step for messages: `Slurm step`."""
    return f"{load(name).title} {load(name).step}"


def step_size(environ: Mapping[str, str]) -> tuple[str, int, int]:
    """Return this process's step as (scheduler, nodes, tasks); without a step, "", 1 and 1."""
    for name, entry in _inner():
        nodes, tasks = environ.get(entry.nodes, ""), environ.get(entry.tasks, "")
        if nodes.isdecimal():
            return name, int(nodes), int(tasks) if tasks.isdecimal() else 1
    return "", 1, 1


def _inner() -> list[tuple[str, Entry]]:
    """Return the table in reverse order, because a Flux instance may run inside a Slurm or LSF job."""
    return list(TABLE.items())[::-1]


def sections(keys: Iterable[str] | None = None) -> "dict[str, Field]":
    """Return the scheduler sections among `keys`, or all sections if `keys` is None or has an unknown key."""
    from distlaunch.job.keys import JOB
    from distlaunch.job.types import built

    own = [""] if keys is None else [key for key in keys if key not in JOB.fields]
    wanted = [key.replace("_", "-") for key in own]
    known = names() if any(name not in TABLE for name in wanted) else wanted
    found = {}
    for name in known:
        try:
            each = load(name)
        except DistlaunchError:
            if name in wanted:
                raise
            continue  # a plugin that this job doesn't use
        found[each.key] = built(each.section, f"Settings for `submit` and `export {each.name}`.")
    return found


def job_keys(keys: Iterable[str] | None = None) -> "Record":
    """Return all keys that a job file with `keys` can have, including scheduler sections."""
    from distlaunch.job.keys import with_sections

    return with_sections(sections(keys))
