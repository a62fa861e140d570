"""What a task gets: torch's contract, as the workers of a run have it."""

from collections.abc import Mapping

from distlaunch import contract
from distlaunch.allocation.task import Task


def task_environment(
    task: Task, environ: Mapping[str, str], port: int, virtual: bool = False
) -> dict[str, str]:
    """The whole environment of a task's program; `virtual`: it sees its own GPU alone, as LOCAL_RANK 0."""
    backend = "nccl" if task.devices and (virtual or task.devices >= task.local_size) else "gloo"
    meeting = contract.Rendezvous(
        master_addr=environ.get("MASTER_ADDR") or (task.nodes[0] if len(task.nodes) > 1 else "127.0.0.1"),
        master_port=port,
        run_id=task.step,
        backend=backend,
        restart_count=task.restarts,
    )
    place = contract.Position(task.rank, task.local_rank, task.local_size, task.node_rank)
    own = contract.own_environment(place) | ({"LOCAL_RANK": "0"} if virtual else {})
    shared = contract.shared_environment(meeting, task.size, len(task.nodes))
    ids = {"DISTLAUNCH_RUN_ID": task.step, "DISTLAUNCH_JOB_ID": task.job}
    return {**contract.defaults(task.local_size, None, backend), **environ, **shared, **own, **ids}
