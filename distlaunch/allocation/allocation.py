"""An allocation, whichever scheduler made it."""

from typing import Literal

from distlaunch.agent.frozen import Frozen

Scheduler = Literal["slurm"]


class AllocatedNode(Frozen):
    """A host of an allocation, as far as the environment tells; None = it does not say.

    `procs` is how many tasks were asked for there, `group` which component of a heterogeneous job it is in.
    """

    host: str
    gpus: int | None = None
    procs: int | None = None
    group: int | None = None


class Allocation(Frozen):
    """The hosts of job `job`, in the order in which the scheduler lists them.

    A job of its queue is `queued`, and may be started again; it has been started `starts` times before.
    """

    scheduler: Scheduler
    job: str
    nodes: tuple[AllocatedNode, ...]
    queued: bool = False
    starts: int = 0

    @property
    def name(self) -> str:
        """For people."""
        return f"Slurm job {self.job}"
