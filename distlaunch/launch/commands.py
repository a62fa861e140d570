"""The messages that tell an agent what to do: from the plan's frozen data to the wire's form."""

from distlaunch.agent.wire import Message
from distlaunch.contract import Rendezvous
from distlaunch.plan.layout import DEFAULT_PORT, LaunchPlan, WorkerPlan, workers
from distlaunch.supervisor.actions import Close, FindRoute, HoldPort, StartWorkers
from distlaunch.supervisor.state import State

HEARTBEAT_S = 5.0
LEASE_S = 30.0


def meeting_of(plan: LaunchPlan, run_id: str, port: int, generation: int = 0) -> Rendezvous:
    """What the workers of one generation share."""
    return Rendezvous(
        master_addr=plan.master_addr,
        master_port=port,
        run_id=plan.spec.rendezvous_id or run_id,
        backend=plan.backend,
        restart_count=generation,
    )


def planned_workers(plan: LaunchPlan) -> dict[int, list[WorkerPlan]]:
    """Node index → its workers, with the port that `run` would pick shown as torch's default."""
    meeting = meeting_of(plan, plan.spec.name, plan.master_port or DEFAULT_PORT)
    interface = "lo" if plan.spec.one_machine else None
    return {node.node_rank: workers(plan, node, meeting, interface) for node in plan.nodes}


def message_for(action: HoldPort | FindRoute | StartWorkers | Close, state: State, run_id: str) -> Message:
    """The command that has an agent do what the supervisor wants."""
    match action:
        case HoldPort():
            return {"op": "hold", "port": action.port}
        case FindRoute():
            return {"op": "route", "address": action.address}
        case StartWorkers():
            return _start_message(state, action.node, run_id)
        case Close():
            return {"op": "close", "grace_s": action.grace_s}


def _start_message(state: State, node: int, run_id: str) -> Message:
    assert state.plan is not None
    assert state.port is not None
    meeting = meeting_of(state.plan, run_id, state.port, state.generation)
    planned = workers(state.plan, state.plan.nodes[node], meeting, state.nodes[node].interface)
    return {
        "op": "start",
        "generation": state.generation,
        "grace_s": state.spec.timeouts.stop_s,
        "lease_s": LEASE_S,
        "watch_port": state.port,
        "env": {"DISTLAUNCH_RUN_ID": run_id},
        "workers": [_worker(worker) for worker in planned],
    }


def _worker(worker: WorkerPlan) -> Message:
    return {
        "local_rank": worker.local_rank,
        "argv": worker.argv,
        "cwd": worker.cwd,
        "env": {**{name: value.text for name, value in worker.env.items()}, **worker.contract},
        "defaults": worker.defaults,
    }
