"""The second engine: torch's elastic agents, one on each node, rank and start the workers themselves."""

from collections.abc import Mapping

from distlaunch import contract
from distlaunch.job.placeholders import fill
from distlaunch.job.spec import FOREVER_S, JobSpec
from distlaunch.plan import layout
from distlaunch.plan.layout import Facts, LaunchPlan, NodePlan, WorkerPlan

TORCHRUN = ("-u", "-m", "torch.distributed.run")


def make_plan(spec: JobSpec, facts: Mapping[int, Facts], master_address: str | None = None) -> LaunchPlan:
    """The plan of torch agents on the nodes in `facts`, of which the first hosts the store of c10d.

    As `layout.make_plan`. Others may come later: see `with_node`.
    """
    ranked = layout.make_plan(spec, facts, master_address)
    return ranked._replace(nodes=tuple(_agent_on(node, i) for i, node in enumerate(ranked.nodes)))


def with_node(plan: LaunchPlan, index: int, fact: Facts) -> LaunchPlan:
    """`plan` with a torch agent on the pool's node `index`, as it is now; the others keep their numbers.

    Raises `JobError` when the node can't take part.
    """
    before = plan.part_of(index)
    number = before.node_rank if before else layout.NodeRank(len(plan.nodes))
    ranked = layout.node_plan(plan.spec, fact, index, number, number)
    if plan.backend == "nccl":
        layout.choose_backend(plan.spec._replace(backend="nccl"), [ranked])
    nodes = (*plan.nodes[:number], _agent_on(ranked, number), *plan.nodes[number + 1 :])
    return plan._replace(nodes=nodes, world_size=sum(node.agent_procs for node in nodes))


def _agent_on(node: NodePlan, number: int) -> NodePlan:
    return node._replace(first_rank=number, procs=1, agent_procs=node.procs)


def workers(
    plan: LaunchPlan,
    node: NodePlan,
    meeting: contract.Rendezvous,
    interface: str | None = None,
    source: str | None = None,
) -> list[WorkerPlan]:
    """The torch agent of one node; `source` is the node's own address, by which the others reach it."""
    program, word = plan.spec.program, layout.program_word(plan.spec, node)
    arguments = [fill(argument, {}) for argument in (*program.words[1:], *plan.spec.args)]
    flags = (*TORCHRUN, *torch_flags(plan, node, meeting, source), "--")
    agent = WorkerPlan(
        rank=node.first_rank,
        local_rank=0,
        # After "--", argparse takes no argument of the script for an abbreviated flag of its own.
        argv=(node.python, *flags, word, *arguments),
        contract=contract.agent_environment(meeting),
        env=node.env,
        defaults=_defaults(node, interface),
        cwd=node.workdir,
        paths=(0, 1 + len(flags)) if program.placed else (0,),
    )
    return [agent]


def _defaults(node: NodePlan, interface: str | None) -> dict[str, str]:
    # No flight recorder: its dumps are collected by rank, and torch gives out the ranks.
    given = contract.defaults(node.agent_procs, interface, "gloo")
    # torch 2.13 keeps one store for the workers of all rounds: those of the second find the keys of the
    # first, and gloo dials ports that are gone. With this each round has a store of its own.
    return given | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torch_flags(
    plan: LaunchPlan, node: NodePlan, meeting: contract.Rendezvous, source: str | None = None
) -> list[str]:
    """The flags of torch.distributed.run on one node, before the program."""
    spec = plan.spec
    most, fewest = len(spec.nodes), spec.fewest
    return [
        f"--nnodes={most}" if fewest == most else f"--nnodes={fewest}:{most}",
        f"--nproc-per-node={node.agent_procs}",
        f"--rdzv-backend={spec.ranking}",
        f"--rdzv-endpoint={_endpoint(plan, node, meeting, source)}",
        f"--rdzv-id={meeting.run_id}",
        f"--rdzv-conf={_conf(spec, node)}",
        f"--max-restarts={meeting.max_restarts}",
        *workers_flags(spec),
        # torch would use the host's own name, which the others, or the host itself, may not resolve.
        *([f"--local-addr={source}"] if source else []),
        *program_flag(spec),
    ]


def workers_flags(spec: JobSpec) -> list[str]:
    """torchrun's flags for what all workers have otherwise than by default."""
    role = [f"--role={spec.role}"] if spec.role != "default" else []
    return [*role, *(["--virtual-local-rank"] if spec.one_device else [])]


def program_flag(spec: JobSpec) -> list[str]:
    """torchrun's flag for a program that is not a script."""
    return {"module": ["--module"], "command": ["--no-python"], "script": []}[spec.program.kind]


def _endpoint(plan: LaunchPlan, node: NodePlan, meeting: contract.Rendezvous, source: str | None) -> str:
    # The host of the store connects to it too, and may not know the name that the others have for it.
    host = (source if _hosts_store(plan.spec, node) else None) or meeting.master_addr
    return f"[{host}]:{meeting.master_port}" if ":" in host else f"{host}:{meeting.master_port}"


def _hosts_store(spec: JobSpec, node: NodePlan) -> bool:
    return spec.ranking == "c10d" and node.node_rank == 0


def _conf(spec: JobSpec, node: NodePlan) -> str:
    join_s = FOREVER_S if spec.timeouts.join_s is None else spec.timeouts.join_s
    settings = {"join_timeout": f"{max(1, round(join_s))}", **spec.rendezvous_conf}
    if spec.ranking == "c10d":
        settings["is_host"] = str(_hosts_store(spec, node)).lower()
    return ",".join(f"{name}={value}" for name, value in settings.items())
