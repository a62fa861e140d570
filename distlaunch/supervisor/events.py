"""What happens to a job: all that the supervisor ever learns. `node` is an index, `at` is in seconds."""

from collections.abc import Mapping
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.plan.layout import Facts
from distlaunch.supervisor.state import Timer
from distlaunch.transports.failure import LinkFailure


class AgentUp(Frozen):
    """An agent has said hello."""

    node: int
    facts: Facts
    hostname: str


class LinkEnded(Frozen):
    """A link has ended, whatever the reason: `failure` is what the transport's words mean."""

    node: int
    failure: LinkFailure


class AgentLeaving(Frozen):
    """An agent leaves, and its workers will follow: of a signal, or as it is `orphaned`: its guardian died.

    Without a signal (0), what we send has stopped to reach it, or reaches it altered: `damage` says how.
    """

    node: int
    signum: int
    orphaned: bool = False
    damage: str = ""


class Noticed(Frozen):
    """An agent got a signal by which a scheduler announces the end of the job."""

    node: int
    signum: int


class AllocationTold(Frozen):
    """What the scheduler says of our allocation: whether it `ends` it, why, and how many seconds are left.

    `ends` None: it did not say, `why`: in words that follow `Slurm job 17 `. `final`: it starts the job again
    by itself, or nobody is to.
    """

    ends: bool | None
    why: str = ""
    left_s: float | None = None
    final: bool = False


class AddressesFound(Frozen):
    """The addresses by which ssh reaches the nodes: (node, address) of each."""

    addresses: tuple[tuple[int, str], ...]


class ImagePulled(Frozen):
    """The image of a node's container is being fetched, or, if that is `over`, there."""

    node: int
    over: bool


class PortHeld(Frozen):
    """The first node holds the rendezvous port."""

    node: int
    port: int


class PortUsurped(Frozen):
    """Somebody else listens on the rendezvous port; `owners` as in `PortRefused`."""

    node: int
    owners: tuple[Mapping[str, Any], ...]


class PortRefused(Frozen):
    """The rendezvous port can't be used; `owners` are {uid, pid, command} as far as visible."""

    node: int
    error: str
    owners: tuple[Mapping[str, Any], ...]


class RouteFound(Frozen):
    """How `node` reaches what it was `asked` about: by which interface.

    `source` is the node's own address on that way, `address` what the name came to. `interfaces` are all of
    the node's, with whether each has an address; `named` are the variables in the node's own environment that
    name some.
    """

    node: int
    asked: str
    address: str
    interface: str | None
    source: str | None = None
    interfaces: tuple[tuple[str, bool], ...] = ()
    named: tuple[tuple[str, str], ...] = ()


class RouteFailed(Frozen):
    """`node` can't resolve the address that it was `asked` about, or has no route to it."""

    node: int
    asked: str
    error: str


class WorkerStarted(Frozen):
    """A worker's exec has succeeded; `cpus` are those that it was bound to, as "0-3,8"."""

    node: int
    local_rank: int
    pid: int
    cpus: str | None = None


class WorkerUnstarted(Frozen):
    """A worker could not be started; the last three are as in `distlaunch.agent.messages.WorkerUnstarted`."""

    node: int
    local_rank: int
    stage: str
    errno: int
    text: str


class WorkerExited(Frozen):
    """A worker has ended: `status` is its exit code, or the negative signal number.

    `oom_kills` counts those by the kernel on its node since the start; `shm` is (size, free) of /dev/shm;
    `words` are the end of its stderr, but for what it said after it was told to stop.
    """

    node: int
    local_rank: int
    status: int
    at: float
    error_record: Any = None
    oom_kills: int = 0
    shm: tuple[int, ...] = ()
    words: str = ""


class RanksJoined(Frozen):
    """Workers have connected to the rendezvous."""

    node: int
    local_ranks: tuple[int, ...]


class RanksLag(Frozen):
    """What workers do that have not joined: (local rank, whether it tries to, in words) of each."""

    node: int
    seen: tuple[tuple[int, bool, str], ...]


class RanksStalled(Frozen):
    """The node's workers that neither print nor compute; the others do, or have ended.

    `stopped` are (local rank, pid) of those that a signal has stopped, themselves or a process below them.
    """

    node: int
    local_ranks: tuple[int, ...]
    stopped: tuple[tuple[int, int], ...] = ()


class StackDumped(Frozen):
    """The Python stacks of a worker, as py-spy prints them."""

    node: int
    local_rank: int
    text: str


class OutputLost(Frozen):
    """A worker's node had no room for `size` bytes of its output."""

    node: int
    local_rank: int
    stream: int
    size: int


class OutputFlows(Frozen):
    """More of a clean node's output has come; told at most once a second."""

    node: int


class Swept(Frozen):
    """No descendant of the node's agent is left; `leftovers` processes had outlived the workers."""

    node: int
    generation: int
    leftovers: int


class Reaped(Frozen):
    """Nothing of this run is left on the node; `processes` were killed."""

    node: int
    processes: int


class OrphansKilled(Frozen):
    """Dead agents of earlier runs had left `processes` on the node, which were killed."""

    node: int
    processes: int


class Stuck(Frozen):
    """These processes, as {pid, command}, resist SIGKILL."""

    node: int
    processes: tuple[Mapping[str, Any], ...]


class NodeArrived(Frozen):
    """The launcher of a missing node has joined, and waits to be connected."""

    node: int


class Interrupted(Frozen):
    """The user or the system wants the job to end: it has told a node's launcher, or (None) us."""

    signum: int
    node: int | None = None


class TimerDue(Frozen):
    """A timer of the job, or of a node, has come due."""

    timer: Timer
    node: int | None = None


Event = (
    AgentUp
    | AgentLeaving
    | AllocationTold
    | Noticed
    | AddressesFound
    | LinkEnded
    | ImagePulled
    | PortHeld
    | PortRefused
    | PortUsurped
    | RouteFound
    | RouteFailed
    | WorkerStarted
    | WorkerUnstarted
    | WorkerExited
    | RanksJoined
    | RanksLag
    | RanksStalled
    | StackDumped
    | OutputFlows
    | OutputLost
    | Swept
    | Reaped
    | OrphansKilled
    | Stuck
    | NodeArrived
    | Interrupted
    | TimerDue
)
