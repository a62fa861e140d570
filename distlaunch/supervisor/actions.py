"""What the supervisor wants done: executed by the loop, in order, without further decisions."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Connect:
    """Start the transport to a node and boot its agent."""

    node: int


@dataclass(frozen=True)
class HoldPort:
    """Hold the rendezvous port there; None = a free one of the agent's choice."""

    node: int
    port: int | None


@dataclass(frozen=True)
class FindRoute:
    """Find the interface that leads to `address`."""

    node: int
    address: str


@dataclass(frozen=True)
class StartWorkers:
    """Spawn the node's workers of the current generation."""

    node: int


@dataclass(frozen=True)
class Close:
    """End the node's workers (SIGTERM, SIGKILL after `grace_s`), sweep, and let the agent leave."""

    node: int
    grace_s: float


@dataclass(frozen=True)
class Drop:
    """Kill the transport's process: the node's agent cleans up by itself when it notices."""

    node: int


@dataclass(frozen=True)
class Notice:
    """A line for the user."""

    level: Literal["info", "warning", "error"]
    text: str


@dataclass(frozen=True)
class Finish:
    """The job is over; the state's outcome says how."""


Action = Connect | HoldPort | FindRoute | StartWorkers | Close | Drop | Notice | Finish
