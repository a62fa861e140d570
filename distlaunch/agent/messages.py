"""The messages between controller and agent: one class each, in which they are written down and checked.

A control frame's payload is a message's fields as one JSON object, with its `op`: see `COMMANDS`, from the
controller to an agent, and `REPORTS`, from an agent to the controller. Names that end with _s are seconds;
`t` is the node's monotonic time. Both ends import this module, so the types of fields are those of Python
3.8, and only some are understood: see `_CHECKS`.
"""

from __future__ import annotations

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.wire import Frame, ProtocolError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Optional, Tuple, Type


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
    cpus: Tuple[str, ...]


class WorkerSpec(Frozen):
    """One worker to start. `env` wins over the node's, which wins over `defaults`.

    `paths` are indices in `argv` of what may begin with the ~ of the node's user, as `cwd` may; above 0 that
    is the script. With `one_device` it sees its own GPU alone. `shares`: 0 and 1, where those are the
    command's own. `cpus` are for the agent to fill in, which chooses them by `Binding`.
    """

    local_rank: int
    argv: Tuple[str, ...]
    cwd: str
    paths: Tuple[int, ...]
    env: Dict[str, str]
    defaults: Dict[str, str]
    one_device: bool
    shares: Tuple[int, ...]
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
    temporary: Tuple[str, ...]
    env: Dict[str, str]
    binding: Optional[Binding]
    workers: Tuple[WorkerSpec, ...]


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
    workers: Tuple[RankSpec, ...]


class StopWorkers(Frozen):
    """End this generation: SIGTERM, SIGKILL after the grace, sweep.

    `why` is for a launcher that joined to tell.
    """

    grace_s: float
    why: str


class DumpStacks(Frozen):
    """Report the Python stacks of these workers; with `abort` they may die of it."""

    local_ranks: Tuple[int, ...]
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
    """Connect to every address of each (host, port), all at once."""

    targets: Tuple[Tuple[str, int], ...]
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


# Reports: from an agent to the controller. Those that matter to the job are the supervisor's events, too.


class Hello(Frozen):
    """The first report.

    A launcher that connected gives the number of its workers in `procs`. It shows their output itself, and
    keeps it in the directory `logs`, "" = nowhere.
    """

    node: int
    protocol: int
    python: str
    version: Tuple[int, ...]
    gpus: int
    hostname: str
    pid: int
    at: float
    procs: Optional[int]
    logs: Optional[str]


class Pong(Frozen):
    """Answers `Ping`."""

    node: int
    at: float


class PortHeld(Frozen):
    """Answers `HoldPort`."""

    node: int
    port: int


class PortRefused(Frozen):
    """Answers `HoldPort` and `Listen`; `owners` are {uid, pid, command}, as far as they are visible."""

    node: int
    error: str
    owners: Tuple[Any, ...]


class PortUsurped(Frozen):
    """Another process took the rendezvous port; `owners` as in `PortRefused`."""

    node: int
    owners: Tuple[Any, ...]


class RouteFound(Frozen):
    """Answers `FindRoute`, about the name or address `asked`.

    `address` is what the name resolved to, `source` the node's own address on the route. `interfaces` are all
    of the node's, each with whether it has an address. `named` are (name, value) of the node's environment
    variables that name interfaces.
    """

    node: int
    asked: str
    address: str
    interface: Optional[str]
    source: Optional[str] = None
    interfaces: Tuple[Tuple[str, bool], ...] = ()
    named: Tuple[Tuple[str, str], ...] = ()


class RouteFailed(Frozen):
    """Answers `FindRoute`: the node can't resolve what was `asked`, or has no route to it."""

    node: int
    asked: str
    error: str


class WorkerStarted(Frozen):
    """A worker's exec succeeded; `cpus` are those that `Binding` gave it, as "0-3,8"."""

    node: int
    local_rank: int
    pid: int
    cpus: Optional[str] = None


class WorkerUnstarted(Frozen):
    """A worker could not be started.

    `stage` is scratch, fork, setup, workdir, script, exec, or interpreter: that of the #! line is missing.
    """

    node: int
    local_rank: int
    stage: str
    errno: int
    text: str


class WorkerExited(Frozen):
    """A worker ended: `status` is its exit code, or the negative signal number.

    `at` is the node's monotonic time on the wire, and the controller's once it is an event. `error_record` is
    {message, callstack} as written by torch's @record. `oom_kills` counts the kernel's since the start, `shm`
    is (size, free) of /dev/shm in bytes, or empty. `words` are its last output, up to the request to stop.
    """

    node: int
    local_rank: int
    status: int
    at: float
    error_record: Any = None
    oom_kills: int = 0
    shm: Tuple[int, ...] = ()
    words: str = ""


class RanksJoined(Frozen):
    """Workers connected to the rendezvous port."""

    node: int
    local_ranks: Tuple[int, ...]


class RanksLag(Frozen):
    """What workers that haven't joined are doing: (local rank, whether it tries to, in words) of each."""

    node: int
    seen: Tuple[Tuple[int, bool, str], ...]


class RanksStalled(Frozen):
    """All workers of the node that neither print nor compute for `stall_s`, while others do or have ended.

    `stopped` are (local rank, PID) of those that a signal has stopped, themselves or a process below them.
    """

    node: int
    local_ranks: Tuple[int, ...]
    stopped: Tuple[Tuple[int, int], ...] = ()


class StackDumped(Frozen):
    """Answers `DumpStacks`, for each worker: its Python stacks, as py-spy prints them."""

    node: int
    local_rank: int
    text: str


class Noticed(Frozen):
    """The agent received `signum`, by which a scheduler warns of the job's end."""

    node: int
    signum: int


class Interrupted(Frozen):
    """A launcher, or the controller (node None), got `signum`: the user or a scheduler ends the job."""

    signum: int
    node: Optional[int] = None


class AgentLeaving(Frozen):
    """The agent leaves and its workers follow: a signal said so, or its guardian died (`orphaned`).

    Without a signal (0), the link's input has ended, or can't be read any further because of `damage`.
    """

    node: int
    signum: int
    orphaned: bool = False
    damage: str = ""


class OutputLost(Frozen):
    """So many bytes of a worker's output were lost because the spool was full."""

    node: int
    local_rank: int
    stream: int
    size: int


class Stuck(Frozen):
    """Processes, as {pid, command}, that resist SIGKILL."""

    node: int
    processes: Tuple[Any, ...]


class Swept(Frozen):
    """No descendant of the agent is left; `leftovers` is how many had outlived the workers."""

    node: int
    generation: int
    leftovers: int


class Reaped(Frozen):
    """Answers `Reap`: nothing of the run is left on the node; `processes` were killed."""

    node: int
    processes: int


class OrphansKilled(Frozen):
    """Dead agents of earlier runs had left `processes`, which were killed."""

    node: int
    processes: int


class Usage(Frozen):
    """What workers use: of each [local rank, CPU in percent of one, bytes, GPU in percent, GPU bytes].

    The last two are None where unknown.
    """

    node: int
    ranks: Tuple[Any, ...]


class Listening(Frozen):
    """Answers `Listen`."""

    node: int
    port: int


class Dialled(Frozen):
    """Answers `DialAll`: of each target in turn, [{family, address, ok, error}]."""

    node: int
    results: Tuple[Any, ...]


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
    return [_plain(inner) for inner in value] if isinstance(value, tuple) else value


def read(table: Dict[str, Type[Any]], fields: Dict[str, Any]) -> Any:
    """The message of `table` that this JSON object is. Raises `ProtocolError`, which names what is wrong."""
    kind = table.get(fields["op"])
    if kind is None:
        raise ProtocolError("unknown message: %s" % fields["op"][:40])
    return _read(kind, fields, fields["op"])


def report_in(frame: Frame) -> Any:
    """The report that a frame from an agent carries. Raises `ProtocolError`."""
    return read(REPORTS, {**frame.message(), "node": frame.node})


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
    if form.startswith("Tuple["):
        return _tuple(form, value, where)
    nested = _NESTED.get(form)
    if nested:
        return _read(nested, value, where)
    if not _CHECKS[form](value):
        raise ProtocolError("%s is not of type %s" % (where, form))
    return value


def _tuple(form: str, value: Any, where: str) -> Any:
    """A JSON list as `Tuple[form, ...]`, or as a tuple of plain forms, one for each item."""
    if not isinstance(value, list):
        raise ProtocolError("%s is not a list" % where)
    if form.endswith(", ...]"):
        return tuple([_checked(form[6:-6], inner, where) for inner in value])
    forms = form[6:-1].split(", ")
    if len(forms) != len(value):
        raise ProtocolError("%s is not a list of %s" % (where, form))
    return tuple([_checked(inner, each, where) for inner, each in zip(forms, value)])


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
}
"""The forms that a field may have, besides lists, records, and None."""
