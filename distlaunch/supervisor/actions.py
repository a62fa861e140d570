"""Actions of the supervisor: the loop executes them in order, without further decisions."""

import signal
from typing import Literal

from distlaunch.agent.frozen import Frozen


class Connect(Frozen):
    """Start the transport to a node and boot its agent."""

    node: int


class HoldPort(Frozen):
    """Hold the rendezvous port, or any free port if None, and `further` additional free ports on a node."""

    node: int
    port: int | None
    further: int = 0


class FindRoute(Frozen):
    """Find the network interface that leads to `address`."""

    node: int
    address: str


class PlaceTree(Frozen):
    """Make the job's tree on a node."""

    node: int


class SendTree(Frozen):
    """Send a node the contents that it lacks, as in `TreeLacks`."""

    node: int
    contents: tuple[int, ...]


class StartWorkers(Frozen):
    """Spawn the workers of a node for the current attempt."""

    node: int


class StopWorkers(Frozen):
    """Stop the workers of a node (SIGTERM, SIGKILL after `grace_s`) and sweep it. The agent stays."""

    node: int
    grace_s: float


class Capture(Frozen):
    """Collect evidence on a node: the state of its workers, and the Python stacks of `local_ranks`.

    With `abort`, collecting the stacks may end these workers. It must be `quick` if they are about to be
    stopped.
    """

    node: int
    local_ranks: tuple[int, ...] = ()
    abort: bool = False
    quick: bool = False


class Reap(Frozen):
    """Kill all processes that an earlier agent of this run left on a node."""

    node: int


class WarnWorkers(Frozen):
    """Send `signum` to the workers of a node as a termination warning, with the seconds left, if known."""

    node: int
    signum: int
    left_s: float | None


class AskScheduler(Frozen):
    """Ask the scheduler once whether it ends this allocation."""


class Close(Frozen):
    """Stop the workers of a node (`signum`, SIGKILL after `grace_s`), sweep it, and let the agent exit."""

    node: int
    grace_s: float
    signum: int = signal.SIGTERM


class Drop(Frozen):
    """Kill the transport process of a node. The agent notices and cleans up by itself."""

    node: int


class GiveUp(Frozen):
    """Drop an overdue node, and report its `LinkEnded` with all output received from the node."""

    node: int
    why: str


class ShowMessage(Frozen):
    """A message for the user."""

    level: Literal["info", "warning", "error"]
    text: str


class Finish(Frozen):
    """End the run. The outcome is in the state."""


Order = HoldPort | FindRoute | PlaceTree | StartWorkers | StopWorkers | Capture | Reap | WarnWorkers | Close
"""Actions that a node's agent carries out: each becomes a command to it."""
Action = Order | Connect | SendTree | AskScheduler | Drop | GiveUp | ShowMessage | Finish
