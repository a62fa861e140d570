"""The commands to agents, as tests compare them: with the node, without texts and environments."""

from typing import Any

from distlaunch.agent import messages
from distlaunch.agent.frozen import Frozen
from distlaunch.supervisor.actions import Action, Send


class HoldPort(Frozen):
    node: int
    port: int | None
    further: int = 0


class FindRoute(Frozen):
    node: int
    address: str


class PlaceTree(Frozen):
    node: int


class StopWorkers(Frozen):
    node: int
    grace_s: float


class Capture(Frozen):
    node: int
    local_ranks: tuple[int, ...] = ()
    abort: bool = False
    quick: bool = False


class Reap(Frozen):
    node: int


class WarnWorkers(Frozen):
    node: int
    signum: int
    left_s: float | None


class Close(Frozen):
    node: int
    grace_s: float
    signum: int = 15


class Collect(Frozen):
    node: int


class Dismiss(Frozen):
    node: int


_KINDS = (HoldPort, FindRoute, PlaceTree, StopWorkers, Capture, Reap, WarnWorkers, Close, Collect, Dismiss)
KINDS: dict[type, Any] = {getattr(messages, kind.__name__): kind for kind in _KINDS}


def orders(actions: tuple[Action, ...]) -> list[Any]:
    """The actions, with an order in place of each command; its first fields are the command's."""
    return [_order(action) if isinstance(action, Send) else action for action in actions]


def _order(action: Send) -> Any:
    kind = KINDS[type(action.command)]
    return kind(action.node, *action.command[: len(kind._fields) - 1])
