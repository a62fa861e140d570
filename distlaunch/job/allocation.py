"""The hosts that a scheduler has assigned to a job."""

from distlaunch.agent.frozen import Frozen


class AllocatedNode(Frozen):
    """A host of an allocation, as described by the environment; None = unknown.

    `procs` is the number of tasks or slots requested on the host, `group` the component of a heterogeneous
    job. `address` is the address of a pod, and `container` the container of that pod in which the ranks run.
    """

    host: str
    gpus: int | None = None
    procs: int | None = None
    group: int | None = None
    address: str | None = None
    container: str | None = None


class Allocation(Frozen):
    """The hosts of a scheduler job in the order listed by the scheduler; `job` is its ID, "" = unknown.

    `title` is the display name of the scheduler. `queued` means that the job came from its queue, and
    `starts` counts the earlier starts of a job that can be requeued. `answers` means that the scheduler can
    report the fate of the job.
    """

    scheduler: str
    title: str
    job: str
    nodes: tuple[AllocatedNode, ...]
    queued: bool = False
    starts: int = 0
    answers: bool = False

    @property
    def name(self) -> str:
        """Return the display name of the allocation."""
        return f"{self.title} job {self.job}" if self.job else self.title

    @property
    def requeues(self) -> bool:
        """Check whether the scheduler can be asked to start the job again."""
        return self.queued and self.answers
