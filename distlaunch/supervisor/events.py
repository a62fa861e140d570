"""Events of a job, and the findings that follow from them within the same step.

Events are the only input of the supervisor. Most are reports of agents, defined in
`distlaunch.agent.messages`. The events defined here are observed by the controller itself. In both kinds,
`node` is the node's index in the pool.

A finding is a fact that one part of the supervisor passes to another for a decision. It isn't recorded, since
it follows from an event.
"""

import signal
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.plan.placement import Facts
from distlaunch.supervisor.actions import Action, ShowMessage
from distlaunch.supervisor.state import Cause, State, Timer, Why
from distlaunch.transports.failure import LinkFailure


class AgentUp(Frozen):
    """An agent has connected and sent its first report."""

    node: int
    facts: Facts
    hostname: str


class LinkEnded(Frozen):
    """A link has ended. `failure` is the transport's interpretation of the link's error output."""

    node: int
    failure: LinkFailure


class Suspended(Frozen):
    """The controller, or its machine, was suspended for `for_s` seconds."""

    for_s: float


class AllocationReported(Frozen):
    """The scheduler's answer about this allocation: whether it `ends` the job, why, and the seconds left.

    `ends` is None if the scheduler didn't answer. `why` completes a sentence that begins with
    `Slurm job 17`. It is also set in a grace period, after which the scheduler will end the job. `final` is
    set if the job must not be requeued, or if the scheduler itself requeues it.
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
    """More output from a clean node has arrived. Reported at most once a second."""

    node: int


class NodeArrived(Frozen):
    """A launcher on `host` has joined as a missing node and is ready to be connected.

    `here` is set if it is on the controller's machine.
    """

    node: int
    host: str
    here: bool


class TimerDue(Frozen):
    """A timer of the job, or of a node, has expired."""

    timer: Timer
    node: int | None = None


Event = tuple[Any, ...]
"""An event defined here or a report of an agent. `distlaunch.supervisor.step` has a handler for each."""


# Findings


class Planned(Frozen):
    """An attempt has a plan."""


class NodeBack(Frozen):
    """A node has connected and can be used. `new` is set if it had never been connected before."""

    node: int
    new: bool


class NodeLeaving(Frozen):
    """The agent of a node was stopped from outside, so the node's workers will exit in a moment."""

    node: int
    cause: Cause


class NodeLost(Frozen):
    """A node is gone, and its workers with it. `told` is set if the node was known to be leaving."""

    node: int
    cause: Cause
    told: bool


class AttemptFailed(Frozen):
    """The current attempt can no longer succeed. Either another attempt follows, or the job ends.

    `also` contains messages to show right after the failure.
    """

    cause: Cause
    also: tuple[ShowMessage, ...] = ()


class StartAgain(Frozen):
    """A new attempt is needed although no attempt has failed. `what` describes the restart in a message."""

    why: Why
    cause: Cause
    what: str


class SuccessDoubted(Frozen):
    """The job has succeeded, but an agent was stopped from outside, so ranks may have been stopped, too."""


class EndOvertaken(Frozen):
    """A job that is ending has received SIGTERM, so the scheduler may be ending the allocation."""


class TerminationWarning(Frozen):
    """A termination warning has arrived."""


class JobOver(Frozen):
    """The job ends. Its workers are stopped with `signum`.

    If `cause` is None, the job has succeeded. If `grace_s` is None, the job's grace period applies. `asked`
    is set if the scheduler has been asked about the cause.
    """

    cause: Cause | None = None
    signum: int = signal.SIGTERM
    grace_s: float | None = None
    asked: bool = False


AboutNode = NodeBack | NodeLeaving | NodeLost
Finding = (
    Planned
    | AboutNode
    | AttemptFailed
    | StartAgain
    | JobOver
    | SuccessDoubted
    | EndOvertaken
    | TerminationWarning
)
Step = tuple[State, tuple[Action | Finding, ...]]
"""The result of every handler and rule: the next state, and the actions and findings, in order.

An item that has a decider in `supervisor/step.py` is a finding. All others are actions.
"""
