"""Assigns ranks: nodes in the order listed, contiguous per node, rank 0 on the first."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import NewType

from distlaunch import contract
from distlaunch.agent.frozen import Frozen
from distlaunch.job.allocation import TaskPlace
from distlaunch.job.spec import Backend, Env, JobSpec, Program
from distlaunch.job.text import fill, path_in
from distlaunch.transports.transport import Transport
from distlaunch.wording import counted, listed

MAX_PROCS = 4096
"""Workers per node: the protocol has room for 32768."""
NodeRank = NewType("NodeRank", int)
"""A node's place in a generation, GROUP_RANK; every other number of a node is its place in the pool."""
DEFAULT_PORT = 29500
"""torch's default; shown by dry-run where `run` will pick a free one."""


class Facts(Frozen):
    """What a node says of itself: the interpreter for its workers and its GPUs (None = not asked).

    One with a launcher of its own has so many workers (`procs`). It shows what they print, and keeps it in
    `logs`, "" = nowhere; None = we do.
    """

    python: str
    gpus: int | None = None
    procs: int | None = None
    logs: str | None = None


class NodePlan(Frozen):
    """One node's part: workers `first_rank` … `first_rank + procs - 1`. `node` is its index in the pool.

    With torch's own agents, the one worker starts `torch_ranks` ranks, which torch numbers.
    """

    node: int
    node_rank: NodeRank
    label: str
    reach: Transport
    first_rank: int
    procs: int
    gpus: int
    python: str
    workdir: str
    env: Env
    torch_ranks: int = 0
    place: TaskPlace | None = None
    logs: str | None = None

    @property
    def ranks(self) -> range:
        """The ranks on this node."""
        return range(self.first_rank, self.first_rank + self.procs)

    @property
    def gpu_flaw(self) -> str:
        """The GPUs that the node lacks, in words; "" if every rank has one."""
        ranks = self.torch_ranks or self.procs
        return f"{counted(self.gpus, 'GPU')} for {counted(ranks, 'worker')}" if self.gpus < ranks else ""

    def device(self, local_rank: int) -> str:
        """The device that a script takes by LOCAL_RANK."""
        if self.torch_ranks:
            return f"{counted(self.torch_ranks, 'rank')} of torch's, on {'cuda' if self.gpus else 'cpu'}"
        return f"cuda:{local_rank}" if local_rank < self.gpus else "cpu"


class LaunchPlan(Frozen):
    """All that `run` starts and `dry-run` prints; `master_port` None = picked and held at the start."""

    spec: JobSpec
    nodes: tuple[NodePlan, ...]
    world_size: int
    backend: Backend
    master_addr: str
    master_port: int | None

    @property
    def group_world_size(self) -> int:
        """How many nodes there are, for the ranks: of a scheduler's tasks, the hosts; 0 = not known."""
        place = self.spec.nodes[0].place
        return len(self.nodes) if place is None else place.node_count or 0

    @cached_property
    def members(self) -> tuple[int, ...]:
        """Its nodes' indices in the pool, in rank order."""
        return tuple(part.node for part in self.nodes)

    @cached_property
    def node_words(self) -> str:
        """Its nodes for people: the first few of many by name."""
        return listed([part.label for part in self.nodes])

    @cached_property
    def _parts(self) -> Mapping[int, NodePlan]:
        return {part.node: part for part in self.nodes}

    def node_of(self, rank: int) -> NodePlan:
        """The node on which `rank` runs."""
        return self.nodes[bisect_right(self.nodes, rank, key=attrgetter("first_rank")) - 1]

    def part_of(self, node: int) -> NodePlan | None:
        """What the pool's node of that index does, or None when it takes no part."""
        return self._parts.get(node)

    @property
    def one_machine(self) -> bool:
        """Whether all workers run on the same machine."""
        return self.spec.together([node.reach for node in self.nodes])

    @property
    def unit(self) -> str:
        """What people call a worker."""
        return "torch agent" if self.spec.etcd else "mpirun" if self.spec.mpirun_hosts else "rank"

    @property
    def meeting_place(self) -> str:
        """Where the ranks meet, for people."""
        if self.spec.etcd:
            return f"etcd at {self.spec.etcd.endpoint}"
        return f"MASTER_ADDR {self.master_addr}, {self.master_port or 'a free port'}"

    @property
    def join_s(self) -> float | None:
        """Seconds for all workers to connect to MASTER_PORT; None = no limit, or torch's agents have it."""
        return None if self.spec.etcd else self.spec.timeouts.join_s


class Foreseen(Frozen):
    """What is known of a plan before the nodes are: its MASTER_ADDR."""

    address: str
    one_machine: bool


class WorkerPlan(Frozen):
    """One worker, ready to be spawned.

    `env` is the job's, `contract` wins over it, `defaults` hold only where the node has none.
    `paths` are the indices in `argv` of paths on the node, which may begin with its user's ~, as `cwd` may.
    `temporary` are variables for a folder there that is deleted after the run.
    """

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    env: Env
    contract: Mapping[str, str]
    defaults: Mapping[str, str]
    cwd: str
    paths: tuple[int, ...] = ()
    temporary: tuple[str, ...] = ()


def make_plan(spec: JobSpec, facts: Mapping[int, Facts], master_address: str | None = None) -> LaunchPlan:
    """The plan of a job on the nodes in `facts`: index in the pool → what is known, in rank order.

    `master_address` is how ssh reaches the first of them, where the job file does not name an address.
    Raises `JobError` when the job can't run on such nodes.
    """
    nodes: list[NodePlan] = []
    for index, fact in facts.items():
        first_rank = nodes[-1].ranks.stop if nodes else 0
        nodes.append(node_plan(spec, fact, index, NodeRank(len(nodes)), first_rank))
    backend = choose_backend(spec, nodes)
    world_size = nodes[-1].ranks.stop
    _check_console(spec, world_size)
    together = spec.together([node.reach for node in nodes])
    return LaunchPlan(
        spec=spec,
        nodes=tuple(nodes),
        world_size=world_size,
        backend=backend,
        master_addr=_master_addr(spec, nodes[0].node, together, master_address),
        master_port=spec.master_port,
    )


def _check_console(spec: JobSpec, world_size: int) -> None:
    """An elastic job may have other ranks later."""
    listed = spec.logs.console if isinstance(spec.logs.console, tuple) and not spec.elastic else ()
    for i, rank in enumerate(listed):
        if rank >= world_size:
            ranks = f"ranks 0 to {world_size - 1}" if world_size > 1 else "only rank 0"
            raise spec.error(f"logs.console[{i}]", f"rank {rank} does not exist: the job has {ranks}")


def foreseen_master(spec: JobSpec, master_address: str | None) -> Foreseen:
    """Where the workers meet if all nodes of the job come. Raises `JobError` as `make_plan`."""
    together = spec.together([node.reach for node in spec.nodes])
    return Foreseen(_master_addr(spec, 0, together, master_address), together)


def node_plan(spec: JobSpec, fact: Facts, index: int, node_rank: NodeRank, first_rank: int) -> NodePlan:
    """What one node does. Raises `JobError` when that is not known, or can't be."""
    node = spec.pool[index]
    gpus = node.gpus if node.gpus is not None else fact.gpus
    if gpus is None:
        if node.procs is None or spec.backend == "auto":
            text = f"the number of GPUs on {node.label} is unknown without contacting it"
            hint = "set gpus_per_node, for example --set gpus_per_node=8"
            raise spec.error(node.path, f"{text}; {hint}")
        gpus = node.procs if spec.backend == "nccl" else 0
    procs = fact.procs or node.procs or gpus or node.cpu_procs or 1
    if procs > MAX_PROCS:
        text = f"{procs} workers on {node.label} are too many: at most {MAX_PROCS} are supported"
        raise spec.error(node.path, text)
    binding = spec.binding
    if binding and binding.how == "listed" and len(binding.cpus) < procs:
        has = counted(procs, "worker")
        text = f"{node.label} has {has}, but CPUs are listed for only {len(binding.cpus)}"
        raise spec.error("cpu_binding", text)
    return NodePlan(
        node=index,
        node_rank=node_rank,
        label=node.label,
        reach=node.reach,
        first_rank=first_rank,
        procs=1 if spec.etcd else procs,
        torch_ranks=procs if spec.etcd else 0,
        gpus=gpus,
        python=node.python or spec.python or fact.python,
        workdir=node.workdir or spec.workdir,
        env={**spec.env, **node.env},
        place=node.place,
        logs=fact.logs,
    )


def choose_backend(spec: JobSpec, nodes: Sequence[NodePlan]) -> Backend:
    """What torch.distributed will use on these nodes. Raises `JobError` when the one asked for can't be."""
    short = [node for node in nodes if node.gpu_flaw]
    if spec.backend == "nccl" and short:
        text = f"nccl needs a GPU for each worker, but {short[0].label} has {short[0].gpu_flaw}"
        raise spec.error("backend", f"{text}; lower procs_per_node, or use backend: gloo")
    return spec.backend if spec.backend != "auto" else "gloo" if short else "nccl"


def _master_addr(spec: JobSpec, index: int, together: bool, master_address: str | None) -> str:
    first = spec.pool[index]
    # An endpoint in the job file names the first node; another that takes its place has its own address.
    named = spec.master_host if index == 0 else None
    if together:
        return named or "127.0.0.1"
    chosen = named or first.address or master_address or first.label
    if is_loopback(chosen):
        path = spec.master_path or first.path
        text = f"{chosen} is a loopback address, which the other nodes can't reach"
        raise spec.error(
            path, f"{text}; set {path if named else f'{first.path}.address'} to one that they can"
        )
    return chosen


def is_loopback(host: str) -> bool:
    """Whether a name or address means "this machine" wherever it is used."""
    import ipaddress  # a job on one machine needs none

    name = host.lower().rstrip(".")
    if name == "localhost" or name.startswith("localhost.") or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def meeting_of(plan: LaunchPlan, run_id: str, port: int, restart_count: int = 0) -> contract.Rendezvous:
    """What the workers of one generation share."""
    return contract.Rendezvous(
        master_addr=plan.master_addr,
        master_port=port,
        run_id=plan.spec.rendezvous_id or run_id,
        backend=plan.backend,
        restart_count=restart_count,
        max_restarts=plan.spec.restarts_before + plan.spec.restarts.most,
        role=plan.spec.role,
        signals=",".join(plan.spec.invocation.signals) or contract.HANDLED_SIGNALS,
    )


def planned_workers(plan: LaunchPlan) -> dict[NodeRank, list[WorkerPlan]]:
    """Each node's workers, with the port that `run` would pick shown as torch's default."""
    meeting = meeting_of(plan, plan.spec.name, plan.master_port or DEFAULT_PORT)
    way = ("lo", "127.0.0.1") if plan.spec.one_machine else (None, None)
    return {node.node_rank: workers(plan, node, meeting, *way) for node in plan.nodes}


def workers(
    plan: LaunchPlan,
    node: NodePlan,
    meeting: contract.Rendezvous,
    interface: str | None = None,
    source: str | None = None,
) -> list[WorkerPlan]:
    """The workers of one node for one generation.

    `interface` is the one that leads to MASTER_ADDR, `source` the node's own address there.
    """
    if plan.spec.etcd:
        return [_torch_agent(plan, node, meeting, interface, source)]
    return [_worker(plan, node, local_rank, meeting, interface) for local_rank in range(node.procs)]


def _worker(
    plan: LaunchPlan, node: NodePlan, local_rank: int, meeting: contract.Rendezvous, interface: str | None
) -> WorkerPlan:
    place = node.place or TaskPlace(local_rank, node.procs, node.node_rank, plan.group_world_size)
    position = contract.Position(
        rank=node.first_rank + local_rank,
        local_rank=place.local_rank,
        local_world_size=place.local_size,
        node_rank=place.node_rank,
    )
    shared = contract.shared_environment(meeting, plan.world_size, place.node_count)
    own = contract.own_environment(position, plan.spec.one_device)
    return WorkerPlan(
        rank=position.rank,
        local_rank=local_rank,
        argv=_argv(plan, node, shared | own),
        contract=shared | own,
        env=node.env,
        defaults=contract.defaults(place.local_size, interface, plan.backend),
        cwd=node.workdir,
        paths=_paths(plan.spec.program),
    )


def _torch_agent(
    plan: LaunchPlan, node: NodePlan, meeting: contract.Rendezvous, interface: str | None, source: str | None
) -> WorkerPlan:
    from distlaunch.plan import other_launchers  # few jobs have them

    spec, ranks = plan.spec, node.torch_ranks
    launcher = (node.python, *other_launchers.agent_words(spec, len(plan.nodes), ranks, meeting, source))
    return WorkerPlan(
        rank=node.first_rank,
        local_rank=0,
        argv=(*launcher, program_word(spec, node), *other_launchers.arguments(spec)),
        contract={"DISTLAUNCH_BACKEND": meeting.backend},  # torch sets all else
        env=node.env,
        defaults=contract.defaults(ranks, interface, plan.backend),
        cwd=node.workdir,
        paths=(0, len(launcher)) if spec.program.placed else (0,),
        temporary=other_launchers.TEMPORARY,
    )


def common_contract(workers: Sequence[WorkerPlan]) -> dict[str, str]:
    """The variables of the contract that all these workers have with the same value."""
    first, *others = (worker.contract for worker in workers)
    return {name: value for name, value in first.items() if all(other[name] == value for other in others)}


def _argv(plan: LaunchPlan, node: NodePlan, values: Mapping[str, str]) -> tuple[str, ...]:
    program, word = plan.spec.program, program_word(plan.spec, node)
    args = (*program.words[1:], *plan.spec.args)
    if plan.spec.invocation.placeholders:
        args = tuple(fill(argument, values) for argument in args)
    return (*program.before(node.python), word, *args)


def program_word(spec: JobSpec, node: NodePlan) -> str:
    """The script, module or command as it is started on a node."""
    word = spec.program.words[0]
    return path_in(node.workdir, word) if spec.program.placed else word


def _paths(program: Program) -> tuple[int, ...]:
    if program.kind == "command":
        return (0,) if program.placed else ()
    own = program.kind == "module" or program.words[0].startswith("-")  # python -c: no file
    return (0,) if own else (0, 2)
