"""The events of a job: everything that the supervisor ever learns.

Most are the reports of agents, which `distlaunch.agent.messages` defines; those that the controller itself
observes are defined here. In both, `node` is the node's index.
"""

from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.plan.layout import Facts
from distlaunch.supervisor.state import Timer
from distlaunch.transports.failure import LinkFailure


class AgentUp(Frozen):
    """An agent has said hello."""

    node: int
    facts: Facts
    hostname: str


class LinkEnded(Frozen):
    """A link has ended, whatever the reason: `failure` is what the transport's words mean."""

    node: int
    failure: LinkFailure


class AllocationTold(Frozen):
    """What the scheduler says of our allocation: whether it `ends` it, why, and how many seconds are left.

    `ends` None: it did not say, `why`: in words that follow `Slurm job 17 `. `final`: it starts the job again
    by itself, or nobody is to.
    """

    ends: bool | None
    why: str = ""
    left_s: float | None = None
    final: bool = False


class AddressesFound(Frozen):
    """The addresses by which ssh reaches the nodes: (node, address) of each."""

    addresses: tuple[tuple[int, str], ...]


class ImagePulled(Frozen):
    """The image of a node's container is being fetched, or, if that is `over`, there."""

    node: int
    over: bool


class OutputFlows(Frozen):
    """More of a clean node's output has come; told at most once a second."""

    node: int


class NodeArrived(Frozen):
    """The launcher of a missing node has joined, and waits to be connected."""

    node: int


class TimerDue(Frozen):
    """A timer of the job, or of a node, has come due."""

    timer: Timer
    node: int | None = None


Event = tuple[Any, ...]
"""One of these, or a report: `distlaunch.supervisor.step` has a handler for each."""
