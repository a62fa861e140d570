"""What a task gets: torch's contract, as the workers of a run have it."""

from collections.abc import Mapping

from distlaunch import contract
from distlaunch.allocation.task import Task

_OF_NODES = ("GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE")


def task_environment(
    task: Task, environ: Mapping[str, str], endpoint: tuple[str, int], virtual: bool = False
) -> dict[str, str]:
    """The whole environment of a task's program, whose ranks meet at `endpoint`.

    `virtual`: it sees its own GPU alone, as LOCAL_RANK 0.
    """
    backend = "nccl" if task.devices and (virtual or task.devices >= task.local_size) else "gloo"
    meeting = contract.Rendezvous(
        master_addr=endpoint[0],
        master_port=endpoint[1],
        run_id=task.step,
        backend=backend,
        restart_count=task.restarts,
    )
    place = contract.Position(task.rank, task.local_rank, task.local_size, task.node_rank or 0)
    own = contract.own_environment(place) | ({"LOCAL_RANK": "0"} if virtual else {})
    shared = contract.shared_environment(meeting, task.size, task.node_count or 1)
    ids = {"DISTLAUNCH_RUN_ID": task.step, "DISTLAUNCH_JOB_ID": task.job}
    made = {**contract.defaults(task.local_size, None, backend), **environ, **shared, **own, **ids}
    if task.node_rank is None:  # better nothing than what is wrong
        made = {name: value for name, value in made.items() if name not in _OF_NODES}
    return made
