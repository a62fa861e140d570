"""The checked, frozen content of a job file, and the hosts that a scheduler assigned to the job."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, get_args

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.wire import HEARTBEATS, LEASE_S
from distlaunch.errors import JobError
from distlaunch.job.document import Place
from distlaunch.job.text import path_in, placeholders_in
from distlaunch.transports.container import Container
from distlaunch.transports.gathering import TaskPlace
from distlaunch.transports.transport import Local, SshOptions, Transport

Shown = Literal["all", "rank0", "none"]
Console = Shown | tuple[int, ...]

NumaMode = Literal["node", "socket", "exclusive", "core-complex"]


class EnvValue(Frozen):
    """The value of a variable.

    An `inherited` value, which comes from the caller's environment, is never printed or recorded.
    """

    text: str
    inherited: bool = False


Env = Mapping[str, EnvValue]
NO_ENV: Env = MappingProxyType({})
Stdin = Literal["none", "rank 0"]
Success = Literal["all", "any", "rank 0"]
Backend = Literal["nccl", "gloo", "mpi"]
Grow = Literal["restart", "now"]
OnStall = Literal["warn", "restart", "stop"]
Checked = Literal["place", "limits", "software", "devices", "network", "load"]
"""The parts of a node that `check` and `run` examine before the ranks start."""
OnWarning = Literal["TERM", "INT", "USR1", "USR2"]
FailureKind = Literal["exception", "exit", "signal", "oom", "collective", "stall", "node_lost"]


class Program(Frozen):
    """The program of each worker: a Python `script` or `module`, or a `command` with its own arguments.

    If `placed`, the first word is a path relative to the node's workdir or to the user's home directory
    there. Otherwise, it is used unchanged. `role` is ROLE_NAME. A node may override everything except modules
    and commands: see `JobSpec.program_of`.
    """

    kind: Literal["script", "module", "command"]
    words: tuple[str, ...]
    placed: bool = False
    workdir: str = "."
    args: tuple[str, ...] = ()
    env: Env = NO_ENV
    python: str | None = None
    role: str = "default"

    @property
    def is_file(self) -> bool:
        """Return whether the first word is the path of a file, unlike a module, `-c` or a command in PATH."""
        return self.placed or (self.kind == "script" and not self.words[0].startswith("-"))

    @property
    def fixed_env(self) -> dict[str, str]:
        """Return the environment variables without placeholders, for what runs once on a node."""
        return {name: value.text for name, value in self.env.items() if "{" not in value.text}

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the arguments, with placeholders."""
        return (*self.words[1:], *self.args)

    @property
    def texts(self) -> Iterable[str]:
        """Return all texts that may contain placeholders: arguments, and variables that aren't inherited."""
        return (*self.arguments, *(value.text for value in self.env.values() if not value.inherited))

    def before(self, python: str) -> tuple[str, ...]:
        """Return the words before the program's own words: the interpreter and its flags."""
        return {"script": (python, "-u"), "module": (python, "-u", "-m"), "command": ()}[self.kind]


class Binding(Frozen):
    """The CPUs of each worker: one of torch's NUMA modes, a share of the "cores", or `cpus` by local rank."""

    how: NumaMode | Literal["cores", "listed"]
    cpus: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Return the key in the job file."""
        return "cpu_binding" if self.how in ("cores", "listed") else "numa_binding"

    def wish(self, local_rank: int) -> str:
        """Return a worker's binding as one word: the mode or, if CPUs are listed, the worker's CPUs."""
        return self.cpus[local_rank] if self.how == "listed" else self.how


class NodeSpec(Frozen):
    """One node in the job file; None = decided by the plan.

    `cpu_procs` is the number of workers if the node has no GPUs. The fields from `python` to `role` override
    the job's.
    """

    label: str
    reach: Transport = Local()
    gpus: int | None = None
    procs: int | None = None
    address: str | None = None
    python: str | None = None
    workdir: str | None = None
    env: Env = NO_ENV
    args: tuple[str, ...] | None = None
    script: str | None = None
    role: str | None = None
    path: str = ""
    cpu_procs: int | None = None
    place: TaskPlace | None = None

    @property
    def local(self) -> bool:
        """Check whether the node is this machine."""
        return self.reach.here


class Membership(Frozen):
    """The elasticity of a job: its minimum number of nodes, and the `spares` that replace lost nodes.

    If `min_nodes` is None, the job needs all of its nodes.
    """

    spares: tuple[NodeSpec, ...] = ()
    min_nodes: int | None = None
    grow: Grow = "restart"


class Placement(Frozen):
    """Devices and CPUs of the workers.

    With `one_device`, each worker sees only its own GPU, and LOCAL_RANK is 0.
    """

    one_device: bool = False
    binding: Binding | None = None


class Limits(Frozen):
    """Time limits in seconds (None = no limit), and the reactions to a stall and to a termination warning.

    A node counts as lost after `lease_s` seconds without a heartbeat. `on_warning` is the signal that ranks
    get after a termination warning.
    """

    connect_s: float = 30.0
    join_s: float | None = 600.0
    stop_s: float = 10.0
    job_s: float | None = None
    lease_s: float = LEASE_S
    rejoin_s: float = 300.0
    stall_s: float | None = 600.0
    setup_s: float = 3600.0
    on_stall: OnStall = "warn"
    on_warning: OnWarning = "TERM"

    @property
    def heartbeat_s(self) -> float:
        """Return the seconds between heartbeats. Until its workers start, an agent has the default lease."""
        return min(self.lease_s, LEASE_S) / HEARTBEATS


MAX_GPUS = 4096
"""Maximum GPUs of a node. A larger number must be a mistake."""
FOREVER_S = 1e9
"""Seconds of an endless time, for torchrun, which counts --max-restarts over the whole run, and lets scripts
decide how long ranks wait for each other."""


ELASTIC_RESTARTS = 3
"""Default of `restarts.max` for an elastic job, which needs restarts to change its nodes."""


class Restarts(Frozen):
    """The limits on restarts: at most `most` within any `window_s` seconds.

    `backoff_s` is the first delay, which doubles each time. The scheduler requeues the whole job at most
    `requeue` times. Only failures in `on` (None = all) cause a restart, but not those in `never`. A number
    stands for an exit with that status. Unless `repeat` is set, a repeated exception ends the job, and a node
    that fails repeatedly is left out.
    """

    most: int = 0
    backoff_s: float = 1.0
    window_s: float = 3600.0
    requeue: int = 0
    on: tuple[FailureKind | int, ...] | None = None
    never: tuple[FailureKind | int, ...] = ()
    repeat: bool = False


Std = int | Mapping[int, int]
"""Streams, as the sum of stdout (1) and stderr (2), for all local ranks or by local rank."""


class TorchrunLogs(Frozen):
    """Output settings from torchrun flags. No `local_ranks` = all; `prefix` is a template."""

    redirects: Std = 0
    tee: Std = 0
    prefix: str = "[${role_name}${local_rank}]:"
    local_ranks: frozenset[int] = frozenset()


class Logs(Frozen):
    """Output settings. Run directories are created in `directory` or, if it is unusable, in one of `spares`.

    `console` selects the ranks whose output is shown. `watch` finds a number in a line, for `view`. `fold`
    collapses identical lines from several ranks. `limit` is the maximum size of a log file, in bytes. A
    `temporary` run directory is removed after a successful run. `torchrun` replaces `console`.
    """

    directory: str
    console: Console = "all"
    temporary: bool = False
    torchrun: TorchrunLogs | None = None
    spares: tuple[str, ...] = ()
    fold: bool = False
    watch: str = ""
    limit: int | None = None


Occasion = Literal["failed", "restarted", "stalled", "finished"]


class Notify(Frozen):
    """The `command` on this machine that gets events as JSON on stdin; () = no notifications."""

    command: tuple[str, ...] = ()
    on: tuple[Occasion, ...] = get_args(Occasion)


class Earlier(Frozen):
    """The job ID of a requeued job, and its restarts so far."""

    job_id: str
    restarts: int


class Invocation(Frozen):
    """Settings of the command that runs the job. A job file can't contain them.

    `file` is the resolved path of the job file; "" = piped, or no file. `placeholders` enables placeholders
    such as {rank} in arguments and variables. With `shares_stdio`, workers inherit stdin and, if their output
    needs no processing, stdout. `signals` names the signals that end the job and reach the workers unchanged,
    not as SIGTERM. `script` is a checksum of the script; "" = this machine can't read the script.
    """

    file: str = ""
    placeholders: bool = True
    shares_stdio: bool = False
    signals: tuple[str, ...] = ()
    earlier: Earlier | None = None
    script: str = ""


class Etcd(Frozen):
    """An etcd server (host:port) that torch agents use to assign ranks; `conf` is --rdzv-conf."""

    endpoint: str
    conf: Mapping[str, str] = MappingProxyType({})


class RendezvousSpec(Frozen):
    """The place where the ranks connect to each other; None = decided by the plan.

    `host` and `port` are MASTER_ADDR and MASTER_PORT; `id` is TORCHELASTIC_RUN_ID. With `etcd`, the only
    worker on each node is a torch agent, which starts the node's ranks.
    """

    host: str | None = None
    port: int | None = None
    id: str | None = None
    etcd: Etcd | None = None


class Mpirun(Frozen):
    """The MPI launcher that places the ranks, with its options; an empty `argv` = no MPI launcher.

    `hosts` lists (host, ranks) once the job is planned (`distlaunch.plan.other_launchers`).
    """

    argv: tuple[str, ...] = ()
    hosts: tuple[tuple[str, int], ...] = ()


DEFAULT_BASE = "~/.cache/distlaunch/sync"


class Sync(Frozen):
    """The code to copy to the nodes: the tree that contains the job file, and `files`.

    `include` and `exclude` are patterns as in .gitignore. `base` is the directory on the nodes. A tree has at
    most `limit` bytes.
    """

    tree: bool = False
    files: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    base: str = DEFAULT_BASE
    limit: int = 256 << 20


class Setup(Frozen):
    """The way a node builds the Python environment: uv or conda with `files`, or the command `run`.

    `files` are in the workdir. The environment is rebuilt whenever their contents change. If `kind` is
    controller, `files` are packages from this machine, in the root of the code.
    """

    kind: Literal["uv", "conda", "run", "controller"]
    run: str = ""
    files: tuple[str, ...] = ()


class Collect(Frozen):
    """Files to copy back from `nodes` at the end, as patterns: relative to the workdir, absolute or below ~.

    At most `limit` bytes are copied from each node. `nodes` is a list of hosts, rank 0's node, or all nodes.
    """

    paths: tuple[str, ...] = ()
    nodes: Literal["rank 0", "all"] | tuple[str, ...] = "rank 0"
    limit: int = 1 << 30


class Tree(Frozen):
    """A snapshot of the code in the directory `root` on this machine, identified by `digest`.

    `commit` is the git commit ("" = none); `dirty` = files differ from that commit; `diff` is the digest of
    the difference ("" = none, or too large). `base` is as in `Sync`.
    """

    digest: str
    base: str
    root: str
    files: int
    size: int
    commit: str = ""
    dirty: bool = False
    diff: str = ""

    @property
    def words(self) -> str:
        """Return the snapshot in a few words: `tree 3f8188d74840 (commit 5e68b2433c96 with changes)`."""
        changes = " with changes" if self.dirty else ""
        return f"tree {self.digest[:12]}" + (f" (commit {self.commit[:12]}{changes})" if self.commit else "")

    def document(self) -> dict[str, Any]:
        """Return the snapshot as a JSON object."""
        names = ("digest", "root", "files", "size", "commit", "dirty")
        return {"tree" if name == "digest" else name: getattr(self, name) for name in names}


class AllocatedNode(Frozen):
    """A host of an allocation, as described by the environment; None = unknown.

    `procs` is the number of tasks or slots requested on the host. `group` is the component of a heterogeneous
    job. For a pod, `address` is the pod's address, and the ranks run in its container `container`.
    """

    host: str
    gpus: int | None = None
    procs: int | None = None
    group: int | None = None
    address: str | None = None
    container: str | None = None


class Allocation(Frozen):
    """The hosts of a scheduler job, in the scheduler's order; `job` is its ID, "" = unknown.

    `title` is the display name of the scheduler. `queued` means that the job was submitted to the queue.
    `starts` counts the earlier starts of a job that can be requeued. `answers` means that the scheduler can
    report why the job ended.
    """

    scheduler: str
    title: str
    job: str
    nodes: tuple[AllocatedNode, ...]
    queued: bool = False
    starts: int = 0
    answers: bool = False

    @property
    def name(self) -> str:
        """Return the display name of the allocation."""
        return f"{self.title} job {self.job}" if self.job else self.title

    @property
    def requeues(self) -> bool:
        """Check whether the scheduler can requeue the job."""
        return self.queued and self.answers


class JobSpec(Frozen):
    """A whole job. Paths are absolute; paths on a node may begin with ~ for the user's home there.

    `metrics` is a file on this machine. `unchecked` lists the parts not to check. `tree` is the snapshot of
    the code that `sync` copies to the nodes, once the snapshot has been taken. `allocation` is set if a
    scheduler assigned the nodes. `sections` maps keys to the scheduler sections of the job file, and
    `kubernetes` is the file's section for Kubernetes. `places` maps the path of a key to its position in the
    file.
    """

    name: str
    nodes: tuple[NodeSpec, ...]
    program: Program
    logs: Logs
    backend: Backend | Literal["auto"] = "auto"
    rendezvous: RendezvousSpec = RendezvousSpec()
    limits: Limits = Limits()
    restarts: Restarts = Restarts()
    membership: Membership = Membership()
    placement: Placement = Placement()
    notify: Notify = Notify()
    metrics: str | None = None
    unchecked: tuple[Checked, ...] = ()
    sync: Sync = Sync()
    tree: Tree | None = None
    setup: Setup | None = None
    collect: Collect = Collect()
    stdin: Stdin = "none"
    success: Success = "all"
    container: Container | None = None
    mpirun: Mpirun = Mpirun()
    ssh: SshOptions = SshOptions()
    sections: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    kubernetes: Mapping[str, Any] = MappingProxyType({})
    allocation: Allocation | None = None
    source: str = "job"
    places: Mapping[str, Place] = MappingProxyType({})
    invocation: Invocation = Invocation()

    @cached_property
    def pool(self) -> tuple[NodeSpec, ...]:
        """Return all nodes that may take part: the nodes, then the spares.

        Node indices refer to this tuple.
        """
        return (*self.nodes, *self.membership.spares)

    def program_of(self, node: NodeSpec) -> Program:
        """Return the program of a node: the job's, with the node's overrides."""
        parts = {name: getattr(node, name) for name in ("args", "python", "workdir", "role")}
        own = {name: value for name, value in parts.items() if value is not None}
        program = self.program._replace(**own, env={**self.program.env, **node.env})
        return program._replace(kind="script", words=(node.script,), placed=True) if node.script else program

    def in_tree(self, run_id: str) -> "JobSpec":
        """Return the job with paths inside its tree redirected to the copy on the nodes."""
        if self.tree is None:
            return self
        there, root = f"{self.tree.base}/runs/{run_id}", self.tree.root

        def moved(path: str) -> str:
            return path_in(there, f".{path[len(root) :]}") if f"{path}/".startswith(f"{root}/") else path

        return self.with_paths(moved)

    def with_paths(self, change: Callable[[str], str]) -> "JobSpec":
        """Return the job with changed paths of its program, its setup, and all working directories."""

        def changed(node: NodeSpec) -> NodeSpec:
            workdir, script = (path and change(path) for path in (node.workdir, node.script))
            return node._replace(workdir=workdir, script=script)

        words = (change(self.program.words[0]), *self.program.words[1:])
        spares = tuple(map(changed, self.membership.spares))
        setup = self.setup and self.setup._replace(files=tuple(map(change, self.setup.files)))
        return self._replace(
            program=self.program._replace(words=words, workdir=change(self.program.workdir)),
            nodes=tuple(map(changed, self.nodes)),
            membership=self.membership._replace(spares=spares),
            setup=setup,
        )

    @property
    def hosts_unknown(self) -> bool:
        """Check whether some hosts are known only inside an allocation."""
        return any(node.reach.unknown for node in self.pool)

    @property
    def shared(self) -> tuple[int, ...]:
        """Return the descriptors that workers on this machine may share with the controller."""
        return (0, 1) if self.invocation.shares_stdio else (0,) if self.stdin == "rank 0" else ()

    @property
    def one_machine(self) -> bool:
        """Check whether all workers will always run on the same machine."""
        return self.together([node.reach for node in self.pool])

    def together(self, reaches: Sequence[Transport]) -> bool:
        """Check whether the workers on nodes with these transports are all on the same machine."""
        return len(self.mpirun.hosts) <= 1 and (len(reaches) == 1 or all(reach.here for reach in reaches))

    @property
    def restarts_before(self) -> int:
        """Return the number of restarts before this run, if a scheduler requeued the job."""
        return self.invocation.earlier.restarts if self.invocation.earlier else 0

    @property
    def scheduler_answers(self) -> bool:
        """Check whether the controller can find out if the scheduler is ending the job."""
        return self.allocation is not None and (self.allocation.answers or self.allocation.queued)

    @property
    def takes_nodes_back(self) -> bool:
        """Check whether a lost node can be used again."""
        return self.restarts.most > 0 or self.membership.grow == "now"

    @property
    def master_path(self) -> str:
        """Return the key that sets the address or port of the first node; "" = none."""
        keys = () if self.rendezvous.etcd else ("rendezvous.endpoint", "master_addr")
        return next((path for path in keys if path in self.places), "")

    def address_path(self, node: int) -> str:
        """Return the key that sets the address of a node of the pool, if it is the job's first node."""
        if not self.places:
            return "the rendezvous endpoint"
        if self.master_path and not node:
            return self.master_path
        own = self.pool[node].path
        if own.endswith("]") and sum(other.path == own for other in self.pool) == 1:
            return f"{own}.address"
        return "address, in an entry of its own in nodes," if node else "master_addr"

    @property
    def names_join_limit(self) -> bool:
        """Check whether the join timeout is explicit."""
        return "timeouts.join" in self.places

    @property
    def fewest(self) -> int:
        """Return the minimum number of nodes."""
        return self.membership.min_nodes or len(self.nodes)

    @property
    def elastic(self) -> bool:
        """Check whether the job may run on a different set of nodes."""
        return bool(self.membership.spares) or self.fewest < len(self.nodes)

    @cached_property
    def placeholders(self) -> tuple[str, ...]:
        """Return the placeholders in arguments and variables, in order."""
        if not self.invocation.placeholders:
            return ()
        others = (self.program_of(node) for node in self.pool if node.env or node.args)
        texts = [text for program in (self.program, *others) for text in program.texts]
        return tuple(placeholders_in(texts))

    @property
    def port_names(self) -> tuple[str, ...]:
        """Return the placeholders for additional ports on the first node: `port:NAME`."""
        return tuple(word for word in self.placeholders if word.startswith("port:"))

    def key_words(self, key: str) -> str:
        """Return ` (key)` for messages, or "" if the job has no keys, as with torchrun."""
        return f" ({key})" if self.places else ""

    def error(self, path: str, text: str) -> JobError:
        """Return an error about the value at `path`."""
        return JobError([self.places.get(path, Place(self.source)).problem(path, text)])

    def refuse(self, mistakes: Iterable[tuple[str, str]]) -> None:
        """Raise `JobError` if there are mistakes, which are (path, explanation) pairs."""
        if problems := [problem for path, text in mistakes for problem in self.error(path, text).problems]:
            raise JobError(problems)

    def with_gpus(self, count: int) -> "JobSpec":
        """Return the job with `count` GPUs on each node that has no explicit number of GPUs."""
        nodes = tuple(node._replace(gpus=count) if node.gpus is None else node for node in self.nodes)
        return self._replace(nodes=nodes)
