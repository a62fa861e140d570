"""Plans as plain data, for JSON."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from distlaunch.job.spec import Env
from distlaunch.job.text import is_hidden, redacted
from distlaunch.plan.placement import LaunchPlan, NodePlan, NodeRank
from distlaunch.plan.workers import WorkerPlan


def plan_document(
    plan: LaunchPlan,
    nodes: dict[NodeRank, list[WorkerPlan]],
    interfaces: Mapping[NodeRank, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the plan as a JSON object, for plan.json and `dry-run`. `nodes` contains each node's workers.

    `interfaces` are the network interfaces of the nodes, and why they were chosen, once that is known.

    Inherited values are null, as are values of variables whose names suggest a secret, and a port that is
    picked at the start.
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
            {**_node(plan, node, nodes[node.node_rank]), "interface": interfaces.get(node.node_rank)}
            for node in plan.nodes
        ],
    }


def _node(plan: LaunchPlan, node: NodePlan, workers: list[WorkerPlan]) -> dict[str, Any]:
    return {
        "node_rank": node.node_rank,
        "name": node.label,
        "transport": node.reach.name,
        "gpus": node.gpus,
        "python": node.python,
        "workdir": node.program.workdir,
        "workers": [_worker(plan, node, worker) for worker in workers],
    }


def _worker(plan: LaunchPlan, node: NodePlan, worker: WorkerPlan) -> dict[str, Any]:
    """Return a worker. Its MASTER_PORT is null if the port is picked at the start."""
    unknown = {"MASTER_PORT": None} if plan.master_port is None and "MASTER_PORT" in worker.contract else {}
    return {
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "device": node.device(worker.local_rank),
        "argv": redacted(worker.argv),
        "env": {**_env(worker.env), **worker.contract, **unknown},
        "defaults": dict(worker.defaults),
    }


def _env(env: Env) -> dict[str, str | None]:
    hidden = {name for name, value in env.items() if value.inherited or is_hidden(name, value.text)}
    return {name: None if name in hidden else value.text for name, value in env.items()}
