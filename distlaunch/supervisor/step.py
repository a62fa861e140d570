"""The policy of a job, one event at a time: this is where every event finds its handler."""

from collections.abc import Callable, Mapping
from typing import Any

from distlaunch.errors import Exit
from distlaunch.job.spec import JobSpec
from distlaunch.supervisor import (
    blame,
    connecting,
    ending,
    joining,
    preparing,
    restarting,
    running,
    stalling,
)
from distlaunch.supervisor.actions import Connect
from distlaunch.supervisor.events import (
    AddressesFound,
    AgentLeaving,
    AgentUp,
    Event,
    Interrupted,
    LinkEnded,
    OrphansKilled,
    OutputFlows,
    OutputLost,
    PeerFailed,
    PortHeld,
    PortRefused,
    PortUsurped,
    RanksJoined,
    RanksLag,
    RanksStalled,
    Reaped,
    RouteFailed,
    RouteFound,
    StackDumped,
    Stuck,
    Swept,
    Ticked,
    WorkerExited,
    WorkerStarted,
    WorkerUnstarted,
)
from distlaunch.supervisor.state import Cause, NodePhase, NodeState, Phase, State, Step


def begin(spec: JobSpec, now: float, chance: float = 0.0) -> Step:
    """The first state of a job: all nodes are connected at once. `chance` is 0 to 1, another in each run."""
    node = NodeState(answer_by=now + spec.timeouts.connect_s)
    state = State(spec=spec, nodes=(node,) * len(spec.pool), began_at=now, chance=chance)
    return state, tuple(Connect(node) for node in range(len(spec.pool)))


def step(state: State, event: Event, now: float) -> Step:
    """The next state and what to do, after `event` at monotonic time `now` (seconds)."""
    kind = type(event)
    if state.phase not in _PHASES.get(kind, _ALIVE):
        return state, ()
    return _HANDLERS[kind](event, state, now)


def _on_link_ended(event: LinkEnded, state: State, now: float) -> Step:
    node = state.nodes[event.node]
    if node.phase.over or node.phase is NodePhase.RETRYING:
        return state, ()
    if node.phase is NodePhase.CONNECTING:
        return connecting.not_connected(state, event.node, event.failure, now)
    if node.phase is NodePhase.SWEPT:
        return ending.all_closed(state.with_node(event.node, phase=NodePhase.CLOSED), now)
    return running.node_lost(state, event.node, event.failure, now)


def _on_swept(event: Swept, state: State, now: float) -> Step:
    state, actions = ending.on_swept(event, state, now)
    state, more = restarting.advance(state, now)
    return state, (*actions, *more)


def _on_ticked(event: Ticked, state: State, now: float) -> Step:
    if state.job_overdue(now):
        text = f"the job's time limit of {state.spec.timeouts.job_s:g} s has passed"
        return ending.end_job(state, Cause(text, Exit.TIMEOUT, now), now)
    for due, at in zip(_WATCHES, state.watch.times, strict=True):
        if at is not None and now >= at:
            return due(state, now)
    if state.deadline is not None and now >= state.deadline:
        return _phase_overdue(state, now)
    state, actions = connecting.connects_due(state, now)
    state, more = restarting.advance(state, now)
    return state, (*actions, *more)


def _phase_overdue(state: State, now: float) -> Step:
    if state.phase is Phase.PREPARING:
        return preparing.prepare_overdue(state, now)
    if state.phase is Phase.RESTARTING:
        return restarting.clearing_overdue(state, now)
    return ending.stop_overdue(state, now)


_WATCHES = (
    blame.verdict_due,
    joining.join_overdue,
    joining.join_notice_due,
    stalling.stall_notice_due,
    stalling.stall_act_due,
    ending.stop_notice_due,
)
"""What is done when each of `Watch.times` comes."""

_HANDLERS: Mapping[type, Callable[[Any, State, float], Step]] = {
    AgentLeaving: running.on_agent_leaving,
    AgentUp: connecting.on_agent_up,
    AddressesFound: connecting.on_addresses_found,
    LinkEnded: _on_link_ended,
    PortHeld: preparing.on_port_held,
    PortRefused: preparing.on_port_refused,
    PortUsurped: restarting.on_port_usurped,
    RouteFound: preparing.on_route_found,
    RouteFailed: restarting.on_route_failed,
    WorkerStarted: running.on_worker_started,
    WorkerUnstarted: running.on_worker_unstarted,
    WorkerExited: running.on_worker_exited,
    RanksJoined: joining.on_ranks_joined,
    RanksLag: joining.on_ranks_lag,
    RanksStalled: stalling.on_ranks_stalled,
    StackDumped: stalling.on_stack_dumped,
    Swept: _on_swept,
    Reaped: connecting.on_reaped,
    OrphansKilled: connecting.on_orphans_killed,
    OutputFlows: ending.on_output_flows,
    OutputLost: ending.on_output_lost,
    Stuck: ending.on_stuck,
    PeerFailed: running.on_peer_failed,
    Interrupted: ending.on_interrupted,
    Ticked: _on_ticked,
}

_ALIVE = frozenset(Phase) - {Phase.DONE}
_WITH_WORKERS = frozenset({Phase.RUNNING, Phase.RESTARTING, Phase.STOPPING})
_PHASES: Mapping[type, frozenset[Phase]] = {
    PortHeld: frozenset({Phase.PREPARING}),
    PortRefused: frozenset({Phase.PREPARING}),
    RouteFound: frozenset({Phase.PREPARING, Phase.RUNNING}),
    RouteFailed: frozenset({Phase.PREPARING, Phase.RUNNING}),
    WorkerStarted: _WITH_WORKERS,
    WorkerUnstarted: _WITH_WORKERS,
    WorkerExited: _WITH_WORKERS,
    RanksJoined: frozenset({Phase.RUNNING}),
    RanksLag: frozenset({Phase.RUNNING}),
    RanksStalled: frozenset({Phase.RUNNING}),
    PortUsurped: frozenset({Phase.RUNNING}),
}
"""When an event means something; a node that reports out of turn is not heard."""
