"""Actions of the supervisor: the loop executes them in order, without further decisions."""

from typing import Any, Literal

from distlaunch.agent.frozen import Frozen


class Connect(Frozen):
    """Start the transport to a node and boot its agent."""

    node: int


class Send(Frozen):
    """Send a node's agent a command from `agent/messages.py`."""

    node: int
    command: tuple[Any, ...]


class SendTree(Frozen):
    """Send a node the contents missing from its store. `contents` is as in `TreeLacks`."""

    node: int
    contents: tuple[int, ...]


class StartWorkers(Frozen):
    """Send a node's agent the command that starts its workers in the current attempt.

    The command is created only when it is sent, because the environments of thousands of ranks are large.
    """

    node: int


class AskScheduler(Frozen):
    """Ask the scheduler once whether it is ending this allocation."""


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


Action = Connect | Send | SendTree | StartWorkers | AskScheduler | Drop | GiveUp | ShowMessage | Finish
