"""The place of a task that flux run or jsrun has started, by its variables. See flux-environment(7)."""

from collections.abc import Mapping, Sequence

from distlaunch.agent.frozen import Frozen
from distlaunch.allocation.allocation import TITLES, Scheduler
from distlaunch.allocation.find import scheduler_of
from distlaunch.allocation.task import Task, number_of, visible_devices
from distlaunch.errors import UsageError


class Names(Frozen):
    """The variables of one kind of task; `nodes` or `local_size` may be missing, as one tells the other."""

    scheduler: Scheduler
    starter: str
    rank: str
    size: str
    local_rank: str
    job: str
    nodes: str = ""
    local_size: str = ""


FLUX = Names(
    *("flux", "flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_ID"),
    nodes="FLUX_JOB_NNODES",
)
JSM = Names(
    *("lsf", "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "LSB_JOBID"),
    local_size="JSM_NAMESPACE_LOCAL_SIZE",
)


def task_names(environ: Mapping[str, str]) -> Names | None:
    """The kind of task that has this environment; None = one of srun's. Raises `UsageError` for no task."""
    found = next((names for names in (FLUX, JSM) if names.rank in environ), None)
    scheduler = scheduler_of(environ)
    if found or scheduler is None or scheduler == "slurm":
        return found
    title, use = TITLES[scheduler], "use `distlaunch run job.yaml`"
    for names in (FLUX, JSM):
        if names.scheduler == scheduler:
            raise UsageError(f"this {title} process is not a task of `{names.starter}`: {use}")
    raise UsageError(f"{title} starts no tasks that know their number: {use}")


def engine_task(names: Names, environ: Mapping[str, str], hosts: Sequence[str]) -> Task:
    """The task that has this environment, on one of `hosts`. Raises `UsageError` for a contradiction."""
    size, nodes, each = _layout(names, environ)
    rank, local = (
        number_of(environ, names.rank, names.starter),
        number_of(environ, names.local_rank, names.starter),
    )
    if rank >= size or rank % each != local:
        told = f"{names.rank}={rank} and {names.local_rank}={local}"
        raise UsageError(f"{names.starter} must number the tasks node by node: {told} of {each} on each node")
    if len(hosts) < nodes:
        listed = f"{TITLES[names.scheduler]} lists {len(hosts)}"
        raise UsageError(f"{names.starter} runs on {nodes} nodes, but {listed}")
    job = environ.get(names.job, "")
    return Task(
        step=f"{job}.{environ.get('PMIX_NAMESPACE', '')}",
        job=job,
        rank=rank,
        size=size,
        local_rank=local,
        local_size=each,
        node_rank=rank // each,
        node_count=nodes,
        nodes=(used := tuple(hosts[-nodes:])),  # a launch node, where no task runs, comes first
        addresses=used[:1],
        devices=visible_devices(environ),
        scheduler=names.scheduler,
    )


def _layout(names: Names, environ: Mapping[str, str]) -> tuple[int, int, int]:
    """How many tasks there are, on how many nodes, and on each."""
    size = number_of(environ, names.size, names.starter)
    part = number_of(environ, names.nodes or names.local_size, names.starter) or 1
    nodes, each = (part, size // part) if names.nodes else (size // part, part)
    if not size or each * nodes != size:
        raise UsageError(f"{names.starter} must start equally many tasks on each node, not {size} on {nodes}")
    return size, nodes, each
