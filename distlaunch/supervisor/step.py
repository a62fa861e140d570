"""The policy of a job, one event at a time: a handler for each event, and a decider for each finding.

1. The handler of the event (`HANDLERS`) records the new facts. It may return findings for another part of
   the supervisor to decide on.
2. Each finding is passed to its decider (`DECIDERS`), which may return further findings.
3. The rules of the job's phase (`_RULES`) check whether the job can proceed. If it can, step 2 is repeated.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from distlaunch.agent import messages
from distlaunch.job.spec import JobSpec
from distlaunch.supervisor import (
    allocation_end,
    connecting,
    events,
    placing,
    preparing,
    ranks,
    restarting,
    root_cause,
    stopping,
)
from distlaunch.supervisor.actions import Action, Connect, ShowMessage
from distlaunch.supervisor.events import Event, Finding, LinkEnded, Step, TimerDue
from distlaunch.supervisor.nodes import Connecting, End, Leaving, Nodes, Reaping, Up
from distlaunch.supervisor.state import Alarm, Phase, State, Timer

Handler = Callable[[Any, State, float], Step]
Rule = Callable[[State, float], Step]


def begin(
    spec: JobSpec, now: float, chance: float = 0.0, run_id: str = ""
) -> tuple[State, tuple[Action, ...]]:
    """Return the first state of a job, and the actions that connect all nodes simultaneously.

    `chance` is a number from 0 to 1 that differs from run to run.
    """
    pool = range(len(spec.pool))
    timers = {Alarm(Timer.ANSWER, node): now + spec.limits.connect_s for node in pool}
    if spec.limits.job_s is not None:
        timers[Alarm(Timer.JOB)] = now + spec.limits.job_s
    nodes = Nodes([Connecting()] * len(pool))
    state = State(spec, nodes, began_at=now, chance=chance, run_id=run_id, timers=timers)
    # On one machine, the rendezvous address is known by now. Otherwise, it follows from `AddressesFound`.
    state, questions = preparing.foresee(state) if spec.one_machine else (state, ())
    return state, (*map(Connect, pool), *questions)


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """Return the next state, and the actions to take, after `event` at monotonic time `now` in seconds."""
    if state.phase is Phase.DONE:
        return state, ()
    state, found = HANDLERS[type(event)](event, state, now)
    todo: list[Action] = []
    while True:
        state = _decide_all(state, found, now, todo)
        before, (state, found) = state, _apply_rules(state, now)
        if state is before and not found:
            return state, tuple(todo)


def _decide_all(state: State, found: Iterable[Action | Finding], now: float, todo: list[Action]) -> State:
    """Decide on all findings, append the actions to `todo`, and return the resulting state."""
    pending = deque(found)
    while pending:
        each = pending.popleft()
        decide = DECIDERS.get(type(each))
        if decide is None:
            todo.append(each)  # type: ignore[arg-type]  # every finding has a decider
        else:
            state, more = decide(each, state, now)
            pending.extendleft(reversed(more))
    return state


def _apply_rules(state: State, now: float) -> Step:
    """Apply the first rule of the job's phase that changes the state or finds something.

    While the scheduler is being asked whether it is ending the job, nothing is started.
    """
    if state.asked and state.phase in _BEFORE_WORKERS:
        return state, ()
    for rule in _RULES.get(state.phase, ()):
        after, found = rule(state, now)
        if after is not state or found:
            return after, found
    return state, ()


def _on_link_ended(event: LinkEnded, state: State, now: float) -> Step:
    state, found = _without_link(event, state, now)
    state, told = allocation_end.name_lost_node(event, state, now)
    return state, (*found, *told)


def _without_link(event: LinkEnded, state: State, now: float) -> Step:
    """Handle the end of a link according to what the node was doing."""
    match state.nodes[event.node]:
        case Connecting() as node:
            return connecting.not_connected(state, event.node, node, event.failure, now)
        case End.CLEAN:
            why = (event.failure.words or "its connection ended early").splitlines()[-1]
            text = f"{state.label(event.node)}: {why}; its output may be incomplete"
            return state.with_node(event.node, End.CLOSED), (ShowMessage("warning", text),)
        case End.DELIVERED:
            return state.with_node(event.node, End.CLOSED), ()
        case Up() | Reaping() | Leaving() as node:
            return connecting.link_ended(state, event.node, node, event.failure, now)
        case _:
            return state, ()


def _on_timer_due(event: TimerDue, state: State, now: float) -> Step:
    """Call the function of a timer, unless the timer was cleared or moved in the meantime."""
    at = state.due_at(*event)
    if at is None or now < at:
        return state, ()
    state = state.without_timers(event.timer, node=event.node)
    due = _DUE.get(event.timer)
    return due(state, *(() if event.node is None else (event.node,)), now) if due else (state, ())


def _in(phases: Collection[Phase], handler: Handler) -> Handler:
    """Return a handler that ignores events outside these phases."""
    return lambda event, state, now: handler(event, state, now) if state.phase in phases else (state, ())


def _of_a_rank(handler: Callable[[Any, int, State, float], Step]) -> Handler:
    """Return a handler that passes on the rank that an event is about, and ignores unknown ranks."""

    def handle(event: Any, state: State, now: float) -> Step:
        rank = state.rank_of(event.node, event.local_rank)
        return (state, ()) if rank is None else handler(event, rank, state, now)

    return handle


_BEFORE_WORKERS = (Phase.CONNECTING, Phase.PREPARING)
_UNSTARTED = (*_BEFORE_WORKERS, Phase.RESTARTING)
_WITH_WORKERS = (Phase.RUNNING, Phase.RESTARTING, Phase.STOPPING)
HANDLERS: Mapping[type, Handler] = {
    messages.AgentLeaving: connecting.on_agent_leaving,
    events.AgentUp: connecting.on_agent_up,
    events.ImagePulled: connecting.on_image_pulled,
    events.Suspended: connecting.on_suspended,
    events.AllocationReported: allocation_end.on_allocation_reported,
    events.AddressesFound: preparing.on_addresses_found,
    events.LinkEnded: _on_link_ended,
    messages.WarningReceived: allocation_end.termination_warning,
    messages.PortHeld: _in(_BEFORE_WORKERS, preparing.on_port_held),
    messages.PortRefused: _in(_BEFORE_WORKERS, preparing.on_port_refused),
    messages.PortUsurped: _in({Phase.RUNNING}, preparing.on_port_usurped),
    messages.RouteFound: _in(_UNSTARTED, preparing.on_route_found),
    messages.RouteFailed: _in(_UNSTARTED, preparing.on_route_failed),
    messages.TreeLacks: placing.on_tree_lacks,
    messages.TreeProgress: placing.on_tree_progress,
    messages.TreePlaced: placing.on_tree_placed,
    messages.SetupPrinted: placing.on_setup_printed,
    messages.TreeRefused: placing.on_tree_refused,
    messages.TreeKept: placing.on_tree_kept,
    messages.WorkerStarted: _in(_WITH_WORKERS, _of_a_rank(ranks.on_worker_started)),
    messages.WorkerUnstarted: _in(_WITH_WORKERS, _of_a_rank(ranks.on_worker_unstarted)),
    messages.WorkerExited: _in(_WITH_WORKERS, _of_a_rank(ranks.on_worker_exited)),
    messages.RanksJoined: _in({Phase.RUNNING}, ranks.on_ranks_joined),
    messages.RanksLag: _in({Phase.RUNNING}, ranks.on_ranks_lag),
    messages.RanksStalled: _in({Phase.RUNNING}, ranks.on_ranks_stalled),
    messages.StackDumped: _of_a_rank(ranks.on_stack_dumped),
    messages.Swept: stopping.on_swept,
    messages.AllSent: stopping.on_all_sent,
    messages.Reaped: connecting.on_reaped,
    messages.OrphansKilled: connecting.on_orphans_killed,
    messages.GuardianResumed: connecting.on_guardian_resumed,
    events.OutputFlows: stopping.on_output_flows,
    messages.OutputLost: _of_a_rank(ranks.on_output_lost),
    messages.Stuck: stopping.on_stuck,
    events.NodeArrived: connecting.on_node_arrived,
    messages.Interrupted: stopping.on_interrupted,
    events.TimerDue: _on_timer_due,
}
"""The handler of each event, limited to the phases in which the event counts."""

DECIDERS: Mapping[type, Handler] = {
    events.Planned: connecting.drop_misfits,
    events.NodeBack: restarting.node_back,
    events.NodeLeaving: restarting.node_leaving,
    events.NodeLost: restarting.node_lost,
    events.AttemptFailed: allocation_end.ask_before_failing,
    events.TerminationWarning: allocation_end.termination_warning,
    events.SuccessDoubted: allocation_end.success_doubted,
    events.EndOvertaken: allocation_end.end_overtaken,
    events.StartAgain: restarting.start_again,
    events.JobOver: allocation_end.ask_before_ending,
}
"""The decider of each finding.

A failure passes through four parts. `ranks` returns `AttemptFailed`, which `allocation_end` may hold
back. Then `restarting` prepares another attempt or returns `JobOver`, which `allocation_end` hands on to
`stopping`.
"""


_RULES: Mapping[Phase, tuple[Rule, ...]] = {
    Phase.CONNECTING: (connecting.begin_when_connected,),
    Phase.PREPARING: (preparing.start_when_prepared,),
    Phase.RUNNING: (root_cause.verdict_when_all_ended,),
    Phase.RESTARTING: (
        restarting.end_if_excluded,
        restarting.end_if_finished,
        restarting.go_on_when_cleared,
    ),
    Phase.STOPPING: (restarting.include_again, stopping.drain_when_clean, stopping.finish_when_closed),
}
"""The rules of each phase: what the job does next as soon as it can."""

_DUE: Mapping[Timer, Callable[..., Step]] = {
    Timer.JOB: stopping.job_overdue,
    Timer.ASK: allocation_end.ask_overdue,
    Timer.VERDICT: root_cause.verdict_due,
    Timer.STACKS: root_cause.stacks_due,
    Timer.JOIN: ranks.join_overdue,
    Timer.JOIN_MESSAGE: ranks.join_message_due,
    Timer.STALL_MESSAGE: ranks.stall_message_due,
    Timer.STALL_ACT: ranks.stall_act_due,
    Timer.STOP_MESSAGE: stopping.stop_message_due,
    Timer.PREPARE: preparing.prepare_overdue,
    Timer.CLEAR: restarting.clearing_overdue,
    Timer.CLOSE: stopping.close_overdue,
    Timer.DRAIN: stopping.close_overdue,
    Timer.ANSWER: connecting.answer_overdue,
    Timer.RETRY: connecting.retry_due,
    Timer.FENCE: restarting.fence_due,
}
"""The function to call when a timer expires. For a node's timer, the function also gets the node.

Timers not listed here only end a wait, after which the rules of the phase can continue the job.
"""
