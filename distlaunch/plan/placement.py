"""The placement of ranks: in the order of the nodes, contiguous on each node, with rank 0 on the first."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import NewType

from distlaunch import contract
from distlaunch.agent.frozen import Frozen
from distlaunch.job.spec import Backend, JobSpec, Program
from distlaunch.job.text import is_loopback
from distlaunch.transports.gathering import TaskPlace
from distlaunch.transports.ssh import Ssh
from distlaunch.transports.transport import Transport
from distlaunch.wording import counted, listed

MAX_PROCS = 4096
"""Maximum number of workers per node. The protocol would allow 32768."""
NodeRank = NewType("NodeRank", int)
"""The position of a node in an attempt (GROUP_RANK). All other node numbers are pool indices."""
DEFAULT_PORT = 29500
"""torch's default port. `dry-run` shows it instead of the free port that `run` picks."""


class Facts(Frozen):
    """Facts about a node: the interpreter for its workers and the number of its GPUs (None if not checked).

    If the node has its own launcher, that launcher determines the number of workers, `procs`, and their
    `role`. The launcher shows their output and keeps it in `logs`, which is "" if the output isn't kept. If
    `logs` is None, the controller shows and keeps the output. `machine` identifies the host.
    """

    python: str
    gpus: int | None = None
    procs: int | None = None
    logs: str | None = None
    role: str = ""
    machine: str = ""


class NodePlan(Frozen):
    """The part of the plan for one node: the workers from rank `first_rank` to `first_rank + procs - 1`.

    `node` is the pool index of the node. `first_of_role` is the ROLE_RANK of its first worker. With torch
    agents, the only worker starts `torch_ranks` ranks, and torch numbers them.
    """

    node: int
    node_rank: NodeRank
    label: str
    reach: Transport
    first_rank: int
    procs: int
    gpus: int
    python: str
    program: Program
    first_of_role: int = 0
    torch_ranks: int = 0
    place: TaskPlace | None = None
    logs: str | None = None

    @property
    def ranks(self) -> range:
        """Return the ranks on this node."""
        return range(self.first_rank, self.first_rank + self.procs)

    @property
    def gpu_flaw(self) -> str:
        """Describe a lack of GPUs, or return "" if every rank has a GPU."""
        ranks = self.torch_ranks or self.procs
        return f"{counted(self.gpus, 'GPU')} for {counted(ranks, 'worker')}" if self.gpus < ranks else ""

    def device(self, local_rank: int) -> str:
        """Return the device that a script selects by LOCAL_RANK."""
        if self.torch_ranks:
            return f"{counted(self.torch_ranks, 'torch rank')} on {'cuda' if self.gpus else 'cpu'}"
        return f"cuda:{local_rank}" if local_rank < self.gpus else "cpu"


class LaunchPlan(Frozen):
    """The plan that `run` executes and `dry-run` prints.

    If `master_port` is None, a port is picked at the start. `roles` contains worker counts keyed by role.
    """

    spec: JobSpec
    nodes: tuple[NodePlan, ...]
    world_size: int
    backend: Backend
    master_addr: str
    master_port: int | None
    roles: Mapping[str, int] = contract.NO_VALUES

    @cached_property
    def members(self) -> tuple[int, ...]:
        """Return the pool indices of the nodes, in rank order."""
        return tuple(part.node for part in self.nodes)

    @cached_property
    def node_words(self) -> str:
        """Return the names of the nodes, shortened to the first few."""
        return listed([part.label for part in self.nodes])

    @property
    def size_words(self) -> str:
        """Return the size of the job: `8 ranks on 2 nodes`."""
        simulated = " simulated on this machine" if self.one_machine and len(self.nodes) > 1 else ""
        workers = self.unit if self.unit == "mpirun" else counted(self.world_size, self.unit)
        return f"{workers} on {counted(len(self.nodes), 'node')}{simulated}"

    @cached_property
    def _parts(self) -> Mapping[int, NodePlan]:
        return {part.node: part for part in self.nodes}

    def node_of(self, rank: int) -> NodePlan:
        """Return the node of `rank`."""
        return self.nodes[bisect_right(self.nodes, rank, key=attrgetter("first_rank")) - 1]

    def part_of(self, node: int) -> NodePlan | None:
        """Return a node's part of the plan by pool index, or None if the node doesn't take part."""
        return self._parts.get(node)

    @property
    def one_machine(self) -> bool:
        """Return whether all workers run on the same machine."""
        return self.spec.together([node.reach for node in self.nodes])

    @property
    def unit(self) -> str:
        """Return the word for a worker in messages."""
        return "torch agent" if self.spec.rendezvous.etcd else "mpirun" if self.spec.mpirun.hosts else "rank"

    @property
    def meeting_place(self) -> str:
        """Return the rendezvous endpoint for messages."""
        if self.spec.rendezvous.etcd:
            return f"etcd at {self.spec.rendezvous.etcd.endpoint}"
        return f"MASTER_ADDR {self.master_addr}, {self.master_port or 'a free port'}"

    @property
    def join_s(self) -> float | None:
        """Return the join timeout in seconds, or None if there is none or if torch agents apply it."""
        return None if self.spec.rendezvous.etcd else self.spec.limits.join_s


def make_plan(spec: JobSpec, facts: Mapping[int, Facts], master_address: str | None = None) -> LaunchPlan:
    """Return the plan of a job on the nodes in `facts`, which is keyed by pool index and in rank order.

    `master_address` is the address that ssh uses for the first node. It applies if the job file doesn't set
    one. Raises `JobError` if the job can't run on these nodes.
    """
    nodes: list[NodePlan] = []
    _check_names(spec, facts)
    roles: Counter[str] = Counter()
    for index, fact in facts.items():
        first_rank = nodes[-1].ranks.stop if nodes else 0
        part = node_plan(spec, fact, index, NodeRank(len(nodes)), first_rank)
        nodes.append(part._replace(first_of_role=roles[part.program.role]))
        roles[part.program.role] += part.procs
    backend = choose_backend(spec, nodes)
    world_size = nodes[-1].ranks.stop
    _check_console(spec, world_size)
    together = spec.together([node.reach for node in nodes])
    address = _master_addr(spec, nodes[0].node, together, master_address)
    return LaunchPlan(spec, tuple(nodes), world_size, backend, address, spec.rendezvous.port, roles)


def _check_names(spec: JobSpec, facts: Mapping[int, Facts]) -> None:
    """Check that no two ssh names refer to the same host."""
    seen: dict[str, str] = {}
    for index, fact in facts.items():
        node = spec.pool[index]
        named = fact.machine if isinstance(node.reach, Ssh) else ""
        if named and (other := seen.setdefault(named, node.label)) != node.label:
            hint = f"remove one; to run more workers on it, raise the procs or slots of {other}"
            raise spec.error(node.path, f"{node.label} and {other} are the same host; {hint}")


def _check_console(spec: JobSpec, world_size: int) -> None:
    """Check the ranks in logs.console, except in an elastic job, which may have other ranks later."""
    listed = spec.logs.console if isinstance(spec.logs.console, tuple) and not spec.elastic else ()
    for i, rank in enumerate(listed):
        if rank >= world_size:
            ranks = f"ranks 0 to {world_size - 1}" if world_size > 1 else "only rank 0"
            text = f"rank {rank} does not exist: the job has {ranks}"
            if spec.mpirun.hosts:
                text = "mpirun merges the output of all ranks; remove this key"
            raise spec.error(f"logs.console[{i}]", text)


def foreseen_master(spec: JobSpec, master_address: str | None) -> str:
    """Return the MASTER_ADDR that applies if all nodes connect. Raises `JobError`, as `make_plan` does.

    Requests to nodes contain this address before a plan exists.
    """
    return _master_addr(spec, 0, spec.together([node.reach for node in spec.nodes]), master_address)


def node_plan(spec: JobSpec, fact: Facts, index: int, node_rank: NodeRank, first_rank: int) -> NodePlan:
    """Return the part of the plan for one node. Raises `JobError` if its size is unknown or impossible."""
    node = spec.pool[index]
    program = spec.program_of(node)
    program = program._replace(role=fact.role or program.role)
    gpus = node.gpus if node.gpus is not None else fact.gpus
    if gpus is None:
        if node.procs is None:
            text = f"the number of GPUs on {node.label} is unknown without contacting it"
            hint = "set gpus_per_node, for example --set gpus_per_node=8"
            raise spec.error(node.path, f"{text}; {hint}")
        gpus = 0 if spec.backend == "gloo" else node.procs
    procs = fact.procs or node.procs or gpus or node.cpu_procs or 1
    if procs > MAX_PROCS:
        text = f"{procs} workers on {node.label}: a node can have at most {MAX_PROCS}"
        keys = [key for key in (f"{node.path}.procs", "procs_per_node") if key in spec.places]
        raise spec.error([*keys, node.path][0], f"{text}; use fewer, or more nodes")
    binding = spec.placement.binding
    if binding and binding.how == "listed" and len(binding.cpus) < procs:
        has = counted(procs, "worker")
        text = f"{node.label} has {has}, but CPUs are listed for only {len(binding.cpus)}"
        raise spec.error("cpu_binding", f"{text}; list those of each worker")
    return NodePlan(
        node=index,
        node_rank=node_rank,
        label=node.label,
        reach=node.reach,
        first_rank=first_rank,
        procs=1 if spec.rendezvous.etcd else procs,
        torch_ranks=procs if spec.rendezvous.etcd else 0,
        gpus=gpus,
        python=program.python or fact.python,
        program=program,
        place=node.place,
        logs=fact.logs,
    )


def choose_backend(spec: JobSpec, nodes: Sequence[NodePlan]) -> Backend:
    """Return the torch.distributed backend. Raises `JobError` if the requested backend can't work."""
    short = [node for node in nodes if node.gpu_flaw]
    if spec.backend == "nccl" and short:
        text = f"nccl needs a GPU for each worker, but {short[0].label} has {short[0].gpu_flaw}"
        few = "start fewer workers there (procs_per_node, its own procs, hostfile slots, or -n), or use "
        few += "backend: gloo; if it has more GPUs, correct gpus_per_node, or CUDA_VISIBLE_DEVICES there"
        none = "check its driver, its CUDA_VISIBLE_DEVICES, gpus_per_node, and whether the allocation or "
        none += "container was given GPUs; on CPUs, use backend: gloo"
        raise spec.error("backend", f"{text}; {few if short[0].gpus else none}")
    return spec.backend if spec.backend != "auto" else "gloo" if short else "nccl"


def _master_addr(spec: JobSpec, index: int, together: bool, master_address: str | None) -> str:
    """Return the MASTER_ADDR of a job whose first node has this index in the pool.

    `together` is true if all nodes are on one machine. Raises `JobError` if other nodes can't use the
    address.
    """
    first = spec.pool[index]
    # An endpoint in the job file refers to the first node. A node that replaces it has its own address.
    named = spec.rendezvous.host if index == 0 else None
    if together:
        return named or "127.0.0.1"
    chosen = named or first.address or master_address or first.label
    if is_loopback(chosen):
        path = spec.master_path or first.path
        text = f"{chosen} is a loopback address, which the other nodes can't reach"
        raise spec.error(path, f"{text}; set {spec.address_path(index)} to one that they can reach")
    return chosen
