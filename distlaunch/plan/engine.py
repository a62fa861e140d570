"""Which engine a job has: ranks of our own (`layout`), or torch's elastic agents (`elastic`)."""

from collections.abc import Mapping

from distlaunch import contract
from distlaunch.job.spec import JobSpec
from distlaunch.plan import layout
from distlaunch.plan import torch_agents as elastic
from distlaunch.plan.layout import Facts, LaunchPlan, NodePlan, WorkerPlan


def make_plan(spec: JobSpec, facts: Mapping[int, Facts], master_address: str | None = None) -> LaunchPlan:
    """As `layout.make_plan`, with the engine that the job asks for."""
    make = layout.make_plan if spec.engine.gives_ranks else elastic.make_plan
    return make(spec, facts, master_address)


def workers(
    plan: LaunchPlan,
    node: NodePlan,
    meeting: contract.Rendezvous,
    interface: str | None = None,
    source: str | None = None,
) -> list[WorkerPlan]:
    """What is started on one node; `source` is the node's own address as the others reach it."""
    if plan.spec.engine.gives_ranks:
        return layout.workers(plan, node, meeting, interface)
    return elastic.workers(plan, node, meeting, interface, source)
