"""The place of a task that srun has started, by its variables. See srun(1)."""

from collections.abc import Mapping

from distlaunch.allocation.slurm import expand_counts, expand_nodelist
from distlaunch.allocation.task import Task, number_of, visible_devices
from distlaunch.errors import UsageError


def slurm_task(environ: Mapping[str, str]) -> Task:
    """The task that has this environment. Raises `UsageError` for what is missing, or contradicts itself."""
    rank, size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_NTASKS")
    node, local = _number(environ, "SLURM_NODEID"), _number(environ, "SLURM_LOCALID")
    try:
        nodes = tuple(expand_nodelist(environ.get("SLURM_STEP_NODELIST", "")))
        counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    except ValueError as error:
        raise UsageError(f"SLURM_STEP_NODELIST or SLURM_STEP_TASKS_PER_NODE: {error}") from None
    if len(nodes) != len(counts) or sum(counts) != size or not node < len(nodes):
        told = ("SLURM_NTASKS", "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
        seen = ", ".join(f"{name}={environ.get(name, '')}" for name in told)
        raise UsageError(f"Slurm's variables contradict each other: {seen}; does a script set one of them?")
    if not (rank < size and local < counts[node]):
        raise UsageError(f"SLURM_PROCID={rank} and SLURM_LOCALID={local} are not of {size} tasks")
    job = environ["SLURM_JOB_ID"]
    return Task(
        step=f"{job}.{environ.get('SLURM_STEP_ID', '')}",
        job=job,
        rank=rank,
        size=size,
        local_rank=local,
        local_size=counts[node],
        node_rank=node,
        node_count=len(nodes),
        nodes=nodes,
        addresses=nodes[:1],
        devices=visible_devices(environ),
        restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    return number_of(environ, name, "srun or mpirun", ": use `srun distlaunch exec -- …`")
