"""What one part of the supervisor finds, for another to decide on, within the same step."""

import signal

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.messages import WorkerExited
from distlaunch.supervisor.actions import Action, Notice
from distlaunch.supervisor.state import Cause, State, Why


class ConnectAgain(Frozen):
    """A node is to be connected once more, or another way."""

    node: int


class Prepare(Frozen):
    """A generation may begin on these nodes, in rank order."""

    members: tuple[int, ...]


class Planned(Frozen):
    """A generation has a plan."""


class Started(Frozen):
    """A generation's workers are being started."""


class NodeBack(Frozen):
    """A node has come, or has returned, and can be used."""

    node: int


class NodeLeaving(Frozen):
    """A node's agent was stopped by somebody: its workers will end in a moment."""

    node: int
    cause: Cause


class NodeLost(Frozen):
    """A node is gone, and its workers with it; `told`: it was known to be leaving."""

    node: int
    cause: Cause
    told: bool


class WorkerFinished(Frozen):
    """A worker has ended well, while all were running."""


class WorkerFailed(Frozen):
    """A worker has ended with a status other than 0."""

    rank: int
    event: WorkerExited


class DumpCame(Frozen):
    """A stalled worker has died of the SIGABRT that had it print its stacks; they are in its last output."""

    rank: int
    words: str


class GenerationFailed(Frozen):
    """The current generation can't succeed any more: another one follows, or the job ends.

    `also` is told right after that.
    """

    cause: Cause
    also: tuple[Notice, ...] = ()


class StartAgain(Frozen):
    """A new generation is wanted though none has failed; `what` says what is done."""

    why: Why
    cause: Cause
    what: str


class Terminated(Frozen):
    """The command was told to end the job by `signum`, maybe by a scheduler."""

    cause: Cause
    signum: int


class SuccessDoubted(Frozen):
    """The job has succeeded, but an agent was told to leave: its ranks may have been told to end, too."""


class EndNoticed(Frozen):
    """Somebody has announced the end of the job."""


class JobOver(Frozen):
    """The job ends, its workers by `signum`; `cause` None is success, `grace_s` None the job's own."""

    cause: Cause | None = None
    signum: int = signal.SIGTERM
    grace_s: float | None = None


Finding = (
    ConnectAgain
    | Prepare
    | Planned
    | Started
    | NodeBack
    | NodeLeaving
    | NodeLost
    | WorkerFinished
    | WorkerFailed
    | DumpCame
    | GenerationFailed
    | StartAgain
    | Terminated
    | SuccessDoubted
    | EndNoticed
    | JobOver
)
Step = tuple[State, tuple[Action | Finding, ...]]
"""What every handler and rule gives: the next state, what to do, and what it has found, in order.

What has a decider in `supervisor/step.py` is a finding; the rest is done.
"""
