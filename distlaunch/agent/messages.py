"""The messages between controller and agent. Each has a class that defines its fields and their types.

The payload of a control frame is one JSON object with the fields of a message and `op`, the name of the
message's class. `COMMAND_TYPES` go from the controller to an agent, `REPORT_TYPES` from an agent to the
controller. Fields whose names end in _s are in seconds, and `at` is the node's monotonic time. Both ends
import this module, so field types use the syntax of Python 3.8, and only the types in `_CHECKS` are
supported.
"""

from __future__ import annotations

import signal

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.wire import Frame, ProtocolError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Optional, Tuple, Type


# Commands: from the controller to an agent


class Ping(Frozen):
    """The heartbeat, which renews the agent's lease."""


class HoldPort(Frozen):
    """Hold the rendezvous port and `further` free ports. If `port` is None, the agent chooses a free one."""

    port: Optional[int]
    further: int = 0


class Needs(Frozen):
    """Requirements of the workers on a node: their directory, their program's file, and their TMPDIR.

    Paths may begin with ~. If `program` is "", there is no file to check. If `tmpdir` is "", the node's own
    TMPDIR applies.
    """

    workdir: str
    program: str
    tmpdir: str


class FindRoute(Frozen):
    """Find the network interface that leads to this address, and check the workers' requirements."""

    address: str
    needs: Optional[Needs] = None


class Binding(Frozen):
    """The method of choosing CPUs for each worker.

    If `how` is node, socket, exclusive or core-complex, workers are bound near the first `gpus` GPUs. If it
    is cores, each worker gets an equal share of the cores. If it is listed, `cpus` contains the CPUs of each
    local rank.
    """

    how: str
    gpus: int
    cpus: Tuple[str, ...]


class WorkerSpec(Frozen):
    """A worker to start. `env` overrides the environment of the node, which overrides `defaults`.

    `paths` are the indices of `argv` items that, like `cwd`, may begin with ~ for the user's home on the
    node. An index above 0 refers to the script. With `one_device`, the worker sees only its own GPU. `shares`
    lists the descriptors (0, 1), if any, that the worker shares with the controller or launcher. The
    agent fills in `cpus` according to `Binding`.
    """

    local_rank: int
    argv: Tuple[str, ...]
    cwd: str
    paths: Tuple[int, ...]
    env: Dict[str, str]
    defaults: Dict[str, str]
    one_device: bool = False
    shares: Tuple[int, ...] = ()
    cpus: Optional[str] = None


class StartWorkers(Frozen):
    """Start the workers of an attempt. `env` contains the variables that all of them share.

    `grace_s` and `lease_s` apply from now on. If `stall_s` is None, stalled workers are not detected.
    `watch_port` is the rendezvous port, where workers join. `hosts_store` is set if that port is on this
    node. `warning` is the signal sent to the workers when the agent is stopped. `flight` requests flight
    recorder dumps. `temporary` lists variables to set to the path of a directory that the agent deletes. The
    programs in `environment`, a path, come first in the workers' PATH. `collects` is set if `Close` may
    be followed by `Collect`. A launcher that joined has its own program, so it accepts only the parts of this
    command that `distlaunch.contract.ranks_alone` keeps.
    """

    attempt: int
    run_id: str
    grace_s: float
    lease_s: float
    env: Dict[str, str]
    workers: Tuple[WorkerSpec, ...]
    stall_s: Optional[float] = None
    watch_port: int = 0
    hosts_store: bool = False
    warning: int = signal.SIGTERM
    flight: bool = False
    temporary: Tuple[str, ...] = ()
    environment: str = ""
    binding: Optional[Binding] = None
    collects: bool = False


class StopWorkers(Frozen):
    """Stop the attempt: send SIGTERM, send SIGKILL after the grace period, then sweep.

    A launcher that joined shows `why` to its user.
    """

    grace_s: float
    why: str


class Capture(Frozen):
    """Report `Evidence` of the state of all workers, and the Python stacks of `local_ranks`.

    With `abort`, collecting the stacks may kill these workers. `quick` is set if the workers are about to be
    stopped. Nothing is then requested from NCCL, since an unfinished dump would replace an earlier one.
    """

    local_ranks: Tuple[int, ...]
    abort: bool
    quick: bool


class ReadStacks(Frozen):
    """Report the Python stacks of `local_ranks` as `Evidence`, at a user's request."""

    local_ranks: Tuple[int, ...]


class WatchUse(Frozen):
    """Report `Usage` repeatedly for `for_s` seconds."""

    for_s: float


class WarnWorkers(Frozen):
    """Send `signum` to the processes of the workers that handle it; 0 = none.

    If the job is known to end in `left_s` seconds, also create the deadline file.
    """

    signum: int
    left_s: Optional[float]


class Reap(Frozen):
    """Kill everything that an earlier agent of the run left behind on the node.

    If that agent is still stopping its workers, they have up to `grace_s` to exit.
    """

    run_id: str
    grace_s: float


class Setup(Frozen):
    """The recipe for an environment, built by uv or conda, or by the command `run`.

    `kind` is uv, conda, run or controller. `files` may list the packages, and need not exist; with
    controller, they are the packages. The build runs in `workdir`, to which `files` are relative. `workdir`
    may begin with ~. `python` is the interpreter; "" means any. `env` contains variables for the build. A
    build fails after `limit_s` seconds. `image` is that of the node's container; "" means none.
    """

    kind: str
    run: str
    files: Tuple[str, ...]
    workdir: str
    python: str
    env: Dict[str, str]
    limit_s: float
    image: str = ""


class PlaceTree(Frozen):
    """Create the run's tree, whose digest is `tree`, from the store in the directory `base`.

    Then build the environment, if the job has a `setup`.
    """

    run_id: str
    tree: str
    base: str
    setup: Optional[Setup] = None


class Listen(Frozen):
    """Listen on `port`, and answer connections with the token.

    If `port` is None, the agent chooses a port. If it is 0, the system does.
    """

    port: Optional[int]
    token: str


class DialAll(Frozen):
    """Connect to every address of each (host, port), all at once. A listener must send the token."""

    targets: Tuple[Tuple[str, int], ...]
    timeout_s: float
    token: str


class Collect(Frozen):
    """Send files that match the patterns, which may contain `*`, `?` and, for directories, `**`.

    This follows a `Close` once the workers have ended on all nodes, since they may share a disk. Patterns are
    absolute or relative to `workdir`. Patterns and `workdir` may begin with ~. At most `limit` bytes
    are sent. The search doesn't enter the directory `apart`, which contains the logs.
    """

    paths: Tuple[str, ...]
    workdir: str
    limit: int
    apart: str


class Close(Frozen):
    """Send the workers `signum`, and SIGKILL after the grace period. Then sweep, flush and exit.

    `outcome` is the exit status of the job. `why` is the root cause, shown by a launcher that joined. With
    `collects`, the agent doesn't exit before it has answered a `Collect`. A second `Close`, without
    `collects`, cancels the rest of the collection.
    """

    grace_s: float
    signum: int
    outcome: int
    why: str
    collects: bool = False


class Dismiss(Frozen):
    """Exit now: everything has arrived. Without it, an agent that has sent `AllSent` waits for a moment.

    Some programs that carry a link, such as `kubectl exec` and `podman exec`, may lose the last output of a
    process that has exited.
    """


# Reports: from an agent to the controller. Most of them are also events of the supervisor.


class Hello(Frozen):
    """The first report of an agent. `machine` identifies the host regardless of its name.

    A launcher that joined reports the number of its workers in `procs`, and their `role`. It shows their
    output itself and, unless `logs` is "", saves the output in that directory.
    """

    node: int
    protocol: int
    python: str
    gpus: int
    hostname: str
    at: float
    procs: Optional[int] = None
    logs: Optional[str] = None
    role: str = ""
    machine: str = ""


class Pong(Frozen):
    """The answer to `Ping`."""

    node: int
    at: float


class PortHeld(Frozen):
    """The answer to `HoldPort`."""

    node: int
    port: int
    further: Tuple[int, ...] = ()


class PortRefused(Frozen):
    """A failed `HoldPort` or `Listen`. `owners` lists the port's visible owners as {uid, pid, command}."""

    node: int
    error: str
    owners: Tuple[Any, ...]


class PortUsurped(Frozen):
    """Another process took the rendezvous port. `owners` are as in `PortRefused`."""

    node: int
    owners: Tuple[Any, ...]


class RouteFound(Frozen):
    """The answer to `FindRoute` for the name or address `asked`.

    `address` is the address that `asked` resolved to. `source` is the node's own address on the route.
    `interfaces` lists all interfaces of the node, and whether each has an address. `named` lists the node's
    environment variables that name interfaces, as (name, value). `seen` contains facts about the workers'
    needs, in the format of `distlaunch.check.probe`, or None if not requested.
    """

    node: int
    asked: str
    address: str
    interface: Optional[str]
    source: Optional[str] = None
    interfaces: Tuple[Tuple[str, bool], ...] = ()
    named: Tuple[Tuple[str, str], ...] = ()
    seen: Any = None


class RouteFailed(Frozen):
    """A failed `FindRoute`: the node can't resolve `asked`, or has no route to it."""

    node: int
    asked: str
    error: str


class WorkerStarted(Frozen):
    """A worker's exec succeeded. `cpus` are its CPUs according to `Binding`, such as "0-3,8"."""

    node: int
    local_rank: int
    pid: int
    cpus: Optional[str] = None


class WorkerUnstarted(Frozen):
    """A worker could not be started.

    `stage` is scratch, fork, setup, workdir, script or exec; "search" if the program is in the workdir but
    not in PATH; or "interpreter" if the #! line names a missing program.
    """

    node: int
    local_rank: int
    stage: str
    errno: int
    text: str


LATER_S = 1.0
"""Seconds after a traceback from which output on the other stream counts, too. It is hardly about it."""


class WorkerExited(Frozen):
    """A worker exited. `status` is its exit code, or the negative signal number.

    In a report, `at` is the node's monotonic time. In an event, it is the time since the run began.
    `error_record` is {message, callstack, timestamp} as written by torch's @record. `oom_kills` counts kills
    by the OOM killer since the attempt began. `shm` is (size, free) of /dev/shm in bytes, or empty. `words`
    is the worker's last output before it was signaled to stop. `asked` is set if it exited after that signal.
    `went_on` is how many seconds after the last traceback in `words` it last printed to that stream, and to
    the other one.
    """

    node: int
    local_rank: int
    status: int
    at: float
    error_record: Any = None
    oom_kills: int = 0
    shm: Tuple[int, ...] = ()
    words: str = ""
    asked: bool = False
    went_on: Tuple[float, float] = (0.0, 0.0)


class RanksJoined(Frozen):
    """Workers have connected to the rendezvous port. `torch` is their version of torch, if known."""

    node: int
    local_ranks: Tuple[int, ...]
    torch: str = ""


class RanksLag(Frozen):
    """Workers that have not joined. `seen` lists (local rank, whether it is trying to join, activity)."""

    node: int
    seen: Tuple[Tuple[int, bool, str], ...]


class RanksStalled(Frozen):
    """All of the node's workers that have been stalled for `stall_s` seconds.

    The others are active or have exited. `stopped` lists the processes, among the stalled workers and their
    descendants, that a signal has suspended: (local rank, PID), at most one for each worker.
    """

    node: int
    local_ranks: Tuple[int, ...]
    stopped: Tuple[Tuple[int, int], ...] = ()


class StackDumped(Frozen):
    """The answer to `Capture` for one of its `local_ranks`: the Python stacks that py-spy printed.

    `stopped` is the PID of the worker if a signal has suspended it.
    """

    node: int
    local_rank: int
    text: str
    stopped: int = 0


class WarningReceived(Frozen):
    """The agent received `signum`, a termination warning."""

    node: int
    signum: int


class Interrupted(Frozen):
    """A launcher, or the controller (node None), received `signum` from the user or a scheduler.

    `by_command` is set if `distlaunch stop` sent it.
    """

    signum: int
    node: Optional[int] = None
    by_command: bool = False


class AgentLeaving(Frozen):
    """The agent will exit, after its workers, because of a signal or because its guardian died (`orphaned`).

    If `signum` is 0, the link's input has ended, or is unreadable because of `damage`.
    """

    node: int
    signum: int
    orphaned: bool = False
    damage: str = ""


class OutputLost(Frozen):
    """The spool was full, so `size` bytes of a worker's stdout (`stream` 0) or stderr (1) were lost."""

    node: int
    local_rank: int
    stream: int
    size: int


class Stuck(Frozen):
    """Processes, as {pid, command}, that survived SIGKILL."""

    node: int
    processes: Tuple[Any, ...]


class Swept(Frozen):
    """No descendant of the agent is left. `leftovers` counts the processes that outlived their workers."""

    node: int
    attempt: int
    leftovers: int


class AllSent(Frozen):
    """The last report of a node. All output and files precede it, so none of them is missing."""

    node: int


class Reaped(Frozen):
    """The answer to `Reap`: nothing from the run is left on the node. `processes` counts killed processes."""

    node: int
    processes: int


class OrphansKilled(Frozen):
    """The agent killed processes left behind by crashed agents of earlier runs. `processes` counts them."""

    node: int
    processes: int


class GuardianResumed(Frozen):
    """A signal had suspended the guardian, which could therefore neither sweep nor exit.

    The agent has resumed the guardian.
    """

    node: int
    pid: int


class Usage(Frozen):
    """Resource use of each worker: [local rank, percent of one core, bytes, GPU percent, GPU bytes].

    The last two are None if unknown.
    """

    node: int
    ranks: Tuple[Any, ...]


class Evidence(Frozen):
    """The answer to `Capture`: the state of the workers and their node, or the answer of NCCL's RAS service.

    `ReadStacks` gets one such report for each worker: {"stacks": [[local rank, text]]}.
    """

    node: int
    attempt: int
    taken: Any


MAX_LACKS = 5
"""Maximum number of times that an agent may send `TreeLacks`."""


class TreeLacks(Frozen):
    """The answer to `PlaceTree`: contents missing from the node's store, as indices into the manifest.

    If there are no indices, the manifest itself is missing.
    """

    node: int
    contents: Tuple[int, ...]


class TreeProgress(Frozen):
    """`size` bytes of missing contents have arrived so far. Also sent while the tree is being created."""

    node: int
    size: int


class TreePlaced(Frozen):
    """The answer to `PlaceTree`: the tree is complete, and its files have the right contents.

    `environment` is the directory of the requested environment, and `versions` lists its software versions.
    """

    node: int
    tree: str
    environment: str = ""
    versions: Tuple[Tuple[str, str], ...] = ()


class SetupPrinted(Frozen):
    """Output from the commands that build the environment."""

    node: int
    text: str


class TreeRefused(Frozen):
    """A failed `PlaceTree`: no tree or, if `placed`, no environment; `late` = building it took too long."""

    node: int
    error: str
    placed: bool = False
    late: bool = False


class TreeKept(Frozen):
    """The run has left its own files in its tree's directory. These files were not removed."""

    node: int
    path: str


class FileBegins(Frozen):
    """The next FILE frames contain this file, which has `size` bytes. `path` is relative."""

    node: int
    path: str
    size: int


class FilesEnd(Frozen):
    """The answer to `Collect`, after all files.

    `left_out` lists (file or pattern, reason). `more` counts those that aren't listed.
    """

    node: int
    left_out: Tuple[Tuple[str, str], ...]
    more: int


class Listening(Frozen):
    """The answer to `Listen`."""

    node: int
    port: int


class Dial(Frozen):
    """An attempt to connect to one address of a target. `error` is None if it succeeded.

    `family` is IPv4, IPv6, or "" if the name can't be resolved.
    """

    address: str
    family: str
    error: Optional[str]


class Dialed(Frozen):
    """The answer to `DialAll`, with a result for each address of each target, in order."""

    node: int
    results: Tuple[Tuple[Dial, ...], ...]


_RECORDS = {name: kind for name, kind in vars().items() if getattr(kind, "__module__", "") == __name__}
REPORT_TYPES = {name: kind for name, kind in _RECORDS.items() if "node" in kind._fields}
"""Reports, keyed by `op`, the name of the class. Each report names its node."""
COMMAND_TYPES = {name: kind for name, kind in _RECORDS.items() if name not in REPORT_TYPES}
"""Commands, and the records in them, keyed by `op`."""


def as_object(message: Tuple[Any, ...]) -> Dict[str, Any]:
    """Return a message as a JSON object."""
    return {"op": type(message).__name__, **plain(message)}


def plain(value: Any) -> Any:
    """Return a record, and the records in it, as JSON objects."""
    if hasattr(value, "_fields"):
        return {name: plain(inner) for name, inner in zip(value._fields, value)}
    return [plain(inner) for inner in value] if isinstance(value, tuple) else value


def read(table: Dict[str, Type[Any]], fields: Dict[str, Any]) -> Any:
    """Read a message of `table` from a JSON object. Raises `ProtocolError`, which names the flaw."""
    kind = table.get(fields["op"])
    if kind is None:
        raise ProtocolError("unknown message: %s" % fields["op"][:40])
    return _read(kind, fields, fields["op"])


def report_in(frame: Frame) -> Any:
    """Read the report in a frame from an agent. The report's node is the frame's, which the link has checked.

    Raises `ProtocolError`.
    """
    return read(REPORT_TYPES, {**frame.message(), "node": frame.node})


def _read(kind: Type[Any], fields: Any, where: str) -> Any:
    """Return a record. Its annotations, which are strings in this module, describe the form of each field."""
    if not isinstance(fields, dict):
        raise ProtocolError("%s is not an object" % where)
    values = []
    for name, form in getattr(kind, "__annotations__", {}).items():  # Python 3.8: absent without fields
        if name not in fields:
            raise ProtocolError("%s lacks %s" % (where, name))
        values.append(_checked(form, fields[name], "%s: %s" % (where, name)))
    return kind(*values)


def _checked(form: str, value: Any, where: str) -> Any:
    """Check that `value` has this form, and return it with objects converted to records."""
    if form.startswith("Optional["):
        return None if value is None else _checked(form[9:-1], value, where)
    if form.startswith("Tuple["):
        return _tuple(form, value, where)
    nested = COMMAND_TYPES.get(form)
    if nested:
        return _read(nested, value, where)
    if not _CHECKS[form](value):
        raise ProtocolError("%s is not of type %s" % (where, form))
    return value


def _tuple(form: str, value: Any, where: str) -> Any:
    """Read a JSON list as `Tuple[form, ...]`, or as a tuple with one plain form for each item."""
    if not isinstance(value, list):
        raise ProtocolError("%s is not a list" % where)
    if form.endswith(", ...]"):
        return tuple([_checked(form[6:-6], inner, where) for inner in value])
    forms = form[6:-1].split(", ")
    if len(forms) != len(value):
        raise ProtocolError("%s is not a list of %s" % (where, form))
    return tuple([_checked(inner, each, where) for inner, each in zip(forms, value)])


_CHECKS: Dict[str, Callable[[Any], bool]] = {
    "Any": lambda value: True,
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "Dict[str, str]": lambda value: isinstance(value, dict) and {*map(type, value.values())} <= {str},
}
"""The check for each form of a field, except tuples, records and None."""
