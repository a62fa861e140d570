"""The messages between controller and agent: one class each, in which they are written down and checked.

A control frame's payload is a message's fields as one JSON object, with its `op`: see `COMMANDS`, from the
controller to an agent, and `REPORTS`, from an agent to the controller. Names that end with _s are seconds;
`t` is the node's monotonic time. Both ends import this module, so the types of fields are those of Python
3.8, and only some are understood: see `_CHECKS`.
"""

from __future__ import annotations

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.wire import ProtocolError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Tuple, Type


# Commands: from the controller to an agent


class Ping(Frozen):
    """The heartbeat: renews the agent's lease."""


class HoldPort(Frozen):
    """Hold the rendezvous port; None = one of the agent's choice."""

    port: Optional[int]


class FindRoute(Frozen):
    """Find the interface that leads to this address."""

    address: str


class Binding(Frozen):
    """CPUs for each worker: `how` is node, socket, exclusive or core-complex, for that many GPUs; cores: an
    equal share each; listed: `cpus` by local rank."""

    how: str
    gpus: int
    cpus: List[str]


class WorkerSpec(Frozen):
    """One worker to start. `env` wins over the node's, which wins over `defaults`.

    `paths` are indices in `argv` of what may begin with the ~ of the node's user, as `cwd` may; above 0 that
    is the script. With `one_device` it sees its own GPU alone. `shares`: 0 and 1, where those are the
    command's own. `cpus` are for the agent to fill in, which chooses them by `Binding`.
    """

    local_rank: int
    argv: List[str]
    cwd: str
    paths: List[int]
    env: Dict[str, str]
    defaults: Dict[str, str]
    one_device: bool
    shares: List[int]
    cpus: Optional[str] = None


class StartWorkers(Frozen):
    """Start the workers of a generation; `env` is what theirs have in common.

    `stall_s` None = stalled workers are not looked for. `hosts_store`: the rendezvous is here. `notice` is
    the signal that workers get when the agent is told to end. `flight`: dumps of flight recorders are
    wanted. `temporary` are variables that name a folder the agent deletes.
    """

    generation: int
    run_id: str
    grace_s: float
    lease_s: float
    stall_s: Optional[float]
    watch_port: int
    hosts_store: bool
    notice: int
    flight: bool
    temporary: List[str]
    env: Dict[str, str]
    binding: Optional[Binding]
    workers: List[WorkerSpec]


class RankSpec(Frozen):
    """One worker of a launcher that joined: its variables, all of which `distlaunch.contract.SENT` has."""

    local_rank: int
    env: Dict[str, str]
    defaults: Dict[str, str]


class StartRanks(Frozen):
    """`StartWorkers` for a joined launcher, which already has its program, arguments and environment."""

    generation: int
    run_id: str
    grace_s: float
    lease_s: float
    stall_s: Optional[float]
    watch_port: int
    hosts_store: bool
    notice: int
    flight: bool
    env: Dict[str, str]
    workers: List[RankSpec]


class StopWorkers(Frozen):
    """End this generation: SIGTERM, SIGKILL after the grace, sweep.

    `why` is for a launcher that joined to tell.
    """

    grace_s: float
    why: str


class DumpStacks(Frozen):
    """Report the Python stacks of these workers; with `abort` they may die of it."""

    local_ranks: List[int]
    abort: bool


class WatchUse(Frozen):
    """Report `Usage` for so many seconds."""

    for_s: float


class GiveNotice(Frozen):
    """Send the workers `signum` and go on; a file tells when the job ends, in `left_s` (None = unknown)."""

    signum: int
    left_s: Optional[float]


class Reap(Frozen):
    """End what an earlier agent of the run has left on the node."""

    run_id: str


class Listen(Frozen):
    """Answer connections with the token; port None = the agent's choice, 0 = the system's."""

    port: Optional[int]
    token: str


class DialAll(Frozen):
    """Connect to every address of each [host, port], all at once."""

    targets: List[Any]
    timeout_s: float
    token: str


class Close(Frozen):
    """End the workers with that signal, SIGKILL after the grace, sweep, flush, exit.

    The job's exit status is to be `outcome`; `why` it failed is for a launcher to tell that joined.
    """

    grace_s: float
    signum: int
    outcome: int
    why: str


# Reports: from an agent to the controller


class Hello(Frozen):
    """The first report.

    A launcher that joined tells how many workers it has in `procs`; it shows what they print, and keeps it in
    `logs`, "" = nowhere.
    """

    protocol: int
    python: str
    version: List[int]
    gpus: int
    hostname: str
    pid: int
    t: float
    procs: Optional[int]
    logs: Optional[str]


class Pong(Frozen):
    """Answers `Ping`."""

    t: float


class PortHeld(Frozen):
    """Answers `HoldPort`."""

    port: int


class PortRefused(Frozen):
    """Answers `HoldPort` and `Listen`: owners are [{uid, pid, command}], as far as they can be seen."""

    error: str
    owners: List[Any]


class RouteFound(Frozen):
    """Answers `FindRoute`: its address, what that means, the node's own address on that way, the interface.

    `interfaces` are all of the node's, with whether each has an address; `named` are variables of the node's
    own environment that name some.
    """

    asked: str
    address: str
    source: Optional[str]
    interface: Optional[str]
    interfaces: Dict[str, bool]
    named: Dict[str, str]


class RouteFailed(Frozen):
    """Answers `FindRoute`, about the address that was `asked` for."""

    asked: str
    error: str


class WorkerStarted(Frozen):
    """A worker's exec has succeeded; `cpus` are those that `Binding` gave it, as "0-3,8"."""

    local_rank: int
    pid: int
    cpus: Optional[str]


class WorkerUnstarted(Frozen):
    """A worker could not be started. `stage`: scratch, fork, setup, workdir, script, exec, or interpreter:
    that of #! is not there."""

    local_rank: int
    stage: str
    errno: int
    text: str


class WorkerExited(Frozen):
    """A worker has ended: `status` is its exit code, or the negative signal.

    `error_record` is {message, callstack} as torch's @record wrote them. `words` are the end of its stderr,
    before it was told to stop. `oom_kills` are the kernel's since the start, `shm` is [size, free] of
    /dev/shm in bytes, or empty.
    """

    local_rank: int
    status: int
    t: float
    error_record: Any
    words: str
    oom_kills: int
    shm: List[int]


class RanksJoined(Frozen):
    """These are connected to the rendezvous port."""

    local_ranks: List[int]


class RanksLag(Frozen):
    """What those do that have not joined: [local rank, whether it tries to, in words] of each."""

    seen: List[Any]


class RanksStalled(Frozen):
    """All that neither print nor compute for `stall_s`; `stopped`: [local rank, pid] of each of them that a
    signal has stopped, itself or a process below it."""

    local_ranks: List[int]
    stopped: List[List[int]]


class StackDumped(Frozen):
    """Answers `DumpStacks`, for each."""

    local_rank: int
    text: str


class Noticed(Frozen):
    """The agent got `signum`, which announces an end."""

    signum: int


class Interrupted(Frozen):
    """A launcher that joined got `signum`: the user, or a scheduler, wants the job to end."""

    signum: int


class AgentLeaving(Frozen):
    """The agent leaves, its workers follow: a signal told it to; if `orphaned`, as its guardian has ended.

    Without a signal (0), the link's input has ended, or can't be read any further for its `damage`.
    """

    signum: int
    orphaned: bool
    damage: str


class OutputLost(Frozen):
    """So many bytes of output were lost because the spool was full."""

    local_rank: int
    stream: int
    size: int


class Stuck(Frozen):
    """[{pid, command}] of processes that resist the sweep."""

    generation: int
    processes: List[Any]


class Swept(Frozen):
    """No descendant is left; `leftovers` is how many had outlived the workers."""

    generation: int
    leftovers: int


class Reaped(Frozen):
    """Answers `Reap`: nothing of the run is left on the node; `processes` were killed."""

    processes: int


class OrphansKilled(Frozen):
    """Dead agents of any run had left `processes`, which were killed."""

    processes: int


class PortUsurped(Frozen):
    """The rendezvous port was taken by somebody else: owners as in `PortRefused`."""

    owners: List[Any]


class Usage(Frozen):
    """What workers use: of each [local rank, CPU in percent of one, bytes, GPU in percent, bytes there].

    The last two are None where that is not known.
    """

    ranks: List[Any]


class Listening(Frozen):
    """Answers `Listen`."""

    port: int


class Dialled(Frozen):
    """Answers `DialAll`: of each target in turn, [{family, address, ok, error}]."""

    results: List[Any]


COMMANDS = {
    "ping": Ping,
    "hold": HoldPort,
    "route": FindRoute,
    "start": StartWorkers,
    "ranks": StartRanks,
    "stop": StopWorkers,
    "dump": DumpStacks,
    "watch": WatchUse,
    "notice": GiveNotice,
    "reap": Reap,
    "listen": Listen,
    "dial": DialAll,
    "close": Close,
}
REPORTS = {
    "hello": Hello,
    "pong": Pong,
    "held": PortHeld,
    "unheld": PortRefused,
    "route": RouteFound,
    "no route": RouteFailed,
    "started": WorkerStarted,
    "unstarted": WorkerUnstarted,
    "exited": WorkerExited,
    "joined": RanksJoined,
    "lagging": RanksLag,
    "stalled": RanksStalled,
    "stack": StackDumped,
    "noticed": Noticed,
    "leaving": AgentLeaving,
    "interrupted": Interrupted,
    "dropped": OutputLost,
    "stuck": Stuck,
    "swept": Swept,
    "reaped": Reaped,
    "orphans": OrphansKilled,
    "usurped": PortUsurped,
    "usage": Usage,
    "listening": Listening,
    "dialled": Dialled,
}
_OPS = {kind: op for table in (COMMANDS, REPORTS) for op, kind in table.items()}


def as_object(message: Tuple[Any, ...]) -> Dict[str, Any]:
    """The JSON object of a message."""
    return {"op": _OPS[type(message)], **_plain(message)}


def _plain(value: Any) -> Any:
    if hasattr(value, "_fields"):
        return {name: _plain(inner) for name, inner in zip(value._fields, value)}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def read(table: Dict[str, Type[Any]], fields: Dict[str, Any]) -> Any:
    """The message of `table` that this JSON object is. Raises `ProtocolError`, which names what is wrong."""
    kind = table.get(fields["op"])
    if kind is None:
        raise ProtocolError("unknown message: %s" % fields["op"][:40])
    return _read(kind, fields, fields["op"])


def _read(kind: Type[Any], fields: Any, where: str) -> Any:
    if not isinstance(fields, dict):
        raise ProtocolError("%s is not an object" % where)
    values = []
    for name, form in getattr(kind, "__annotations__", {}).items():  # Python 3.8: absent without fields
        if name not in fields:
            raise ProtocolError("%s lacks %s" % (where, name))
        value, check = fields[name], _CHECKS.get(form)
        values.append(value if check and check(value) else _checked(form, value, "%s: %s" % (where, name)))
    return kind(*values)


def _checked(form: str, value: Any, where: str) -> Any:
    """`value`, if it is of that form; records where such are due."""
    if form.startswith("Optional["):
        return None if value is None else _checked(form[9:-1], value, where)
    if form.startswith("List["):
        if not isinstance(value, list):
            raise ProtocolError("%s is not a list" % where)
        return [_checked(form[5:-1], inner, where) for inner in value]
    nested = _NESTED.get(form)
    if nested:
        return _read(nested, value, where)
    if not _CHECKS[form](value):
        raise ProtocolError("%s is not of type %s" % (where, form))
    return value


def _mapping_of(kind: Type[Any]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(isinstance(each, kind) for each in value.values())


_NESTED = {"Binding": Binding, "RankSpec": RankSpec, "WorkerSpec": WorkerSpec}
_CHECKS = {
    "Any": lambda value: True,
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "Dict[str, str]": _mapping_of(str),
    "Dict[str, bool]": _mapping_of(bool),
}
"""The forms that a field may have, besides lists, records, and None."""
