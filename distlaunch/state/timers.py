"""What may come due: every time that a job waits for has a name here, and nothing else has times."""

from enum import Enum

from distlaunch.agent.frozen import Frozen


class Timer(Enum):
    """A job's timers, in the order in which those that are due at the same time come."""

    JOB = "job"
    """`timeouts.job` is over."""
    VERDICT = "verdict"
    """Who lost a peer is blamed, for nobody else has failed by itself."""
    JOIN = "join"
    """`timeouts.join` is over."""
    JOIN_NOTICE = "join notice"
    """Who has not joined is told."""
    STALL_NOTICE = "stall notice"
    """A stall has spread to all whom it blocks: it is told."""
    STALL_ACT = "stall act"
    """Stacks had their time: what `on_stall` says is done."""
    STOP_NOTICE = "stop notice"
    """Who has not ended yet is told."""
    PREPARE = "prepare"
    """A node that said hello has not answered since."""
    CLEAR = "clear"
    """A node has not confirmed the end of a generation."""
    CLOSE = "close"
    """A node has not confirmed its clean-up."""
    DRAIN = "drain"
    """Clean nodes have not delivered more of their output."""
    ANSWER = "answer"
    """Of a node: its hello or, when it comes late, its route is overdue."""
    RETRY = "retry"
    """Of a node: it is connected again."""
    FENCE = "fence"
    """Of a node: its workers are taken to have ended, though it can't be asked."""
    BACKOFF = "backoff"
    """The next generation may start."""
    REJOIN = "rejoin"
    """Other nodes are not waited for any longer."""


WATCHES = (
    Timer.VERDICT,
    Timer.JOIN,
    Timer.JOIN_NOTICE,
    Timer.STALL_NOTICE,
    Timer.STALL_ACT,
    Timer.STOP_NOTICE,
)
"""Those that watch workers, from their start until they are told to end, or until they have ended."""


class Alarm(Frozen):
    """One timer that is set: of the job, or of one node."""

    timer: Timer
    node: int | None = None
