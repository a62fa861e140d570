"""A plan as plain data, for JSON."""

from collections.abc import Mapping
from typing import Any

from distlaunch.job.spec import Binding, Env
from distlaunch.plan.layout import LaunchPlan, NodePlan, NodeRank, WorkerPlan


def plan_document(plan: LaunchPlan, nodes: dict[NodeRank, list[WorkerPlan]]) -> dict[str, Any]:
    """The plan; `nodes` has each node's workers.

    Inherited values are null: they may be secrets. So is a port that is picked at the start.
    """
    if not plan.spec.engine.gives_ranks:
        return _torch_agents_document(plan, nodes)
    return {
        "name": plan.spec.name,
        "world_size": plan.world_size,
        "backend": plan.backend,
        "master_addr": plan.master_addr,
        "master_port": plan.master_port,
        **_binding(plan.spec.binding),
        "nodes": [_node(plan, node, nodes[node.node_rank]) for node in plan.nodes],
    }


def _binding(binding: Binding | None) -> dict[str, Any]:
    """As the job file has it."""
    wish = binding and (list(binding.cpus) or binding.how)
    return {"numa_binding": None, "cpu_binding": None} | ({binding.key: wish} if binding else {})


def _torch_agents_document(plan: LaunchPlan, nodes: Mapping[NodeRank, list[WorkerPlan]]) -> dict[str, Any]:
    """As above, but each node has a torch agent, which starts `procs` ranks; the world may be smaller."""
    return {
        "name": plan.spec.name,
        "rendezvous": {
            "backend": plan.spec.ranking,
            "host": plan.master_addr,
            "port": plan.master_port,
            "min_nodes": plan.spec.fewest,
            "max_nodes": len(plan.spec.nodes),
        },
        "world_size": plan.world_size,
        "backend": plan.backend,
        "nodes": [_agent(node, *nodes[node.node_rank]) for node in plan.nodes],
    }


def _agent(node: NodePlan, agent: WorkerPlan) -> dict[str, Any]:
    return {**_place(node), "procs": node.agent_procs, "agent": _process(agent)}


def _node(plan: LaunchPlan, node: NodePlan, workers: list[WorkerPlan]) -> dict[str, Any]:
    return {
        "node_rank": node.node_rank,
        **_place(node),
        "workers": [_worker(plan, node, worker) for worker in workers],
    }


def _place(node: NodePlan) -> dict[str, Any]:
    return {
        "name": node.label,
        "transport": node.reach.name,
        "gpus": node.gpus,
        "python": node.python,
        "workdir": node.workdir,
    }


def _worker(plan: LaunchPlan, node: NodePlan, worker: WorkerPlan) -> dict[str, Any]:
    process = _process(worker)
    if plan.master_port is None:
        process["env"]["MASTER_PORT"] = None
    return {
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "device": node.device(worker.local_rank),
        **process,
    }


def _process(worker: WorkerPlan) -> dict[str, Any]:
    return {
        "argv": list(worker.argv),
        "env": {**_env(worker.env), **worker.contract},
        "defaults": dict(worker.defaults),
    }


def _env(env: Env) -> dict[str, str | None]:
    return {name: None if value.inherited else value.text for name, value in env.items()}
