"""The hosts that a scheduler assigned to a job, and the position of a task among them."""

from distlaunch.agent.frozen import Frozen


class AllocatedNode(Frozen):
    """A host of an allocation, as described by the environment; None = unknown.

    `procs` is the number of tasks or slots requested on the host, `group` the component of a heterogeneous
    job. For a pod, `address` is its address and `container` the container in which the ranks run.
    """

    host: str
    gpus: int | None = None
    procs: int | None = None
    group: int | None = None
    address: str | None = None
    container: str | None = None


class Allocation(Frozen):
    """The hosts of a scheduler job, in the scheduler's order; `job` is its ID, "" = unknown.

    `title` is the display name of the scheduler. `queued` means that the job was submitted to the queue, and
    `starts` counts the earlier starts of a job that can be requeued. `answers` means that the scheduler can
    report why the job ended.
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
        """Check whether the scheduler can requeue the job."""
        return self.queued and self.answers
