"""What the supervisor wants done: executed by the loop, in order, without further decisions."""

import signal
from typing import Literal

from distlaunch.agent.frozen import Frozen


class Connect(Frozen):
    """Start the transport to a node and boot its agent."""

    node: int


class HoldPort(Frozen):
    """Hold the rendezvous port there; None = a free one of the agent's choice."""

    node: int
    port: int | None


class FindRoute(Frozen):
    """Find the interface that leads to `address`."""

    node: int
    address: str


class StartWorkers(Frozen):
    """Spawn the node's workers of the current generation."""

    node: int


class StopWorkers(Frozen):
    """End the node's workers (SIGTERM, SIGKILL after `grace_s`) and sweep; the agent stays."""

    node: int
    grace_s: float


class DumpStacks(Frozen):
    """Have the Python stacks of these workers told; `abort`: they may die of it."""

    node: int
    local_ranks: tuple[int, ...]
    abort: bool


class Reap(Frozen):
    """End what an earlier agent of this run has left on the node."""

    node: int


class GiveNotice(Frozen):
    """Send the node's workers `signum`, and tell them how long they have, if that is known."""

    node: int
    signum: int
    left_s: float | None


class AskScheduler(Frozen):
    """Ask the scheduler what becomes of our allocation, once."""


class Close(Frozen):
    """End the node's workers (`signum`, SIGKILL after `grace_s`), sweep, and let the agent leave."""

    node: int
    grace_s: float
    signum: int = signal.SIGTERM


class Drop(Frozen):
    """Kill the transport's process: the node's agent cleans up by itself when it notices."""

    node: int


class GiveUp(Frozen):
    """Drop a node that is overdue, and report its `LinkEnded` with what was heard from it."""

    node: int
    why: str


class Notice(Frozen):
    """A line for the user."""

    level: Literal["info", "warning", "error"]
    text: str


class Finish(Frozen):
    """The job is over; the state's outcome says how."""


Action = (
    Connect
    | HoldPort
    | FindRoute
    | StartWorkers
    | StopWorkers
    | DumpStacks
    | Reap
    | GiveNotice
    | AskScheduler
    | Close
    | Drop
    | GiveUp
    | Notice
    | Finish
)
