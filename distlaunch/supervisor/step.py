"""The policy of a job, one event at a time: this is where every event finds its handler."""

from collections.abc import Callable, Mapping
from typing import Any

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
    TimerDue,
    WorkerExited,
    WorkerStarted,
    WorkerUnstarted,
)
from distlaunch.supervisor.nodes import Connecting, End, Leaving, Reaping, Up
from distlaunch.supervisor.state import Phase, State, Step
from distlaunch.supervisor.timers import Alarm, Timer


def begin(spec: JobSpec, now: float, chance: float = 0.0) -> Step:
    """The first state of a job: all nodes are connected at once. `chance` is 0 to 1, another in each run."""
    pool = range(len(spec.pool))
    timers = {Alarm(Timer.ANSWER, node): now + spec.timeouts.connect_s for node in pool}
    if spec.timeouts.job_s is not None:
        timers[Alarm(Timer.JOB)] = now + spec.timeouts.job_s
    state = State(spec=spec, nodes=(Connecting(),) * len(pool), began_at=now, chance=chance, timers=timers)
    return state, tuple(map(Connect, pool))


def step(state: State, event: Event, now: float) -> Step:
    """The next state and what to do, after `event` at monotonic time `now` (seconds)."""
    kind = type(event)
    if state.phase not in _PHASES.get(kind, _ALIVE):
        return state, ()
    return _HANDLERS[kind](event, state, now)


def _on_link_ended(event: LinkEnded, state: State, now: float) -> Step:
    match state.nodes[event.node]:
        case Connecting() as node:
            return connecting.not_connected(state, event.node, node, event.failure, now)
        case End.CLEAN:
            return ending.all_closed(state.with_node(event.node, End.CLOSED), now)
        case Up() | Reaping() | Leaving() as node:
            return running.node_lost(state, event.node, node, event.failure, now)
        case _:
            return state, ()


def _on_swept(event: Swept, state: State, now: float) -> Step:
    state, actions = ending.on_swept(event, state, now)
    state, more = restarting.advance(state, now)
    return state, (*actions, *more)


def _on_timer_due(event: TimerDue, state: State, now: float) -> Step:
    at = state.due_at(*event)
    if at is None or now < at:
        return state, ()
    state = state.without_timers(event.timer, node=event.node)
    if event.node is not None:
        return _DUE_ON_A_NODE[event.timer](state, event.node, now)
    return _DUE[event.timer](state, now)


_DUE: Mapping[Timer, Callable[[State, float], Step]] = {
    Timer.JOB: ending.job_overdue,
    Timer.VERDICT: blame.verdict_due,
    Timer.JOIN: joining.join_overdue,
    Timer.JOIN_NOTICE: joining.join_notice_due,
    Timer.STALL_NOTICE: stalling.stall_notice_due,
    Timer.STALL_ACT: stalling.stall_act_due,
    Timer.STOP_NOTICE: ending.stop_notice_due,
    Timer.PREPARE: preparing.prepare_overdue,
    Timer.CLEAR: restarting.clearing_overdue,
    Timer.CLOSE: ending.close_overdue,
    Timer.BACKOFF: restarting.advance,
    Timer.REJOIN: restarting.advance,
}
"""What is done when a timer of the job comes due."""

_DUE_ON_A_NODE: Mapping[Timer, Callable[[State, int, float], Step]] = {
    Timer.ANSWER: connecting.answer_overdue,
    Timer.RETRY: connecting.retry_due,
    Timer.FENCE: restarting.fence_due,
}
"""What is done when a timer of a node comes due."""

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
    TimerDue: _on_timer_due,
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
