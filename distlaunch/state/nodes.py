"""Where a node is: one type for each phase of its life, with just what is known in it.

Connecting ⇄ Retrying        its hello is awaited, or the next attempt
    │                        ── `away`: the job goes on without it until it returns
    ▼
Up ──▶ Leaving               its agent answers; it was stopped by somebody, and will go
Reaping ──▶ Up               it has returned, and what an earlier agent left there is being ended
    ▼
Clean ──▶ Closed             at the end of the job: clean, and the last of its output has come
Unusable, Lost               nothing more will come from it
"""

from enum import Enum

from distlaunch.agent.frozen import Frozen
from distlaunch.plan.layout import Facts
from distlaunch.state.many import Many
from distlaunch.transports.failure import LinkFailure

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


class Nodes(Many[Node]):
    """Those of the pool, in its order."""

    __slots__ = ()

    @staticmethod
    def _weigh(item: Node) -> tuple[int, ...]:
        unrouted = isinstance(item, Up) and item.route is None
        return (is_expected(item), unrouted, isinstance(item, Linked), is_over(item))

    @property
    def expected(self) -> int:
        """How many are being connected for the first time."""
        return self._count(0)

    @property
    def unrouted(self) -> int:
        """How many are up and have no route."""
        return self._count(1)

    @property
    def linked(self) -> int:
        """How many have a link."""
        return self._count(2)

    @property
    def over(self) -> int:
        """From how many nothing more will come."""
        return self._count(3)
