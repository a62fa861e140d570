"""Which engine a job has: ranks of our own (`layout`), or torch's elastic agents (`torch_agents`)."""

from collections.abc import Mapping

from distlaunch.contract import HANDLED_SIGNALS, Rendezvous
from distlaunch.job.spec import JobSpec
from distlaunch.plan import layout
from distlaunch.plan.layout import DEFAULT_PORT, Facts, LaunchPlan, NodePlan, NodeRank, WorkerPlan


def make_plan(spec: JobSpec, facts: Mapping[int, Facts], master_address: str | None = None) -> LaunchPlan:
    """As `layout.make_plan`, with the engine that the job asks for."""
    if spec.engine.gives_ranks:
        return layout.make_plan(spec, facts, master_address)
    from distlaunch.plan import torch_agents  # few jobs have them

    return torch_agents.make_plan(spec, facts, master_address)


def workers(
    plan: LaunchPlan,
    node: NodePlan,
    meeting: Rendezvous,
    interface: str | None = None,
    source: str | None = None,
) -> list[WorkerPlan]:
    """What is started on one node; `source` is the node's own address as the others reach it."""
    if plan.spec.engine.gives_ranks:
        return layout.workers(plan, node, meeting, interface)
    from distlaunch.plan import torch_agents

    return torch_agents.workers(plan, node, meeting, interface, source)


def meeting_of(plan: LaunchPlan, run_id: str, port: int, restart_count: int = 0) -> Rendezvous:
    """What the workers of one generation share."""
    return Rendezvous(
        master_addr=plan.master_addr,
        master_port=port,
        run_id=plan.spec.rendezvous_id or run_id,
        backend=plan.backend,
        restart_count=restart_count,
        max_restarts=plan.spec.restarts_before + plan.spec.restarts.most,
        role=plan.spec.role,
        signals=",".join(plan.spec.invocation.signals) or HANDLED_SIGNALS,
    )


def planned_workers(plan: LaunchPlan) -> dict[NodeRank, list[WorkerPlan]]:
    """Each node's workers, with the port that `run` would pick shown as torch's default."""
    meeting = meeting_of(plan, plan.spec.name, plan.master_port or DEFAULT_PORT)
    way = ("lo", "127.0.0.1") if plan.spec.one_machine else (None, None)
    return {node.node_rank: workers(plan, node, meeting, *way) for node in plan.nodes}
