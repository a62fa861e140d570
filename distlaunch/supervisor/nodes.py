"""Nodes of the pool, and workers of an attempt, as the supervisor sees them."""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, ClassVar, TypeVar

from distlaunch.agent.frozen import Frozen
from distlaunch.plan.placement import Facts
from distlaunch.transports.failure import LinkFailure

S = TypeVar("S", bound="Counted[Any]")
T = TypeVar("T")


class Counted(tuple[T, ...]):
    """A tuple that keeps counts of its items, so that a step doesn't have to visit thousands of items.

    A subclass defines its counts in `Counts`, whose method `of` returns the contribution of one item.
    """

    Counts: ClassVar[Any]
    counts: Any

    def __new__(cls, items: Iterable[T] = ()) -> "Counted[T]":
        """Count the items once."""
        new = super().__new__(cls, items)
        new.counts = cls.Counts(*map(sum, zip(*map(cls.Counts.of, new), strict=True)))
        return new

    def replaced(self: S, index: int, item: Any) -> S:  # noqa: PYI019  # Self comes with Python 3.11
        """Return a copy with another item at `index`."""
        new = tuple.__new__(type(self), (*self[:index], item, *self[index + 1 :]))
        sums = zip(self.counts, self.Counts.of(self[index]), self.Counts.of(item), strict=True)
        new.counts = self.Counts(*(count - less + more for count, less, more in sums))
        return new


ASKED = ()
"""The placeholder for ports that have been requested but are not known yet."""


class Away(Frozen):
    """A node that the job continues without. It is `occupied` while workers may still run there.

    `unfit` is the reason why the node could not take part when it was last connected. `new` is set if it has
    never been connected. `machine` identifies the host of its last workers, as in `Facts`.
    """

    occupied: bool = False
    unfit: str = ""
    new: bool = False
    machine: str = ""


class Code(Frozen):
    """The job's tree on a node: whether it is `placed`, and how many times contents were sent.

    `environment` and `versions` are as in `TreePlaced`.
    """

    placed: bool = False
    sent: int = 0
    environment: str = ""
    versions: tuple[tuple[str, str], ...] = ()


class Connecting(Frozen):
    """A node whose agent is being connected. `failure` is the failure of the previous try.

    `asked`, `held` and `code` are as in `Up`, since an agent receives these requests while it boots.
    """

    tries: int = 1
    failure: LinkFailure | None = None
    away: Away | None = None
    asked: str = ""
    held: tuple[int, ...] | None = None
    code: Code | None = None


class Retrying(Frozen):
    """A node that will be connected again. `tries` is the number of tries so far."""

    tries: int
    failure: LinkFailure | None
    away: Away | None = None


class Route(Frozen):
    """The route of a node to MASTER_ADDR: its interface and source address, each None if unknown.

    `ends` contains the requested address and the address that it resolved to. `misnamed` contains the
    variables that name unusable interfaces, each as name, setting and reason.
    """

    interface: str | None = None
    source: str | None = None
    ends: tuple[str, ...] = ()
    misnamed: tuple[tuple[str, str, str], ...] = ()


class Up(Frozen):
    """A node whose agent responds.

    The node is `occupied` from the start of its workers until it reports that it is clean. `asked` is the
    address to which a route was requested. `held` contains the ports that the node holds for the first
    attempt, or is ASKED. `unfit` is the reason why the node can't take part. `seen` contains the facts
    from `RouteFound`. `code` is None until the job's tree is requested.
    """

    facts: Facts
    route: Route | None = None
    asked: str = ""
    held: tuple[int, ...] | None = None
    occupied: bool = False
    unfit: str = ""
    seen: Mapping[str, Any] | None = None
    code: Code | None = None


class Reaping(Frozen):
    """A node that has returned. Its leftover processes are being killed."""

    facts: Facts
    tries: int
    away: Away


class Leaving(Frozen):
    """A node whose agent was stopped from outside, so its link will end.

    `returned` is set if the node was Reaping before. `machine` is as in `Away`.
    """

    occupied: bool
    tries: int = 1
    returned: bool = False
    machine: str = ""


class End(Enum):
    """The end of the job on a node. First, all of the node's processes are gone (CLEAN). Then, all of its
    output has arrived (DELIVERED). Then, nothing more can arrive (CLOSED)."""

    CLEAN = "clean"
    DELIVERED = "delivered"
    CLOSED = "closed"


class Unusable(Frozen):
    """A node that never took part."""

    failure: LinkFailure | None = None


class Lost(Frozen):
    """A node that took part and no longer does."""

    failure: LinkFailure | None = None
    occupied: bool = False


Node = Connecting | Retrying | Up | Reaping | Leaving | End | Unusable | Lost
Linked = Up | Reaping | Leaving
"""A node with an agent that sends reports."""


def is_over(node: Node) -> bool:
    """Return whether nothing more can arrive from a node."""
    return node is End.CLOSED or isinstance(node, Unusable | Lost)


def away_of(node: Node) -> Away | None:
    """Return the record of a node that the job continues without, as long as the node may return."""
    return node.away if isinstance(node, Connecting | Retrying | Reaping) else None


def is_missing(node: Node) -> bool:
    """Return whether the job continues without a node that was previously connected or at least expected."""
    return (
        isinstance(node, Lost) or away_of(node) is not None or (isinstance(node, Leaving) and node.returned)
    )


def may_return(node: Node) -> bool:
    """Return whether another agent may come to a node that is lost, or whose agent is about to exit."""
    return isinstance(node, Leaving) or away_of(node) is not None


def may_be_occupied(node: Node) -> bool:
    """Return whether workers may be running on a node."""
    if isinstance(node, Up | Leaving | Lost):
        return node.occupied
    away = away_of(node)
    return away is not None and away.occupied


def emptied(node: Node) -> Node:
    """Return the state of a node whose workers are known to have ended."""
    if isinstance(node, Up | Leaving | Lost):
        return node._replace(occupied=False)
    if isinstance(node, Connecting | Retrying | Reaping) and node.away:
        return node._replace(away=node.away._replace(occupied=False))
    return node


def given_up(node: Node, failure: LinkFailure | None) -> Lost | Unusable:
    """Return the state of a node after the last attempt to reach it."""
    return Lost(failure, may_be_occupied(node)) if is_missing(node) else Unusable(failure)


def is_usable(node: Node) -> bool:
    """Return whether workers can be started on a node."""
    return isinstance(node, Up) and not (node.occupied or node.unfit)


def is_expected(node: Node) -> bool:
    """Return whether a node is still being connected for the first time."""
    return isinstance(node, Connecting | Retrying) and node.away is None


def unfit_words(node: Node) -> str:
    """Return why a node can't take part, or could not when it was last connected; "" if it can."""
    away = away_of(node)
    return node.unfit if isinstance(node, Up) else away.unfit if away else ""


def facts_of(node: Node) -> Facts:
    """Return the facts that the agent of a node has reported."""
    return node.facts if isinstance(node, Up | Reaping) else Facts("")


def machine_of(node: Node) -> str:
    """Return the ID of the host of a node's last workers; "" = unknown."""
    if isinstance(node, Leaving):
        return node.machine
    away = away_of(node)
    return away.machine if away else facts_of(node).machine


def route_of(node: Node) -> Route | None:
    """Return the route of a node to MASTER_ADDR, or None if it isn't known."""
    return node.route if isinstance(node, Up) else None


def failure_of(node: Node) -> LinkFailure | None:
    """Return the failure that ended a node's link, if it determines the node's present state."""
    return node.failure if isinstance(node, Connecting | Retrying | Unusable | Lost) else None


def phase_word(node: Node) -> str:
    """Return the phase of a node in one word, for JSON. A node whose agent is reaping or leaving is up."""
    if isinstance(node, End):
        return node.value
    return "up" if isinstance(node, Linked) else type(node).__name__.lower()


class NodeCounts(Frozen):
    """Node counts by state: first connection in progress, up without a route, with a link, and ended."""

    expected: int = 0
    unrouted: int = 0
    linked: int = 0
    over: int = 0

    @staticmethod
    def of(node: Node) -> tuple[int, ...]:
        """Return 1 for each count that includes the node, else 0."""
        unrouted = isinstance(node, Up) and node.route is None
        return (is_expected(node), unrouted, isinstance(node, Linked), is_over(node))


class Nodes(Counted[Node]):
    """The nodes of the pool, in order."""

    Counts = NodeCounts
    counts: NodeCounts


class WorkerPhase(Enum):
    """The phase of a worker that is not known to have exited."""

    PLANNED = "planned"
    RUNNING = "running"
    UNSTARTED = "not started"
    VANISHED = "lost with its node"


class Exited(Frozen):
    """The exit of a worker. Fields not described here are as in `WorkerExited`.

    `stopped` is set if the worker had been told to stop. `peer_gone` is set if it failed because another rank
    was gone. `timed_out` is set if it failed because another rank never arrived. `on_gpu` is set if it was
    waiting on its GPU, in which case its stack doesn't show the wait.
    """

    status: int
    at: float
    stopped: bool = False
    error_record: Any = None
    oom_kills: int = 0
    shm: tuple[int, ...] = ()
    peer_gone: bool = False
    timed_out: bool = False
    on_gpu: bool = False


class Use(Frozen):
    """Resource use of a worker: CPU (percent of one core), memory (bytes), GPU (percent), GPU memory (bytes).

    None = unknown.
    """

    cpu: float
    memory: int
    gpu: int | None = None
    gpu_memory: int | None = None


class RankState(Frozen):
    """A worker of the current attempt. `pid` and `cpus` are known once it has started.

    `joined` is set once the worker has joined the rendezvous. `torch` is the version of torch it has loaded,
    if known. `trying` is set while the worker is trying to join, and `doing` describes its activity.
    `stalled` is set if it neither prints nor computes. In that case, `stack` contains its innermost frames,
    innermost first, once they are known. `stopped_pid` is the PID of one of its processes, if a signal has
    stopped it. Until `dumping_until`, the worker may be killed by a request to print its stacks.
    """

    rank: int
    phase: WorkerPhase | Exited = WorkerPhase.PLANNED
    pid: int | None = None
    cpus: str | None = None
    joined: bool = False
    torch: str = ""
    trying: bool = False
    doing: str = ""
    stalled: bool = False
    stack: tuple[str, ...] = ()
    stopped_pid: int | None = None
    dumping_until: float = 0.0

    @property
    def status(self) -> int | None:
        """Return the exit status, or the negative signal number; None before the exit."""
        return self.phase.status if isinstance(self.phase, Exited) else None

    @property
    def stopped(self) -> bool:
        """Return whether the worker ended after it was told to stop."""
        return isinstance(self.phase, Exited) and self.phase.stopped

    @property
    def succeeded(self) -> bool:
        """Return whether the worker exited with status 0, without having been told to stop.

        After a stop signal, status 0 doesn't show that its work is complete.
        """
        return self.status == 0 and not self.stopped

    @property
    def running(self) -> bool:
        """Return whether the process is known to exist."""
        return self.phase is WorkerPhase.RUNNING

    @property
    def going(self) -> bool:
        """Return whether the worker has not ended yet."""
        return self.phase in (WorkerPhase.PLANNED, WorkerPhase.RUNNING)

    @property
    def phase_word(self) -> str:
        """Return the phase in a few words."""
        return "exited" if isinstance(self.phase, Exited) else self.phase.value


class WorkerCounts(Frozen):
    """Worker counts: succeeded, joined the rendezvous, joined or trying to, and not ended."""

    succeeded: int = 0
    joined: int = 0
    joining: int = 0
    alive: int = 0

    @staticmethod
    def of(worker: RankState) -> tuple[int, ...]:
        """Return 1 for each count that includes the worker, else 0."""
        return (worker.succeeded, worker.joined, worker.joined or worker.trying, worker.going)


class RankStates(Counted[RankState]):
    """The workers of an attempt, in rank order."""

    Counts = WorkerCounts
    counts: WorkerCounts
