"""The workers of the current attempt, and the command that starts those of a node."""

import signal

from distlaunch.agent import messages
from distlaunch.plan.placement import NodePlan, NodeRank
from distlaunch.plan.workers import WorkerPlan, binding_of, ids_of, meeting_of, worker_specs, workers
from distlaunch.supervisor.nodes import Route, route_of
from distlaunch.supervisor.state import State


def running_workers(state: State, run_id: str) -> dict[NodeRank, list[WorkerPlan]]:
    """Return the workers of each node as they are started in the current attempt."""
    assert state.plan is not None
    return {part.node_rank: _workers_of(state, part, run_id) for part in state.plan.nodes}


def chosen_interfaces(state: State) -> dict[NodeRank, dict[str, str]]:
    """Return the name of the interface that the workers of each node use by default, and why, if known."""
    assert state.plan is not None
    ways = {part.node_rank: (_way(state, part), part.node) for part in state.plan.nodes}
    return {
        rank: {"name": way.interface, "why": _why(state, way, node)}
        for rank, (way, node) in ways.items()
        if way.interface
    }


def _why(state: State, way: Route, node: int) -> str:
    assert state.plan is not None
    if node == state.members[0] and state.reached_by in way.ends:
        return f"the other nodes reach MASTER_ADDR at {state.reached_by}, which it has"
    return f"the route from {way.source} to MASTER_ADDR {state.plan.master_addr} uses it"


def _workers_of(state: State, part: NodePlan, run_id: str) -> list[WorkerPlan]:
    assert state.plan is not None
    sources = [_way(state, each).source for each in state.plan.nodes] if state.spec.placeholders else ()
    meeting = meeting_of(state.plan, run_id, state.ports, state.restart_count, sources)
    way = _way(state, part)
    return workers(state.plan, part, meeting, way.interface, way.source)


def _way(state: State, part: NodePlan) -> Route:
    return route_of(state.nodes[part.node]) or Route()


def start_command(state: State, node: int, run_id: str) -> messages.StartWorkers:
    """Return the command that starts the workers of a node in the current attempt."""
    assert state.plan is not None
    assert state.port is not None
    part = state.plan.part_of(node)
    assert part is not None
    planned = _workers_of(state, part, run_id)
    shared, specs = worker_specs(state.plan, part, planned, state.attempt)
    times = state.spec.limits
    return messages.StartWorkers(
        attempt=state.attempt,
        run_id=run_id,
        grace_s=times.stop_s,
        lease_s=times.lease_s,
        stall_s=times.stall_s,
        watch_port=state.port,
        hosts_store=part.node_rank == 0,
        warning=signal.Signals[f"SIG{times.on_warning}"],
        flight=state.plan.backend == "nccl",
        temporary=planned[0].temporary,
        env=shared | ids_of(state.spec, run_id),
        binding=binding_of(state.spec, part),
        workers=specs,
    )
