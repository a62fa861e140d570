"""What a job file says, checked and frozen, and what it is read against."""

import os.path
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, get_args

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.wire import LEASE_S
from distlaunch.errors import JobError
from distlaunch.job.allocation import AllocatedNode, Allocation, TaskPlace
from distlaunch.job.document import Place
from distlaunch.job.text import path_in
from distlaunch.job.types import Field
from distlaunch.transports.container import Container
from distlaunch.transports.transport import Local, Transport

Shown = Literal["all", "rank0", "none"]
Console = Shown | tuple[int, ...]

NumaMode = Literal["node", "socket", "exclusive", "core-complex"]


class EnvValue(Frozen):
    """A variable's value; one `inherited` from the caller is never printed or written down."""

    text: str
    inherited: bool = False


Env = Mapping[str, EnvValue]
NO_ENV: Env = MappingProxyType({})
Backend = Literal["nccl", "gloo", "mpi"]
Grow = Literal["restart", "now"]
OnStall = Literal["notice", "restart", "stop"]
OnNotice = Literal["TERM", "INT", "USR1", "USR2"]


class Program(Frozen):
    """What each worker runs: a Python `script` or `module`, or a `command` with its own arguments.

    With `placed` the first word is a path, relative to the node's workdir or below its user's ~; else it is
    taken as it stands.
    """

    kind: Literal["script", "module", "command"]
    words: tuple[str, ...]
    placed: bool = False

    def before(self, python: str) -> tuple[str, ...]:
        """The words before its own that start it with an interpreter."""
        return {"script": (python, "-u"), "module": (python, "-u", "-m"), "command": ()}[self.kind]


class Binding(Frozen):
    """The CPUs of each worker: by torch's NUMA modes, a share of the "cores", or `cpus` by local rank."""

    how: NumaMode | Literal["cores", "listed"]
    cpus: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The job file's key."""
        return "cpu_binding" if self.how in ("cores", "listed") else "numa_binding"

    def wish(self, local_rank: int) -> str:
        """What a worker is to get, in a word: the CPUs themselves where they are listed."""
        return self.cpus[local_rank] if self.how == "listed" else self.how


class NodeSpec(Frozen):
    """One node as the job file has it; None = decided by the plan. `cpu_procs` are workers without GPUs."""

    label: str
    reach: Transport = Local()
    gpus: int | None = None
    procs: int | None = None
    address: str | None = None
    python: str | None = None
    workdir: str | None = None
    env: Env = NO_ENV
    path: str = ""
    cpu_procs: int | None = None
    place: TaskPlace | None = None

    @property
    def local(self) -> bool:
        """Whether it is this machine."""
        return self.reach.here


class Timeouts(Frozen):
    """Seconds; `lease_s` without a sign of life make a node lost, here and there; None = no limit."""

    connect_s: float = 30.0
    join_s: float | None = 600.0
    stop_s: float = 10.0
    job_s: float | None = None
    lease_s: float = LEASE_S
    rejoin_s: float = 300.0
    stall_s: float | None = 600.0


FOREVER_S = 1e9
"""A window that never ends: torchrun's --max-restarts counts over the whole run."""


ELASTIC_RESTARTS = 3
"""An elastic job without `restarts.max` restarts so often; one that never does would not be elastic."""


class Restarts(Frozen):
    """At most `most` restarts in any `window_s` seconds; `backoff_s` is the first wait, doubled each time.

    At most `requeue` times the scheduler is asked to start the whole job again.
    """

    most: int = 0
    backoff_s: float = 1.0
    window_s: float = 3600.0
    requeue: int = 0


Std = int | Mapping[int, int]
"""Which of stdout (1) and stderr (2): of every local rank, or by local rank."""


class TorchrunLogs(Frozen):
    """Output as torchrun's flags have it. No `local_ranks` = all; `prefix` is a template."""

    redirects: Std = 0
    tee: Std = 0
    prefix: str = "[${role_name}${local_rank}]:"
    local_ranks: frozenset[int] = frozenset()


class Logs(Frozen):
    """`folder` holds the run directories, or one of `spares` if it can't; `console` says whose output shows.

    `watch` finds a number in a line, for a view. With `fold`, what several ranks print alike is shown once.
    A `temporary` run directory is removed after a success; `torchrun` replaces `console`.
    """

    folder: str
    console: Console = "all"
    temporary: bool = False
    torchrun: TorchrunLogs | None = None
    spares: tuple[str, ...] = ()
    fold: bool = False
    watch: str = ""


Occasion = Literal["failed", "restarted", "stalled", "finished"]


class Notify(Frozen):
    """Whom to tell what: `command`, on this machine, is given facts as JSON on its stdin; () = nobody."""

    command: tuple[str, ...] = ()
    on: tuple[Occasion, ...] = get_args(Occasion)


class Earlier(Frozen):
    """What went before in a job that its scheduler has started again: its id, and its restarts so far."""

    job_id: str
    restarts: int


class Invocation(Frozen):
    """How this command runs the job, which no job file says.

    A job file that was `piped` has no folder. `placeholders` in arguments are filled in. With `shares_stdio`
    workers have our stdin and, where nothing is to be done with what they print, our stdout.
    `signals` are the names of those that end the job and reach the workers as they are, not as SIGTERM.
    """

    piped: bool = False
    placeholders: bool = True
    shares_stdio: bool = False
    signals: tuple[str, ...] = ()
    earlier: Earlier | None = None


class Etcd(Frozen):
    """An etcd server, host:port, at which torch's own agents number the ranks; `conf` is --rdzv-conf."""

    endpoint: str
    conf: Mapping[str, str] = MappingProxyType({})


class JobSpec(Frozen):
    """A whole job. Paths are absolute; those on a node may begin with the ~ of its user instead.

    `places` maps a key's path to its position in the file.

    With `one_device` each worker sees its own GPU alone, as LOCAL_RANK 0.
    `spares` stand in for lost nodes; `min_nodes` None = all of `nodes` are needed. `metrics` is a file here.
    `allocation` is where the nodes come from, if the scheduler has chosen them. `sections` has the job
    file's sections for schedulers, by their keys, and `kubernetes` its section for that.
    With `mpirun`, a program and its options, MPI's launcher places the ranks: (host, ranks) of `mpirun_hosts`
    once it is planned (`distlaunch.plan.other_launchers`). With `etcd` each node's worker is an agent of
    torch's, which starts and numbers the ranks there.
    """

    name: str
    nodes: tuple[NodeSpec, ...]
    program: Program
    workdir: str
    logs: Logs
    backend: Backend | Literal["auto"] = "auto"
    master_host: str | None = None
    master_port: int | None = None
    rendezvous_id: str | None = None
    etcd: Etcd | None = None
    args: tuple[str, ...] = ()
    env: Env = NO_ENV
    python: str | None = None
    timeouts: Timeouts = Timeouts()
    restarts: Restarts = Restarts()
    spares: tuple[NodeSpec, ...] = ()
    min_nodes: int | None = None
    grow: Grow = "restart"
    on_stall: OnStall = "notice"
    on_notice: OnNotice = "TERM"
    role: str = "default"
    one_device: bool = False
    binding: Binding | None = None
    notify: Notify = Notify()
    metrics: str | None = None
    sections: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    container: Container | None = None
    mpirun: tuple[str, ...] = ()
    mpirun_hosts: tuple[tuple[str, int], ...] = ()
    kubernetes: Mapping[str, Any] = MappingProxyType({})
    places: Mapping[str, Place] = MappingProxyType({})
    allocation: Allocation | None = None
    source: str = "job"
    invocation: Invocation = Invocation()

    @cached_property
    def pool(self) -> tuple[NodeSpec, ...]:
        """Every machine that may take part: the nodes, then the spares. A node's index counts here."""
        return (*self.nodes, *self.spares)

    @property
    def hosts_unknown(self) -> bool:
        """Whether some machines are known only inside an allocation."""
        return any(node.reach.unknown for node in self.pool)

    @property
    def one_machine(self) -> bool:
        """Whether every worker will always run on the same machine."""
        return self.together([node.reach for node in self.pool])

    def together(self, reaches: Sequence[Transport]) -> bool:
        """Whether the workers on nodes that are reached so are all on the same machine."""
        return len(self.mpirun_hosts) <= 1 and (len(reaches) == 1 or all(reach.here for reach in reaches))

    @property
    def restarts_before(self) -> int:
        """Restarts before this run began, if a scheduler has started the job again."""
        return self.invocation.earlier.restarts if self.invocation.earlier else 0

    @property
    def takes_nodes_back(self) -> bool:
        """Whether a node that was lost can be used again."""
        return self.restarts.most > 0 or self.grow == "now"

    @property
    def master_path(self) -> str:
        """The key by which the job file names the first node's address or port; "" if none does."""
        keys = () if self.etcd else ("rendezvous.endpoint", "master_addr")
        return next((path for path in keys if path in self.places), "")

    @property
    def names_join_limit(self) -> bool:
        """Whether the user has said how long ranks may take to join."""
        return "timeouts.join" in self.places

    @property
    def fewest(self) -> int:
        """Nodes without which the job can't go on."""
        return self.min_nodes or len(self.nodes)

    @property
    def elastic(self) -> bool:
        """Whether the job may run on other nodes than those listed."""
        return bool(self.spares) or self.fewest < len(self.nodes)

    def error(self, path: str, text: str) -> JobError:
        """An error about what stands at `path`."""
        return JobError([self.places.get(path, Place(self.source)).problem(path, text)])

    def refuse(self, mistakes: Iterable[tuple[str, str]]) -> None:
        """Raise `JobError` if there are any: (path, what is wrong) of each."""
        if problems := [problem for path, text in mistakes for problem in self.error(path, text).problems]:
            raise JobError(problems)

    def with_gpus(self, count: int) -> "JobSpec":
        """The job with so many GPUs on each node that does not say how many it uses."""
        nodes = tuple(node._replace(gpus=count) if node.gpus is None else node for node in self.nodes)
        return self._replace(nodes=nodes)


class HostEntry(Frozen):
    """One host of a hostfile: `slots` is its number of processes, None where the file does not say."""

    host: str
    user: str | None
    slots: int | None
    place: Place


class Surroundings(Frozen):
    """What a job file is read against: its folder, the caller's, the environment, the hostfile's entries.

    `name` is the job's if the file has none; None means the file's stem. One that was `piped` has no folder.
    `allocation` is what a scheduler has given the caller; a job that is to be `submitted` has none yet.
    `reach` makes what reaches a host of it, None = ssh. `sections` are the keys of schedulers.
    `in_image`: its nodes will be containers, whose files and variables are not the caller's.
    """

    folder: str
    home: str
    environ: Mapping[str, str]
    hostfile: tuple[HostEntry, ...] | None = None
    name: str | None = None
    piped: bool = False
    allocation: Allocation | None = None
    reach: Callable[[AllocatedNode], Transport | None] | None = None
    sections: Mapping[str, Field] = MappingProxyType({})
    submitted: bool = False
    in_image: bool = False

    def path(self, text: str) -> str:
        """A path on this machine, absolute."""
        path = path_in(self.folder, text)
        return os.path.normpath(self.home + path[1:]) if path.startswith("~") else path

    def on_node(self, text: str) -> str:
        """A path on a node, whose user has a ~ of its own."""
        return path_in("" if self.in_image else self.folder, text)

    def interpreter(self, text: str | None) -> str | None:
        """A path on a node if it has a slash, else a name for the node's PATH."""
        return self.on_node(text) if text and "/" in text else text

    def variables(self, given: Mapping[str, str | None] | None) -> Env:
        """Variables of workers; None = the caller's value."""
        return {
            name: EnvValue(self.environ.get(name, ""), inherited=True) if value is None else EnvValue(value)
            for name, value in (given or {}).items()
        }
