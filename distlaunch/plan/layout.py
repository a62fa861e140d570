"""Assignment of ranks: nodes in the order listed, contiguous per node, rank 0 on the first."""

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import count
from operator import attrgetter
from typing import NewType, TypeVar

from distlaunch import contract
from distlaunch.agent.frozen import Frozen
from distlaunch.job.spec import Backend, Env, JobSpec, Program
from distlaunch.job.text import VARIABLES, Values, fill, path_in
from distlaunch.transports.gathering import TaskPlace
from distlaunch.transports.ssh import Ssh
from distlaunch.transports.transport import Transport
from distlaunch.wording import counted, listed

MAX_PROCS = 4096
"""Workers per node; the protocol has room for 32768."""
T = TypeVar("T")
NodeRank = NewType("NodeRank", int)
"""Position of a node in an attempt, GROUP_RANK; other node numbers are indices in the pool."""
DEFAULT_PORT = 29500
"""Default port of torch; shown by dry-run where `run` picks a free port."""


class Facts(Frozen):
    """Facts about a node: the interpreter for its workers and the number of its GPUs (None = not checked).

    A launcher has `procs` workers of its own, with its own `role`. It shows their output and keeps it in
    `logs`, "" = nowhere; None = the controller does. `machine` identifies its host.
    """

    python: str
    gpus: int | None = None
    procs: int | None = None
    logs: str | None = None
    role: str = ""
    machine: str = ""


class NodePlan(Frozen):
    """The part of one node: workers `first_rank` … `first_rank + procs - 1`; `node` is its pool index.

    `first_of_role` is the ROLE_RANK of its first worker. With torch agents, the only worker starts
    `torch_ranks` ranks, which torch numbers.
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
        """Describe a lack of GPUs; "" if every rank has one."""
        ranks = self.torch_ranks or self.procs
        return f"{counted(self.gpus, 'GPU')} for {counted(ranks, 'worker')}" if self.gpus < ranks else ""

    def device(self, local_rank: int) -> str:
        """Return the device that a script selects by LOCAL_RANK."""
        if self.torch_ranks:
            return f"{counted(self.torch_ranks, 'torch rank')} on {'cuda' if self.gpus else 'cpu'}"
        return f"cuda:{local_rank}" if local_rank < self.gpus else "cpu"


class LaunchPlan(Frozen):
    """The plan that `run` executes and `dry-run` prints; `master_port` None = picked at the start.

    `roles` are the numbers of workers by role.
    """

    spec: JobSpec
    nodes: tuple[NodePlan, ...]
    world_size: int
    backend: Backend
    master_addr: str
    master_port: int | None
    roles: Mapping[str, int] = contract.NO_VALUES

    @property
    def group_world_size(self) -> int:
        """Return the number of nodes for ranks; for scheduler tasks, of hosts; 0 = unknown."""
        place = self.spec.nodes[0].place
        return len(self.nodes) if place is None else place.node_count or 0

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
        return f"{counted(self.world_size, self.unit)} on {counted(len(self.nodes), 'node')}{simulated}"

    @cached_property
    def _parts(self) -> Mapping[int, NodePlan]:
        return {part.node: part for part in self.nodes}

    def node_of(self, rank: int) -> NodePlan:
        """Return the node of `rank`."""
        return self.nodes[bisect_right(self.nodes, rank, key=attrgetter("first_rank")) - 1]

    def part_of(self, node: int) -> NodePlan | None:
        """Return the part of a node by its pool index, or None if it takes no part."""
        return self._parts.get(node)

    @property
    def one_machine(self) -> bool:
        """Check whether all workers run on the same machine."""
        return self.spec.together([node.reach for node in self.nodes])

    @property
    def unit(self) -> str:
        """Return the word for a worker in messages."""
        return "torch agent" if self.spec.rendezvous.etcd else "mpirun" if self.spec.mpirun.hosts else "rank"

    @property
    def meeting_place(self) -> str:
        """Return the endpoint of the rendezvous for people."""
        if self.spec.rendezvous.etcd:
            return f"etcd at {self.spec.rendezvous.etcd.endpoint}"
        return f"MASTER_ADDR {self.master_addr}, {self.master_port or 'a free port'}"

    @property
    def join_s(self) -> float | None:
        """Return the join timeout in seconds; None = no limit, or torch agents apply it."""
        return None if self.spec.rendezvous.etcd else self.spec.limits.join_s


class Foreseen(Frozen):
    """The part of a plan that is known before the nodes are: MASTER_ADDR."""

    address: str
    one_machine: bool


class WorkerPlan(Frozen):
    """One worker, ready to be started.

    `env` is the environment of the job. `contract` overrides it, and `defaults` apply only if the node has no
    value. `paths` are the indices in `argv` of paths on the node; these, and `cwd`, may begin with a ~.
    `temporary` are variables for a directory on the node that is deleted after the run.
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
    """Return the plan of a job on the nodes in `facts`: pool index → facts, in rank order.

    `master_address` is the address used by ssh for the first node, unless the job file has an address. Raises
    `JobError` if the job can't run on these nodes.
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
    """Check that no two names for ssh mean the same host."""
    seen: dict[str, str] = {}
    for index, fact in facts.items():
        node = spec.pool[index]
        named = fact.machine if isinstance(node.reach, Ssh) else ""
        if named and (other := seen.setdefault(named, node.label)) != node.label:
            hint = f"remove one; to run more workers on it, raise procs of {other}"
            raise spec.error(node.path, f"{node.label} and {other} are the same host; {hint}")


def _check_console(spec: JobSpec, world_size: int) -> None:
    """Check the ranks in logs.console; an elastic job may have other ranks later."""
    listed = spec.logs.console if isinstance(spec.logs.console, tuple) and not spec.elastic else ()
    for i, rank in enumerate(listed):
        if rank >= world_size:
            ranks = f"ranks 0 to {world_size - 1}" if world_size > 1 else "only rank 0"
            raise spec.error(f"logs.console[{i}]", f"rank {rank} does not exist: the job has {ranks}")


def foreseen_master(spec: JobSpec, master_address: str | None) -> Foreseen:
    """Return MASTER_ADDR if all nodes connect. Raises `JobError`, as `make_plan` does."""
    together = spec.together([node.reach for node in spec.nodes])
    return Foreseen(_master_addr(spec, 0, together, master_address), together)


def node_plan(spec: JobSpec, fact: Facts, index: int, node_rank: NodeRank, first_rank: int) -> NodePlan:
    """Return the part of one node. Raises `JobError` if it is unknown or impossible."""
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
        text = f"{procs} workers on {node.label} are too many: at most {MAX_PROCS} are supported"
        raise spec.error(node.path, text)
    binding = spec.placement.binding
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
        procs=1 if spec.rendezvous.etcd else procs,
        torch_ranks=procs if spec.rendezvous.etcd else 0,
        gpus=gpus,
        python=program.python or fact.python,
        program=program,
        place=node.place,
        logs=fact.logs,
    )


def choose_backend(spec: JobSpec, nodes: Sequence[NodePlan]) -> Backend:
    """Return the backend of torch.distributed. Raises `JobError` if the requested one can't work."""
    short = [node for node in nodes if node.gpu_flaw]
    if spec.backend == "nccl" and short:
        text = f"nccl needs a GPU for each worker, but {short[0].label} has {short[0].gpu_flaw}"
        advice = "lower procs_per_node, use backend: gloo, or set gpus_per_node if more are there"
        raise spec.error("backend", f"{text}; {advice}")
    return spec.backend if spec.backend != "auto" else "gloo" if short else "nccl"


def _master_addr(spec: JobSpec, index: int, together: bool, master_address: str | None) -> str:
    first = spec.pool[index]
    # An endpoint in the job file means the first node. A replacement has its own address.
    named = spec.rendezvous.host if index == 0 else None
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
    """Check whether a name or address means "this machine" on every machine."""
    import ipaddress  # not needed on one machine

    name = host.lower().rstrip(".")
    if name == "localhost" or name.startswith("localhost.") or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def ids_of(spec: JobSpec, run_id: str) -> dict[str, str]:
    """Return the variables with the IDs of a run and of its job.

    The ID of the job stays the same when it is requeued, so that experiment trackers can resume by it.
    """
    job_id = spec.invocation.earlier.job_id if spec.invocation.earlier else run_id
    return {"DISTLAUNCH_RUN_ID": run_id, "DISTLAUNCH_JOB_ID": job_id}


def meeting_of(
    plan: LaunchPlan, run_id: str, ports: Sequence[int], restarts: int = 0, sources: Sequence[str | None] = ()
) -> contract.Rendezvous:
    """Return the values shared by the workers of one attempt.

    `ports` are MASTER_PORT and further ports. `sources` are the addresses of all nodes on their routes to
    MASTER_ADDR, if a placeholder needs them.
    """
    port, *further = ports
    return contract.Rendezvous(
        master_addr=plan.master_addr,
        master_port=port,
        run_id=plan.spec.rendezvous.id or run_id,
        backend=plan.backend,
        restart_count=restarts,
        max_restarts=plan.spec.restarts_before + plan.spec.restarts.most,
        signals=",".join(plan.spec.invocation.signals) or contract.HANDLED_SIGNALS,
        ids=ids_of(plan.spec, run_id),
        ports=dict(zip(plan.spec.port_names, map(str, further), strict=False)),
        sources=tuple(sources),
    )


def planned_workers(plan: LaunchPlan) -> dict[NodeRank, list[WorkerPlan]]:
    """Return the workers of each node, with 29500, torch's default, and so on for free ports."""
    way = ("lo", "127.0.0.1") if plan.spec.one_machine else (None, None)
    port = plan.master_port or DEFAULT_PORT
    ports = range(port, port + 1 + len(plan.spec.port_names))
    meeting = meeting_of(plan, plan.spec.name, ports, sources=[way[1]] * len(plan.nodes))
    return {node.node_rank: workers(plan, node, meeting, *way) for node in plan.nodes}


def workers(
    plan: LaunchPlan,
    node: NodePlan,
    meeting: contract.Rendezvous,
    interface: str | None = None,
    source: str | None = None,
) -> list[WorkerPlan]:
    """Return the workers of one node for one attempt.

    `interface` leads to MASTER_ADDR, and `source` is the address of the node on it.
    """
    if plan.spec.rendezvous.etcd:
        planned = [_torch_agent(plan, node, meeting, interface, source)]
    else:
        planned = [_worker(plan, node, local_rank, meeting, interface) for local_rank in range(node.procs)]
    if not plan.spec.invocation.placeholders:
        return planned
    first = len(planned[0].argv) - len(node.program.arguments)
    shared = _shared_value(plan, meeting)
    return [_filled(worker, first, shared) for worker in planned]


# Placeholders


def _shared_value(plan: LaunchPlan, meeting: contract.Rendezvous) -> Values:
    """Return the values of placeholders that are the same for all workers."""

    @cache  # in a large job, all hosts together are long
    def value(word: str) -> str | None:
        name, _, port = word.partition(":")
        if name not in ("hosts", "hosts_json"):
            return meeting.ids.get(VARIABLES.get(word, "")) or meeting.ports.get(word)
        hosts = [*_hosts(plan, meeting.sources, port)]
        return json.dumps(hosts) if name == "hosts_json" else ",".join(hosts)

    return value


def _hosts(plan: LaunchPlan, sources: Sequence[str | None], port: str) -> Iterator[str]:
    """Yield the address of each node, or host:port of each rank: those on a host count up from `port`."""
    ports: defaultdict[str, Iterator[int]] = defaultdict(lambda: count(int(port)))
    for node, source in zip(plan.nodes, sources, strict=True):
        named = plan.spec.pool[node.node].address if node.node_rank else plan.master_addr
        host = named or source or node.label
        shown = f"[{host}]" if ":" in host else host
        yield from [f"{shown}:{next(ports[host])}" for _ in node.ranks] if port else [host]


def _filled(worker: WorkerPlan, first: int, shared: Values) -> WorkerPlan:
    """Fill in the placeholders in arguments, which begin at `first`, and in variables not inherited."""

    def value(word: str) -> str | None:
        return worker.contract.get(VARIABLES.get(word, "")) or shared(word)

    args = (fill(word, value) for word in worker.argv[first:])
    env = {
        name: each if each.inherited else each._replace(text=fill(each.text, value, every=False))
        for name, each in worker.env.items()
    }
    return worker._replace(argv=(*worker.argv[:first], *args), env=env)


# Workers


def _worker(
    plan: LaunchPlan, node: NodePlan, local_rank: int, meeting: contract.Rendezvous, interface: str | None
) -> WorkerPlan:
    place = node.place or TaskPlace(local_rank, node.procs, node.node_rank, plan.group_world_size)
    rank = node.first_rank + local_rank
    role = node.program.role
    its_role = (role, node.first_of_role + local_rank, plan.roles.get(role, plan.world_size))
    position = contract.Position(rank, place.local_rank, place.local_size, place.node_rank, *its_role)
    shared = contract.shared_environment(meeting, plan.world_size, place.node_count)
    own = contract.own_environment(position, plan.spec.placement.one_device)
    return WorkerPlan(
        rank=rank,
        local_rank=local_rank,
        argv=_argv(node),
        contract=shared | own,
        env=node.program.env,
        defaults=contract.defaults(place.local_size, interface, plan.backend),
        cwd=node.program.workdir,
        paths=_paths(node.program),
    )


def _torch_agent(
    plan: LaunchPlan, node: NodePlan, meeting: contract.Rendezvous, interface: str | None, source: str | None
) -> WorkerPlan:
    from distlaunch.plan import other_launchers  # few jobs use them

    spec, ranks = plan.spec, node.torch_ranks
    size = (len(plan.nodes), ranks)
    launcher = (node.python, *other_launchers.agent_words(spec, node.program, size, meeting, source))
    return WorkerPlan(
        rank=node.first_rank,
        local_rank=0,
        argv=(*launcher, program_word(node), *node.program.arguments),
        contract={"DISTLAUNCH_BACKEND": meeting.backend},  # torch sets the others
        env=node.program.env,
        defaults=contract.defaults(ranks, interface, plan.backend),
        cwd=node.program.workdir,
        paths=(0, len(launcher)) if node.program.placed else (0,),
        temporary=other_launchers.TEMPORARY,
    )


def common(maps: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """Return the entries that all of `maps`, which have the same keys, have in common."""
    first, *others = maps
    return {name: value for name, value in first.items() if all(other[name] == value for other in others)}


def _argv(node: NodePlan) -> tuple[str, ...]:
    return (*node.program.before(node.python), program_word(node), *node.program.arguments)


def program_word(node: NodePlan) -> str:
    """Return the script, module or command as started on a node."""
    word = node.program.words[0]
    return path_in(node.program.workdir, word) if node.program.placed else word


def _paths(program: Program) -> tuple[int, ...]:
    if program.kind == "command":
        return (0,) if program.placed else ()
    own = program.kind == "module" or program.words[0].startswith("-")  # python -c: no file
    return (0,) if own else (0, 2)
