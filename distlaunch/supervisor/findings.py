"""Findings: facts from one part of the supervisor on which another part decides in the same step."""

import signal

from distlaunch.agent.frozen import Frozen
from distlaunch.supervisor.actions import Action, ShowMessage
from distlaunch.supervisor.state import Cause, State, Why


class Planned(Frozen):
    """An attempt has a plan."""


class NodeBack(Frozen):
    """A node has connected, or has returned, and can be used."""

    node: int


class NodeLeaving(Frozen):
    """The agent of a node was stopped from outside, so its workers will end in a moment."""

    node: int
    cause: Cause


class NodeLost(Frozen):
    """A node is gone, and its workers with it. `told` is set if it was known to be leaving."""

    node: int
    cause: Cause
    told: bool


class AttemptFailed(Frozen):
    """The current attempt can't succeed any more: either another attempt follows, or the job ends.

    `also` are messages to show right after that.
    """

    cause: Cause
    also: tuple[ShowMessage, ...] = ()


class StartAgain(Frozen):
    """A new attempt is needed although no attempt has failed. `what` describes the action in a message."""

    why: Why
    cause: Cause
    what: str


class SuccessDoubted(Frozen):
    """The job has succeeded, but an agent was stopped from outside, so ranks may have been, too."""


class TerminationWarning(Frozen):
    """A termination warning has arrived."""


class JobOver(Frozen):
    """The job ends. Its workers are stopped by `signum`.

    If `cause` is None, the job has succeeded. If `grace_s` is None, the job's grace period applies. `asked`
    is set if the scheduler has been asked about the cause.
    """

    cause: Cause | None = None
    signum: int = signal.SIGTERM
    grace_s: float | None = None
    asked: bool = False


AboutNode = NodeBack | NodeLeaving | NodeLost
AboutScheduler = SuccessDoubted | TerminationWarning
Finding = Planned | AboutNode | AboutScheduler | AttemptFailed | StartAgain | JobOver
Step = tuple[State, tuple[Action | Finding, ...]]
"""The result of every handler and rule: the next state, and the actions and findings, in order.

An item that has a decider in `supervisor/step.py` is a finding. All others are actions.
"""
