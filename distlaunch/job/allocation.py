"""What a scheduler has given a job, its allocation; and where one of its tasks stands."""

from distlaunch.agent.frozen import Frozen


class AllocatedNode(Frozen):
    """A host of an allocation, as far as the environment tells; None = not known.

    `procs` is the number of tasks or slots requested there, `group` the component of a heterogeneous job.
    A pod has an `address` by which others reach it, and ranks run in one `container` of it.
    """

    host: str
    gpus: int | None = None
    procs: int | None = None
    group: int | None = None
    address: str | None = None
    container: str | None = None


class Allocation(Frozen):
    """The hosts of job `job`, in the order in which the scheduler lists them; "" = its ID is not known.

    `title` is what people call the scheduler. A job of its queue is `queued`; one that may be started again
    has been started `starts` times before. A scheduler that `answers` can be asked what becomes of the job.
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
        """Return the allocation's name for people."""
        return f"{self.title} job {self.job}" if self.job else self.title

    @property
    def requeues(self) -> bool:
        """Tell whether its scheduler can be asked to start the job again."""
        return self.queued and self.answers


class TaskPlace(Frozen):
    """The place of a scheduler's task on its host and among the hosts; None = not known.

    Each such task is a node of the job, with one rank.
    """

    local_rank: int
    local_size: int
    node_rank: int | None
    node_count: int | None
