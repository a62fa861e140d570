"""The nodes of the pool and the workers of an attempt, as the supervisor knows them."""

from collections.abc import Iterable
from enum import Enum
from typing import Any, ClassVar, TypeVar

from distlaunch.agent.frozen import Frozen
from distlaunch.plan.layout import Facts
from distlaunch.transports.failure import LinkFailure

S = TypeVar("S", bound="Counted[Any]")
T = TypeVar("T")


class Counted(tuple[T, ...]):
    """A tuple that keeps count of its items, so that no step has to look at each of thousands.

    A subclass names what it counts in `Counts`, and gives each item's share in `_weigh`.
    """

    Counts: ClassVar[Any]
    counts: Any

    def __new__(cls, items: Iterable[T] = ()) -> "Counted[T]":
        """Count the items, once."""
        new = super().__new__(cls, items)
        new.counts = cls.Counts(*map(sum, zip(*map(cls._weigh, new), strict=True)))
        return new

    @staticmethod
    def _weigh(item: Any) -> tuple[int, ...]:
        raise NotImplementedError

    def replaced(self: S, index: int, item: Any) -> S:  # noqa: PYI019  # Self comes with Python 3.11
        """Return a copy with another item at `index`."""
        new = tuple.__new__(type(self), (*self[:index], item, *self[index + 1 :]))
        sums = zip(self.counts, self._weigh(self[index]), self._weigh(item), strict=True)
        new.counts = self.Counts(*(count - less + more for count, less, more in sums))
        return new


ASKED = 0
"""In the place of a port: it was asked for, and is not known yet."""


class Away(Frozen):
    """A node that the job goes on without: `occupied` while workers of ours may still run there.

    `unfit` says why it could not take part when it was last there.
    """

    occupied: bool = False
    unfit: str = ""


class Connecting(Frozen):
    """Its agent's hello is awaited; `failure` is the last attempt's.

    `asked` and `held` are what `Up` will have: an agent may be asked before it is there.
    """

    attempt: int = 1
    failure: LinkFailure | None = None
    away: Away | None = None
    asked: str = ""
    held: int | None = None


class Retrying(Frozen):
    """It will be connected again; `attempt` was the last one."""

    attempt: int
    failure: LinkFailure | None
    away: Away | None = None


class Route(Frozen):
    """Its way to MASTER_ADDR: the interface, its own address there, None where that is not known.

    `ends` are that address as the node was asked about it, and what it came to. `misnamed` has variables that
    name interfaces of no use there: name, setting, and why.
    """

    interface: str | None = None
    source: str | None = None
    ends: tuple[str, ...] = ()
    misnamed: tuple[tuple[str, str, str], ...] = ()


class Up(Frozen):
    """Its agent answers. It is `occupied` from the start of its workers until it has said that it is clean.

    `asked` is the address to which it is to find its route, `held` the rendezvous port that it has for the
    first generation, or ASKED. `unfit` says why it can't take part.
    """

    facts: Facts
    route: Route | None = None
    asked: str = ""
    held: int | None = None
    occupied: bool = False
    unfit: str = ""


class Reaping(Frozen):
    """It has returned at that `attempt`; what an earlier agent left there is being ended."""

    facts: Facts
    attempt: int
    away: Away


class Leaving(Frozen):
    """Its agent was stopped by somebody, and its link will end; `returned`: it was Reaping before."""

    occupied: bool
    attempt: int = 1
    returned: bool = False


class End(Enum):
    """The end of the job there: nothing of it is left; then all that it printed has come, or was given up."""

    CLEAN = "clean"
    CLOSED = "closed"


class Unusable(Frozen):
    """It never took part."""

    failure: LinkFailure | None = None


class Lost(Frozen):
    """It took part, and does not any more."""

    failure: LinkFailure | None = None
    occupied: bool = False


Node = Connecting | Retrying | Up | Reaping | Leaving | End | Unusable | Lost
Linked = Up | Reaping | Leaving
"""It has an agent that we hear of."""


def is_over(node: Node) -> bool:
    """Whether nothing more will come from it."""
    return node is End.CLOSED or isinstance(node, Unusable | Lost)


def away_of(node: Node) -> Away | None:
    """What is known of a node that the job goes on without, for as long as it may return."""
    return node.away if isinstance(node, Connecting | Retrying | Reaping) else None


def is_missing(node: Node) -> bool:
    """Whether the job goes on without it, after it was there or at least expected."""
    return (
        isinstance(node, Lost) or away_of(node) is not None or (isinstance(node, Leaving) and node.returned)
    )


def may_be_occupied(node: Node) -> bool:
    """Whether workers of ours may run there."""
    if isinstance(node, Up | Leaving | Lost):
        return node.occupied
    away = away_of(node)
    return away is not None and away.occupied


def emptied(node: Node) -> Node:
    """The node once its workers are known to have ended."""
    if isinstance(node, Up | Leaving | Lost):
        return node._replace(occupied=False)
    if isinstance(node, Connecting | Retrying | Reaping) and node.away:
        return node._replace(away=node.away._replace(occupied=False))
    return node


def no_more(node: Node, failure: LinkFailure | None) -> Lost | Unusable:
    """The node once nothing more is hoped for from it."""
    return Lost(failure, may_be_occupied(node)) if is_missing(node) else Unusable(failure)


def is_usable(node: Node) -> bool:
    """Whether workers can be started there."""
    return isinstance(node, Up) and not (node.occupied or node.unfit)


def is_expected(node: Node) -> bool:
    """Whether it is still being connected for the first time."""
    return isinstance(node, Connecting | Retrying) and node.away is None


def unfit_words(node: Node) -> str:
    """Why it can't take part, or could not when it was last there; nothing where it can."""
    away = away_of(node)
    return node.unfit if isinstance(node, Up) else away.unfit if away else ""


def facts_of(node: Node) -> Facts:
    """What its agent has told of it."""
    return node.facts if isinstance(node, Up | Reaping) else Facts("")


def route_of(node: Node) -> Route | None:
    """Its way to MASTER_ADDR, once that is known."""
    return node.route if isinstance(node, Up) else None


def failure_of(node: Node) -> LinkFailure | None:
    """How its link ended, if that is how it is now."""
    return node.failure if isinstance(node, Connecting | Retrying | Unusable | Lost) else None


def phase_word(node: Node) -> str:
    """Its phase in a word, for machines: an agent that reaps or leaves is up."""
    if isinstance(node, End):
        return node.value
    return "up" if isinstance(node, Linked) else type(node).__name__.lower()


class NodeCounts(Frozen):
    """Nodes that are being connected for the first time, that are up without a route, that have a link, and
    from which nothing more will come."""

    expected: int = 0
    unrouted: int = 0
    linked: int = 0
    over: int = 0


class Nodes(Counted[Node]):
    """The nodes of the pool, in its order."""

    Counts = NodeCounts
    counts: NodeCounts

    @staticmethod
    def _weigh(item: Node) -> tuple[int, ...]:
        unrouted = isinstance(item, Up) and item.route is None
        return (is_expected(item), unrouted, isinstance(item, Linked), is_over(item))


class WorkerPhase(Enum):
    """What is known of a worker whose end is not."""

    PLANNED = "planned"
    RUNNING = "running"
    UNSTARTED = "not started"
    VANISHED = "lost with its node"


class Exited(Frozen):
    """It ended by itself, or `stopped`: after we told it to. The rest is as in the event.

    `peer_gone`: it failed because another rank was gone or, if `timed_out`, never came.
    """

    status: int
    at: float
    stopped: bool = False
    error_record: Any = None
    oom_kills: int = 0
    shm: tuple[int, ...] = ()
    peer_gone: bool = False
    timed_out: bool = False


class Meeting(Frozen):
    """What is seen of its way to the rendezvous: until it has `joined`, whether it is `trying`, in words."""

    joined: bool = False
    trying: bool = False
    doing: str = ""


class Stall(Frozen):
    """It neither prints nor computes; `stack` is where, innermost frame first, once that is known.

    `stopped_pid` is the process of its own that a signal has stopped.
    """

    stack: tuple[str, ...] = ()
    stopped_pid: int | None = None


class Use(Frozen):
    """What it uses: CPU in percent of one, bytes, its GPU in percent, bytes there; None = not known."""

    cpu: float
    memory: int
    gpu: int | None = None
    gpu_memory: int | None = None


class Worker(Frozen):
    """One worker of the current generation; `pid` and `cpus` are known once it has started.

    `dumping`: it was told to print its stacks, and may die of that.
    """

    rank: int
    phase: WorkerPhase | Exited = WorkerPhase.PLANNED
    pid: int | None = None
    cpus: str | None = None
    meeting: Meeting = Meeting()
    stall: Stall | None = None
    dumping: bool = False

    @property
    def status(self) -> int | None:
        """Its exit status, or the negative signal number; None unless it has ended."""
        return self.phase.status if isinstance(self.phase, Exited) else None

    @property
    def stopped(self) -> bool:
        """Whether it ended after we told it to."""
        return isinstance(self.phase, Exited) and self.phase.stopped

    @property
    def running(self) -> bool:
        """Whether its process is there, as far as we know."""
        return self.phase is WorkerPhase.RUNNING

    @property
    def going(self) -> bool:
        """Whether its end is still to come."""
        return self.phase in (WorkerPhase.PLANNED, WorkerPhase.RUNNING)

    @property
    def phase_word(self) -> str:
        """Its phase in a word or a few."""
        return "exited" if isinstance(self.phase, Exited) else self.phase.value


class WorkerCounts(Frozen):
    """Workers that exited with status 0, that joined the rendezvous, that joined or try to, and that haven't
    ended."""

    succeeded: int = 0
    joined: int = 0
    joining: int = 0
    alive: int = 0


class Workers(Counted[Worker]):
    """The workers of an attempt, in rank order."""

    Counts = WorkerCounts
    counts: WorkerCounts

    @staticmethod
    def _weigh(item: Worker) -> tuple[int, ...]:
        meeting = item.meeting
        return (item.status == 0, meeting.joined, meeting.joined or meeting.trying, item.going)
