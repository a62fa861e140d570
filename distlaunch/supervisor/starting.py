"""The workers of the current attempt, and the command that starts those of a node."""

import signal

from distlaunch.agent import messages
from distlaunch.plan.placement import NodePlan, NodeRank
from distlaunch.plan.workers import WorkerPlan, binding_of, ids_of, meeting_of, worker_specs, workers
from distlaunch.supervisor.nodes import Route, route_of
from distlaunch.supervisor.state import State


def running_workers(state: State) -> dict[NodeRank, list[WorkerPlan]]:
    """Return the workers of each node as they are started in the current attempt."""
    return {part.node_rank: _workers_of(state, part) for part in state.planned.nodes}


def chosen_interfaces(state: State) -> dict[NodeRank, dict[str, str]]:
    """Return the name of the interface that the workers of each node use by default, and why, if known.

    Recorded in plan.json.
    """
    ways = {part.node_rank: (_way(state, part), part.node) for part in state.planned.nodes}
    return {
        rank: {"name": way.interface, "why": _why(state, way, node)}
        for rank, (way, node) in ways.items()
        if way.interface
    }


def _why(state: State, way: Route, node: int) -> str:
    if node == state.members[0] and state.reached_by in way.ends:
        return f"the other nodes reach MASTER_ADDR at {state.reached_by}, which it has"
    return f"the route from {way.source} to MASTER_ADDR {state.planned.master_addr} uses it"


def _workers_of(state: State, part: NodePlan) -> list[WorkerPlan]:
    plan, way = state.planned, _way(state, part)
    sources = [_way(state, each).source for each in plan.nodes] if state.spec.placeholders else ()
    meeting = meeting_of(plan, state.run_id, state.ports, state.restart_count, sources)
    return workers(plan, part, meeting, way.interface, way.source)


def _way(state: State, part: NodePlan) -> Route:
    return route_of(state.nodes[part.node]) or Route()


def start_command(state: State, node: int) -> messages.StartWorkers:
    """Return the command that starts the workers of a node in the current attempt."""
    plan, times = state.planned, state.spec.limits
    part = plan.nodes[plan.members.index(node)]
    planned = _workers_of(state, part)
    shared, specs = worker_specs(plan, part, planned, state.attempt)
    return messages.StartWorkers(
        attempt=state.attempt,
        run_id=state.run_id,
        grace_s=times.stop_s,
        lease_s=times.lease_s,
        stall_s=times.stall_s,
        watch_port=state.ports[0],
        hosts_store=part.node_rank == 0,
        warning=signal.Signals[f"SIG{times.on_warning}"],
        flight=plan.backend == "nccl",
        temporary=planned[0].temporary,
        env=shared | ids_of(state.spec, state.run_id),
        binding=binding_of(state.spec, part),
        workers=specs,
    )
