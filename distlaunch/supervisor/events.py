"""What happens to a job: everything the supervisor ever learns. `node` is an index, `at` seconds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distlaunch.plan.layout import Facts
from distlaunch.transport.failure import LinkFailure


@dataclass(frozen=True)
class AgentUp:
    """An agent has said hello."""

    node: int
    facts: Facts
    hostname: str


@dataclass(frozen=True)
class LinkEnded:
    """A link has ended, whatever the reason: `failure` is what the transport's words mean."""

    node: int
    failure: LinkFailure


@dataclass(frozen=True)
class PortHeld:
    """The first node holds the rendezvous port."""

    node: int
    port: int


@dataclass(frozen=True)
class PortRefused:
    """The rendezvous port can't be had; `owners` are {uid, pid, command} as far as visible."""

    node: int
    error: str
    owners: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class RouteFound:
    """How `node` reaches MASTER_ADDR: the address it resolved to and the interface that leads there."""

    node: int
    address: str
    interface: str | None


@dataclass(frozen=True)
class RouteFailed:
    """`node` can't resolve MASTER_ADDR, or has no route to it."""

    node: int
    error: str


@dataclass(frozen=True)
class WorkerStarted:
    """A worker's exec has succeeded."""

    node: int
    local_rank: int
    pid: int


@dataclass(frozen=True)
class WorkerUnstarted:
    """A worker could not be started: `stage` is fork, workdir or exec; `errno` and `text` say why."""

    node: int
    local_rank: int
    stage: str
    errno: int
    text: str


@dataclass(frozen=True)
class WorkerExited:
    """A worker has ended: `status` is its exit code, or the negative signal number."""

    node: int
    local_rank: int
    status: int
    at: float
    error_record: Any = None


@dataclass(frozen=True)
class RanksJoined:
    """Workers have connected to the rendezvous."""

    node: int
    local_ranks: tuple[int, ...]


@dataclass(frozen=True)
class OutputLost:
    """So many bytes of a worker's output could not be kept on its node."""

    node: int
    local_rank: int
    stream: int
    size: int


@dataclass(frozen=True)
class Swept:
    """No descendant of the node's agent is left; `leftovers` processes had outlived the workers."""

    node: int
    generation: int
    leftovers: int


@dataclass(frozen=True)
class Stuck:
    """These processes, as {pid, command}, resist SIGKILL."""

    node: int
    processes: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Interrupted:
    """The user or the system wants the job to end."""

    signum: int


@dataclass(frozen=True)
class Ticked:
    """Time has passed: a deadline of the state may be due."""


Event = (
    AgentUp
    | LinkEnded
    | PortHeld
    | PortRefused
    | RouteFound
    | RouteFailed
    | WorkerStarted
    | WorkerUnstarted
    | WorkerExited
    | RanksJoined
    | OutputLost
    | Swept
    | Stuck
    | Interrupted
    | Ticked
)
