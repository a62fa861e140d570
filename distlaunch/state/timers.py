"""A job's timers: every deadline in the supervisor has a name here."""

from enum import Enum

from distlaunch.agent.frozen import Frozen


class Timer(Enum):
    """A job's timers, in the order in which those that are due at the same time come."""

    JOB = "job"
    """`timeouts.job` has passed."""
    VERDICT = "verdict"
    """No other rank has failed by itself: blame the first that lost a peer."""
    ASK = "ask"
    """The scheduler has not told what becomes of our allocation."""
    JOIN = "join"
    """`timeouts.join` has passed."""
    JOIN_NOTICE = "join notice"
    """Say which ranks have not joined."""
    STALL_NOTICE = "stall notice"
    """A stall has spread to every rank that it blocks: report it."""
    STALL_ACT = "stall act"
    """The time for stacks has passed: do what `on_stall` says."""
    STOP_NOTICE = "stop notice"
    """Say which ranks are still running."""
    PREPARE = "prepare"
    """A node that said hello has not answered since."""
    CLEAR = "clear"
    """A node has not confirmed the end of a generation."""
    CLOSE = "close"
    """A node has not confirmed its clean-up."""
    DRAIN = "drain"
    """Clean nodes have not delivered more of their output."""
    ANSWER = "answer"
    """Of a node: its hello is overdue."""
    RETRY = "retry"
    """Of a node: connect it again."""
    FENCE = "fence"
    """Of a node: its workers are taken to have ended, though it can't be asked."""
    BACKOFF = "backoff"
    """The next generation may start."""
    REJOIN = "rejoin"
    """Stop waiting for other nodes."""


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
