"""The workers of a plan: command line, environment and output of each rank, for agents and as JSON."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count, product
from types import MappingProxyType
from typing import Any, TypeVar

from distlaunch import contract
from distlaunch.agent import messages
from distlaunch.agent.frozen import Frozen
from distlaunch.job.spec import Env, JobSpec, Program, Std, TorchrunLogs
from distlaunch.job.text import VARIABLES, Values, fill, is_hidden, path_in, redacted
from distlaunch.plan.placement import DEFAULT_PORT, LaunchPlan, NodePlan, NodeRank
from distlaunch.transports.gathering import TaskPlace

T = TypeVar("T")


class WorkerPlan(Frozen):
    """One worker, ready to be started.

    `env` is the environment of the job. `contract` overrides `env`. `defaults` apply only to variables that
    aren't set on the node. `paths` contains the indices in `argv` of paths on the node. These paths and `cwd`
    may begin with ~. `temporary` lists variables to set to a directory on the node that is deleted after the
    run.
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


def ids_of(spec: JobSpec, run_id: str) -> dict[str, str]:
    """Return the variables with the IDs of a run and its job.

    A requeued job keeps its job ID, which lets experiment trackers resume.
    """
    job_id = spec.invocation.earlier.job_id if spec.invocation.earlier else run_id
    return {"DISTLAUNCH_RUN_ID": run_id, "DISTLAUNCH_JOB_ID": job_id}


def meeting_of(
    plan: LaunchPlan, run_id: str, ports: Sequence[int], restarts: int = 0, sources: Sequence[str | None] = ()
) -> contract.Rendezvous:
    """Return the values shared by the workers of one attempt.

    `ports` contains MASTER_PORT, followed by the additional ports. `sources` contains the source address of
    each node on its route to MASTER_ADDR, if a placeholder needs these addresses.
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
    """Return the workers of each node, using 29500 (torch's default) and up instead of free ports.

    For `dry-run` and the API, which start nothing.
    """
    source = "127.0.0.1" if plan.spec.one_machine else None
    port = plan.master_port or DEFAULT_PORT
    ports = range(port, port + 1 + len(plan.spec.port_names))
    meeting = meeting_of(plan, plan.spec.name, ports, sources=[source] * len(plan.nodes))
    return {node.node_rank: workers(plan, node, meeting, None, source) for node in plan.nodes}


def workers(
    plan: LaunchPlan,
    node: NodePlan,
    meeting: contract.Rendezvous,
    interface: str | None = None,
    source: str | None = None,
) -> list[WorkerPlan]:
    """Return the workers of one node for one attempt.

    `interface` is the network interface that leads to MASTER_ADDR. `source` is the node's address on it.
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

    @cache  # in a large job, the list of hosts is long
    def value(word: str) -> str | None:
        name, _, port = word.partition(":")
        if name not in ("hosts", "hosts_json"):
            return meeting.ids.get(VARIABLES.get(word, "")) or meeting.ports.get(word)
        hosts = [*_hosts(plan, meeting.sources, port)]
        return json.dumps(hosts) if name == "hosts_json" else ",".join(hosts)

    return value


def _hosts(plan: LaunchPlan, sources: Sequence[str | None], port: str) -> Iterator[str]:
    """Yield the address of each node, or, if `port` isn't empty, host:port of each rank.

    The ports of the ranks on a host count up from `port`."""
    ports: defaultdict[str, Iterator[int]] = defaultdict(lambda: count(int(port)))
    for node, source in zip(plan.nodes, sources, strict=True):
        named = plan.spec.pool[node.node].address if node.node_rank else plan.master_addr
        host = named or source or node.label
        shown = f"[{host}]" if ":" in host else host
        yield from [f"{shown}:{next(ports[host])}" for _ in node.ranks] if port else [host]


def _filled(worker: WorkerPlan, first: int, shared: Values) -> WorkerPlan:
    """Fill in the placeholders in arguments from index `first` and in variables that aren't inherited."""

    # With `one_device`, LOCAL_RANK is 0, but like torch, the placeholder tells the workers of a node apart.
    own = {"local_rank": worker.contract.get("CUDA_VISIBLE_DEVICES")}

    def value(word: str) -> str | None:
        return own.get(word) or worker.contract.get(VARIABLES.get(word, "")) or shared(word)

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
    """Return the worker of one rank. The position of a rank with its own launcher is set by the scheduler."""
    place = node.place or TaskPlace(local_rank, node.procs, node.node_rank, len(plan.nodes))
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
    """Return the only worker of a node on which a torch agent starts the ranks."""
    from distlaunch.plan import other_launchers  # few jobs use them

    spec, ranks = plan.spec, node.torch_ranks
    size = (len(plan.nodes), ranks)
    launcher = (node.python, *other_launchers.agent_words(spec, node.program, size, meeting, source))
    return WorkerPlan(
        rank=node.first_rank,
        local_rank=0,
        argv=(*launcher, program_word(node), *map(other_launchers.torch_literal, node.program.arguments)),
        contract={"DISTLAUNCH_BACKEND": meeting.backend},  # torch sets the others
        env=node.program.env,
        defaults=contract.defaults(ranks, interface, plan.backend),
        cwd=node.program.workdir,
        paths=(0, len(launcher)) if node.program.placed else (0,),
        temporary=other_launchers.TEMPORARY,
    )


def common(maps: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """Return the entries that are the same in all `maps`, which have the same keys."""
    first, *others = maps
    return {name: value for name, value in first.items() if all(other[name] == value for other in others)}


def _argv(node: NodePlan) -> tuple[str, ...]:
    return (*node.program.before(node.python), program_word(node), *node.program.arguments)


def program_word(node: NodePlan) -> str:
    """Return the script, module or command that a node starts."""
    word = node.program.words[0]
    return path_in(node.program.workdir, word) if node.program.placed else word


def _paths(program: Program) -> tuple[int, ...]:
    """Return the indices of the paths in `_argv`: the interpreter and, after its flag, the script."""
    if program.kind == "command":
        return (0,) if program.is_file else ()
    return (0, 2) if program.is_file else (0,)


# Where the output of each rank goes: the console, with or without a prefix, and a file

STREAMS = ("stdout", "stderr")


class Destination(Frozen):
    """The destination of one stream of one rank.

    If `prefix` is None, the bytes are shown unchanged. `file` is relative to the run directory."""

    shown: bool
    prefix: str | None
    file: str | None

    @property
    def direct(self) -> bool:
        """Return whether the output goes only to the console, unchanged."""
        return self.shown and self.prefix is None and self.file is None


def destinations(plan: LaunchPlan, attempt: int) -> dict[tuple[int, int], Destination]:
    """Return the destinations for an attempt with this plan, keyed by rank and stream (0 stdout, 1 stderr).

    Ranks on nodes whose own launchers show and keep the output are left out.
    """
    logs = plan.spec.logs
    ranges = {"all": range(plan.world_size), "rank0": range(1), "none": range(0)}
    shown = ranges[logs.console] if isinstance(logs.console, str) else logs.console
    found = {}
    for node in plan.nodes:
        for rank, stream in product(node.ranks, range(2)):
            if not logs.torchrun:
                file = _log_file(attempt, rank, stream)
                found[rank, stream] = Destination(rank in shown, f"[{node.label}:{rank}] ", file)
            elif node.logs is None:
                found[rank, stream] = _by_torchrun(logs.torchrun, plan, node, rank, stream, attempt)
    return found


def _log_file(attempt: int, rank: int, stream: int) -> str:
    """Return the path of a stream's file in the run directory. Only its numbers come from the job."""
    name = f"rank{rank}.{('out', 'err')[stream]}"
    return f"attempt{attempt}/{name}" if attempt else name


def _by_torchrun(
    logs: TorchrunLogs, plan: LaunchPlan, node: NodePlan, rank: int, stream: int, attempt: int
) -> Destination:
    """Apply torchrun's rules: redirect = file only; tee = both, with a prefix; neither = console only."""
    local_rank = rank - node.first_rank
    tee, redirected = (_has(std, local_rank, stream) for std in (logs.tee, logs.redirects))
    wanted = not logs.local_ranks or local_rank in logs.local_ranks
    file = f"attempt_{attempt}/{local_rank}/{STREAMS[stream]}.log" if tee or redirected else None
    prefix = _prefix(logs.prefix, plan.spec.program.role, local_rank, rank) if tee else None
    return Destination(wanted and (tee or not redirected), prefix, file)


def _has(std: Std, local_rank: int, stream: int) -> bool:
    """Return whether a torchrun setting (bits: 1 stdout, 2 stderr) applies to a stream of a rank."""
    chosen = std if isinstance(std, int) else std.get(local_rank, 0)
    return bool(chosen & (1, 2)[stream])


def _prefix(template: str, role: str, local_rank: int, rank: int) -> str:
    from string import Template  # only `distlaunch torchrun` needs it

    return Template(template).safe_substitute(role_name=role, local_rank=local_rank, rank=rank)


# Messages to agents


def worker_specs(
    plan: LaunchPlan, part: NodePlan, planned: Sequence[WorkerPlan], attempt: int
) -> tuple[dict[str, str], tuple[messages.WorkerSpec, ...]]:
    """Return the variables that a node's workers share, and the workers, as sent to the agent."""
    environments = [
        {**{name: value.text for name, value in worker.env.items()}, **worker.contract} for worker in planned
    ]
    shared, shares = common(environments), shared_descriptors(plan, part, attempt)
    specs = (
        messages.WorkerSpec(
            local_rank=worker.local_rank,
            argv=worker.argv,
            cwd=worker.cwd,
            paths=worker.paths,
            env=dict(sorted(env.items() - shared.items())),
            defaults=dict(worker.defaults),
            one_device="CUDA_VISIBLE_DEVICES" in worker.contract,
            shares=shares[worker.rank],
        )
        for worker, env in zip(planned, environments, strict=True)
    )
    return shared, tuple(specs)


def binding_of(spec: JobSpec, part: NodePlan) -> messages.Binding | None:
    """Return the CPU binding that the job requests for the workers of a node."""
    binding = spec.placement.binding
    return messages.Binding(binding.how, part.gpus, tuple(binding.cpus)) if binding else None


def shared_descriptors(plan: LaunchPlan, part: NodePlan, attempt: int) -> Mapping[int, tuple[int, ...]]:
    """Map each rank to the descriptors shared with the controller: none, 0 (stdin), or 0 and 1."""
    if plan.spec.stdin == "rank 0":
        return {rank: () if rank else (0,) for rank in part.ranks}
    if not plan.spec.invocation.shares_stdio or part.logs is not None:
        return dict.fromkeys(part.ranks, ())
    streams = destinations(plan, attempt)
    return {rank: (0, 1) if streams[rank, 0].direct else (0,) for rank in part.ranks}


# Plans as plain data, for JSON


def plan_document(
    plan: LaunchPlan,
    nodes: dict[NodeRank, list[WorkerPlan]],
    interfaces: Mapping[NodeRank, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the plan as a JSON object, for plan.json and `dry-run`. `nodes` contains each node's workers.

    `interfaces` contains the network interface of each node, and the reason for choosing it, once known.

    Inherited values, values of variables whose names suggest a secret, and a port that is picked at the start
    are null.
    """
    binding = plan.spec.placement.binding
    bound = {binding.key: list(binding.cpus) or binding.how} if binding else {}  # as in the job file
    return {
        "name": plan.spec.name,
        "world_size": plan.world_size,
        "backend": plan.backend,
        "master_addr": plan.master_addr,
        "master_port": plan.master_port,
        "numa_binding": None,
        "cpu_binding": None,
        **bound,
        "code": plan.spec.tree and plan.spec.tree.document(),
        "nodes": [
            {**_node_document(plan, node, nodes[node.node_rank]), "interface": interfaces.get(node.node_rank)}
            for node in plan.nodes
        ],
    }


def _node_document(plan: LaunchPlan, node: NodePlan, workers: list[WorkerPlan]) -> dict[str, Any]:
    return {
        "node_rank": node.node_rank,
        "name": node.label,
        "transport": node.reach.name,
        "gpus": node.gpus,
        "python": node.python,
        "workdir": node.program.workdir,
        "workers": [_worker_document(plan, node, worker) for worker in workers],
    }


def _worker_document(plan: LaunchPlan, node: NodePlan, worker: WorkerPlan) -> dict[str, Any]:
    """Return a worker. Its MASTER_PORT is null if the port is picked at the start."""
    unknown = {"MASTER_PORT": None} if plan.master_port is None and "MASTER_PORT" in worker.contract else {}
    return {
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "device": node.device(worker.local_rank),
        "argv": redacted(worker.argv),
        "env": {**_shown_env(worker.env), **worker.contract, **unknown},
        "defaults": dict(worker.defaults),
    }


def _shown_env(env: Env) -> dict[str, str | None]:
    hidden = {name for name, value in env.items() if value.inherited or is_hidden(name, value.text)}
    return {name: None if name in hidden else value.text for name, value in env.items()}
