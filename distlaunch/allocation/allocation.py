"""An allocation, whichever scheduler made it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from distlaunch.agent.frozen import Frozen

Scheduler = Literal["slurm", "grid-engine", "pbs", "lsf", "flux", "kubernetes"]
TITLES: Mapping[Scheduler, str] = MappingProxyType(
    {
        "slurm": "Slurm",
        "grid-engine": "Grid Engine",
        "pbs": "PBS",
        "lsf": "LSF",
        "flux": "Flux",
        "kubernetes": "Kubernetes",
    }
)
"""As people call them."""


def title_of(scheduler: str) -> str:
    """As people call a scheduler; one that only another version knows goes by its name."""
    return next((title for name, title in TITLES.items() if name == scheduler), scheduler)


class AllocatedNode(Frozen):
    """A host of an allocation, as far as the environment tells; None = it does not say.

    `procs` is how many tasks or slots were asked for there, `group` which component of a heterogeneous job it
    is in. A pod has an `address` by which others reach it, and ranks run in one `container` of it.
    """

    host: str
    gpus: int | None = None
    procs: int | None = None
    group: int | None = None
    address: str | None = None
    container: str | None = None


class Allocation(Frozen):
    """The hosts of job `job`, in the order in which the scheduler lists them; "" = its id is not known.

    Of Kubernetes they are pods, and `job` is their selector. A job of its queue is `queued`; one that may be
    started again has been started `starts` times before.
    """

    scheduler: Scheduler
    job: str
    nodes: tuple[AllocatedNode, ...]
    queued: bool = False
    starts: int = 0

    @property
    def name(self) -> str:
        """For people."""
        title = TITLES[self.scheduler]
        if self.scheduler == "kubernetes":
            return f"{title} ({self.job})"
        return f"{title} job {self.job}" if self.job else title

    @property
    def requeues(self) -> bool:
        """Whether its scheduler can be asked to start it again."""
        return self.queued and self.scheduler == "slurm"

    @property
    def answers(self) -> bool:
        """Whether we can ask its scheduler what becomes of it."""
        return self.scheduler == "slurm"
