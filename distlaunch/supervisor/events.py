"""Events of a job, the only input of the supervisor.

Most events are reports of agents, defined in `distlaunch.agent.messages`. The events defined here are
observed by the controller itself. In both kinds, `node` is the node's index in the pool.
"""

from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.plan.placement import Facts
from distlaunch.supervisor.state import Timer
from distlaunch.transports.failure import LinkFailure


class AgentUp(Frozen):
    """An agent has connected and sent its first report."""

    node: int
    facts: Facts
    hostname: str


class LinkEnded(Frozen):
    """A link has ended. `failure` is the transport's interpretation of its error output."""

    node: int
    failure: LinkFailure


class Suspended(Frozen):
    """The controller, or its machine, was suspended for `for_s` seconds."""

    for_s: float


class AllocationReported(Frozen):
    """The scheduler's answer about this allocation: whether it `ends` the job, why, and in how many seconds.

    `ends` is None if the scheduler didn't answer. `why` completes a sentence that begins with `Slurm job 17
    `. `final` is set if the job must not be requeued, or if the scheduler itself requeues it.
    """

    ends: bool | None
    why: str = ""
    left_s: float | None = None
    final: bool = False


class AddressesFound(Frozen):
    """The addresses at which ssh reaches the nodes, as pairs of node and address."""

    addresses: tuple[tuple[int, str], ...]


class ImagePulled(Frozen):
    """The image of a node's container is being pulled or, if `over`, has been pulled."""

    node: int
    over: bool


class OutputFlows(Frozen):
    """More output of a clean node has arrived. Reported at most once a second."""

    node: int


class NodeArrived(Frozen):
    """The launcher of a missing node has joined and is ready to be connected."""

    node: int


class TimerDue(Frozen):
    """A timer of the job, or of a node, has expired."""

    timer: Timer
    node: int | None = None


Event = tuple[Any, ...]
"""An event defined here or a report of an agent. `distlaunch.supervisor.step` has a handler for each."""
