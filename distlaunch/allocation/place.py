"""Where a launcher stands that a scheduler or mpirun has started as one of several tasks."""

from collections.abc import Mapping

from distlaunch.agent.frozen import Frozen


class TaskPlace(Frozen):
    """Where a scheduler's task stands on its host and among the hosts; None = not known.

    Each such task is a node of the job, with one rank.
    """

    local_rank: int
    local_size: int
    node_rank: int | None
    node_count: int | None


_NUMBERS = (
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "JSM_NAMESPACE_RANK",
    "FLUX_TASK_RANK",
    "SLURM_PROCID",
    "JOB_COMPLETION_INDEX",
)
"""mpirun's before the scheduler's, which may have started one task for all of it."""


def task_number(environ: Mapping[str, str]) -> int | None:
    """This task's number; None = not known. A task of each node's own step has the same everywhere."""
    texts = (environ.get(name, "") for name in _NUMBERS)
    return next((int(text) for text in texts if text.isdecimal()), None)


def step_nodes(environ: Mapping[str, str]) -> int:
    """On how many nodes the scheduler runs the tasks of which this is one; 1 outside of a task."""
    texts = (environ.get(name, "") for name in ("FLUX_JOB_NNODES", "SLURM_STEP_NUM_NODES"))
    return next((int(text) for text in texts if text.isdecimal()), 1)
