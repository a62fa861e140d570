"""The policy of a job: when to start, when to stop, whom to blame."""

import errno
import signal
from collections.abc import Callable, Mapping
from typing import Any

from distlaunch.errors import Exit, JobError
from distlaunch.job.spec import JobSpec
from distlaunch.plan.layout import Facts, make_plan
from distlaunch.supervisor.actions import (
    Action,
    Close,
    Connect,
    Drop,
    FindRoute,
    Finish,
    HoldPort,
    Notice,
    StartWorkers,
)
from distlaunch.supervisor.events import (
    AgentLeaving,
    AgentUp,
    Event,
    Interrupted,
    LinkEnded,
    OutputLost,
    PortHeld,
    PortRefused,
    RanksJoined,
    RouteFailed,
    RouteFound,
    Stuck,
    Swept,
    Ticked,
    WorkerExited,
    WorkerStarted,
    WorkerUnstarted,
)
from distlaunch.supervisor.state import (
    Cause,
    NodePhase,
    NodeState,
    Phase,
    State,
    WorkerPhase,
    WorkerState,
    exit_status_of,
    status_words,
)
from distlaunch.transport.failure import Kind, LinkFailure

Step = tuple[State, tuple[Action, ...]]

MAX_ATTEMPTS = 6
RETRY_S = 0.4
STOP_MARGIN_S = 15.0
"""Seconds beyond the grace until a node that does not confirm its clean-up is given up."""
DRAIN_S = 60.0
"""Seconds that a clean node may take to deliver the rest of its output."""
MAX_NAMED = 8
"""Ranks or nodes named in one line."""


def begin(spec: JobSpec, now: float) -> Step:
    """The first state of a job: all nodes are connected at once."""
    state = State(
        spec=spec,
        nodes=tuple(NodeState() for _ in spec.nodes),
        began_at=now,
        deadline=now + spec.timeouts.connect_s,
    )
    return state, tuple(Connect(node) for node in range(len(spec.nodes)))


def step(state: State, event: Event, now: float) -> Step:
    """The next state and what to do, after `event` at monotonic time `now` (seconds)."""
    if state.phase is Phase.DONE:
        return state, ()
    return _HANDLERS[type(event)](event, state, now)


# Connecting


def _on_agent_up(event: AgentUp, state: State, now: float) -> Step:
    if state.nodes[event.node].phase is not NodePhase.CONNECTING:
        return state, ()
    state = state.with_node(event.node, phase=NodePhase.UP, facts=event.facts)
    return _all_connected(state, now)


def _on_link_ended(event: LinkEnded, state: State, now: float) -> Step:
    node = state.nodes[event.node]
    if node.phase.over or node.phase is NodePhase.RETRYING:
        return state, ()
    if node.phase is NodePhase.CONNECTING:
        return _not_connected(state, event.node, event.failure, now)
    if node.phase is NodePhase.SWEPT:
        return _all_closed(state.with_node(event.node, phase=NodePhase.CLOSED), now)
    return _node_lost(state, event.node, event.failure, now)


def _not_connected(state: State, node: int, failure: LinkFailure, now: float) -> Step:
    attempts = state.nodes[node].attempts
    if state.phase is Phase.CONNECTING and failure.worth_retrying and attempts < MAX_ATTEMPTS:
        retry_at = now + RETRY_S * 2 ** (attempts - 1) * _jitter(node, attempts)
        return state.with_node(node, phase=NodePhase.RETRYING, retry_at=retry_at), ()
    state = state.with_node(node, phase=NodePhase.UNUSABLE, failure=failure)
    if state.phase is Phase.STOPPING:
        return _all_closed(state, now)
    said = Notice("error", f"{state.label(node)}: {failure.kind.value}")
    state, actions = _all_connected(state, now)
    return state, (said, *actions)


def _jitter(node: int, attempt: int) -> float:
    """0.5 to 1.5, spread over nodes by the golden ratio: nodes dropped together don't come back together."""
    return 0.5 + ((node + 1) * 0.618034 + attempt * 0.414214) % 1.0


def _all_connected(state: State, now: float) -> Step:
    """Once every node has answered or failed: prepare, or end with all that failed."""
    waiting = (NodePhase.CONNECTING, NodePhase.RETRYING)
    if state.phase is not Phase.CONNECTING or any(node.phase in waiting for node in state.nodes):
        return state, ()
    unusable = [i for i, node in enumerate(state.nodes) if node.phase is NodePhase.UNUSABLE]
    if unusable:
        names = _listed([state.label(i) for i in unusable])
        text = f"{len(unusable)} of {len(state.nodes)} nodes can't be used ({names}); nothing was started"
        return _end(state, Cause(text, Exit.UNREACHABLE, now, node=unusable[0]), now)
    return _prepare(state, now)


# Preparing


def _prepare(state: State, now: float) -> Step:
    facts = [node.facts or Facts("") for node in state.nodes]
    try:
        plan = make_plan(state.spec, facts, state.master_address)
    except JobError as error:
        return _end(state, Cause(str(error), error.exit_status, now), now)
    state = state._replace(
        phase=Phase.PREPARING,
        plan=plan,
        workers=tuple(WorkerState(rank) for rank in range(plan.world_size)),
        deadline=now + state.spec.timeouts.connect_s,
    )
    if state.spec.one_machine:
        nodes = tuple(node._replace(ready=True, interface="lo") for node in state.nodes)
        return state._replace(nodes=nodes), (HoldPort(0, plan.master_port),)
    routes = tuple(FindRoute(node.node_rank, plan.master_addr) for node in plan.nodes[1:])
    return state, (HoldPort(0, plan.master_port), *routes)


def _on_port_held(event: PortHeld, state: State, now: float) -> Step:
    return _all_prepared(state._replace(port=event.port), now)


def _on_port_refused(event: PortRefused, state: State, now: float) -> Step:
    assert state.plan is not None
    port = f"port {state.plan.master_port} on {state.label(event.node)}"
    holders = (
        ", ".join(owner_words(owner) for owner in event.owners) or "a program that does not listen on it"
    )
    advice = "leave the port out to get a free one"
    text = f"{port} can't be used: {event.error.lower()}; held by {holders}; {advice}"
    return _end(state, Cause(text, Exit.PORT_TAKEN, now, node=event.node), now)


def owner_words(owner: object) -> str:
    """Who holds a port, for people: `owner` is {uid, pid, command} as an agent reports it."""
    fields = owner if isinstance(owner, dict) else {}
    if fields.get("pid") is None:
        return f"a process of user id {fields.get('uid')}"
    return f"{fields['command']} (pid {fields['pid']})"


def _on_route_found(event: RouteFound, state: State, now: float) -> Step:
    state = state.with_node(event.node, ready=True, interface=event.interface)
    if event.node != 0 and state.nodes[0].interface is None and not state.nodes[0].ready:
        # The master's interface is the one that carries the address by which the others reach it.
        return state.with_node(0, interface=""), (FindRoute(0, event.address),)
    return _all_prepared(state, now)


def _on_route_failed(event: RouteFailed, state: State, now: float) -> Step:
    assert state.plan is not None
    if event.node == 0:
        return _all_prepared(state.with_node(0, ready=True, interface=None), now)
    text = (
        f"{state.label(event.node)} can't reach MASTER_ADDR {state.plan.master_addr}: {event.error}; "
        f"set {state.spec.nodes[0].path}.address to what the other nodes call {state.label(0)}"
    )
    return _end(state, Cause(text, Exit.USAGE, now, node=event.node), now)


def _all_prepared(state: State, now: float) -> Step:
    if state.phase is not Phase.PREPARING or state.port is None or not all(n.ready for n in state.nodes):
        return state, ()
    state = state._replace(
        phase=Phase.RUNNING,
        deadline=None,
        started_at=now,
        join_deadline=now + state.spec.timeouts.join_s,
    )
    return state, tuple(StartWorkers(node) for node in range(len(state.nodes)))


# Running


def _on_worker_started(event: WorkerStarted, state: State, now: float) -> Step:
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None:
        return state, ()
    return state.with_worker(rank, phase=WorkerPhase.RUNNING, pid=event.pid), ()


def _on_worker_unstarted(event: WorkerUnstarted, state: State, now: float) -> Step:
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None:
        return state, ()
    state = state.with_worker(rank, phase=WorkerPhase.UNSTARTED, at=now)
    # As a shell has it: 127 for what is not there, 126 for what can't be run.
    status = 127 if event.errno == errno.ENOENT else 126
    text = f"rank {rank} ({state.label(event.node)}) could not be started: {event.text}"
    return _end(state, Cause(text, status, now, rank, event.node), now)


def _on_worker_exited(event: WorkerExited, state: State, now: float) -> Step:
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None or state.workers[rank].phase is WorkerPhase.EXITED:
        return state, ()
    state = state.with_worker(
        rank,
        phase=WorkerPhase.EXITED,
        status=event.status,
        at=event.at,
        error_record=event.error_record,
        stopped=state.phase is Phase.STOPPING,
    )
    if event.status != 0:
        return _rank_failed(state, rank, event, now)
    if state.phase is Phase.RUNNING and all(worker.status == 0 for worker in state.workers):
        return _end(state, None, now)
    return state, ()


def _rank_failed(state: State, rank: int, event: WorkerExited, now: float) -> Step:
    text = f"rank {rank} ({state.label(event.node)}) failed first: {status_words(event.status)}"
    cause = Cause(text, exit_status_of(event.status), event.at, rank, event.node)
    if state.phase is Phase.RUNNING:
        return _end(state, cause, now)
    known = state.cause
    if known is not None and known.rank is not None and event.at < known.at:
        # Its link was slower than that of the rank we heard of first.
        return state.with_worker(rank, stopped=False)._replace(cause=cause), ()
    return state, ()


def _on_ranks_joined(event: RanksJoined, state: State, now: float) -> Step:
    before = all(worker.joined for worker in state.workers)
    for local_rank in event.local_ranks:
        rank = state.rank_of(event.node, local_rank)
        if rank is not None:
            state = state.with_worker(rank, joined=True)
    if before or not all(worker.joined for worker in state.workers):
        return state, ()
    assert state.plan is not None
    took_s = now - (state.started_at or now)
    where = f"{state.plan.master_addr}:{state.port}"
    ranks = f"all {len(state.workers)} ranks" if len(state.workers) > 1 else "the rank"
    text = f"{ranks} joined the rendezvous at {where} in {took_s:.1f} s"
    return state._replace(join_deadline=None), (Notice("info", text),)


def _join_overdue(state: State, now: float) -> Step:
    state = state._replace(join_deadline=None)
    missing = [worker.rank for worker in state.workers if not worker.joined]
    if len(missing) in (0, len(state.workers)):
        return state, ()  # a job that does not use torch.distributed
    names = _listed([_rank_name(state, rank) for rank in missing])
    joined = len(state.workers) - len(missing)
    text = f"only {joined} of {len(state.workers)} ranks joined the rendezvous; missing: {names}"
    return _end(state, Cause(text, Exit.TIMEOUT, now), now)


def _rank_name(state: State, rank: int) -> str:
    assert state.plan is not None
    worker = state.workers[rank]
    how = status_words(worker.status) if worker.status is not None else f"pid {worker.pid}"
    return f"rank {rank} ({state.plan.node_of(rank).label}, {how})"


def _node_lost(state: State, node: int, failure: LinkFailure, now: float) -> Step:
    state = state.with_node(node, phase=NodePhase.LOST, failure=failure)
    for worker in state.workers:
        mine = state.plan is not None and state.plan.node_of(worker.rank).node_rank == node
        if mine and worker.phase in (WorkerPhase.PLANNED, WorkerPhase.RUNNING):
            state = state.with_worker(worker.rank, phase=WorkerPhase.LOST, at=now)
    if state.phase is Phase.STOPPING:
        said = Notice("warning", f"{state.label(node)}: the agent ended before it confirmed its clean-up")
        state, actions = _all_closed(state, now)
        return state, (said, *actions)
    last = failure.words.splitlines()[-1:] or ["its agent ended"]
    text = f"{state.label(node)} was lost: {last[0]}"
    return _end(state, Cause(text, Exit.NODE_LOST, now, node=node), now)


def _on_agent_leaving(event: AgentLeaving, state: State, now: float) -> Step:
    if state.phase is Phase.STOPPING:
        return state, ()
    text = f"{state.label(event.node)} was lost: its agent was stopped by {signal.Signals(event.signum).name}"
    return _end(state, Cause(text, Exit.NODE_LOST, now, node=event.node), now)


# Stopping


def _end(state: State, cause: Cause | None, now: float) -> Step:
    """Begin to end the job everywhere; `cause` None is success."""
    grace_s = state.spec.timeouts.stop_s if cause else 0.0
    state = state._replace(
        phase=Phase.STOPPING,
        cause=cause,
        deadline=now + grace_s + STOP_MARGIN_S,
        join_deadline=None,
        ended_at=now,
    )
    said = (Notice("error", cause.text),) if cause else ()
    state, closing = _close_all(state, grace_s)
    state, finished = _all_closed(state, now)
    return state, (*said, *closing, *finished)


def _close_all(state: State, grace_s: float) -> Step:
    actions: list[Action] = []
    for i, node in enumerate(state.nodes):
        if node.phase in (NodePhase.UP, NodePhase.SWEPT):
            actions.append(Close(i, grace_s))
        elif not node.phase.over:
            actions.append(Drop(i))
            state = state.with_node(i, phase=NodePhase.UNUSABLE, retry_at=None)
    return state, tuple(actions)


def _on_swept(event: Swept, state: State, now: float) -> Step:
    if state.phase is not Phase.STOPPING or state.nodes[event.node].phase is not NodePhase.UP:
        return state, ()
    state = state.with_node(event.node, phase=NodePhase.SWEPT, leftovers=event.leftovers)
    if all(node.phase is not NodePhase.UP for node in state.nodes):
        state = state._replace(deadline=now + DRAIN_S)
    if event.leftovers and state.cause is None:
        text = (
            f"{state.label(event.node)}: {event.leftovers} processes outlived their workers and were killed"
        )
        return state, (Notice("warning", text),)
    return state, ()


def _on_output_lost(event: OutputLost, state: State, now: float) -> Step:
    rank = state.rank_of(event.node, event.local_rank)
    stream = "stderr" if event.stream else "stdout"
    return state, (Notice("warning", f"{event.size} bytes of rank {rank}'s {stream} were lost on its node"),)


def _on_stuck(event: Stuck, state: State, now: float) -> Step:
    names = _listed([f"{process.get('command')} (pid {process.get('pid')})" for process in event.processes])
    return state, (Notice("warning", f"{state.label(event.node)}: can't be killed: {names}"),)


def _all_closed(state: State, now: float) -> Step:
    if state.phase is not Phase.STOPPING or not all(node.phase.over for node in state.nodes):
        return state, ()
    return state._replace(phase=Phase.DONE, deadline=None), (Finish(),)


def _on_interrupted(event: Interrupted, state: State, now: float) -> Step:
    state = state._replace(interrupts=state.interrupts + 1)
    if state.phase is not Phase.STOPPING:
        name = signal.Signals(event.signum).name
        return _end(state, Cause(f"stopped by {name}", 128 + event.signum, now), now)
    if state.interrupts == 1:
        return state, (Notice("info", "already stopping; once more to kill at once"),)
    if state.interrupts == 2:
        state, closing = _close_all(state, 0.0)
        return state, (Notice("info", "killing the workers; once more to leave at once"), *closing)
    return state._replace(phase=Phase.DONE), (
        Notice("warning", "left; the agents finish the clean-up"),
        Finish(),
    )


# Time


def _on_ticked(event: Ticked, state: State, now: float) -> Step:
    if state.job_overdue(now):
        text = f"the job's time limit of {state.spec.timeouts.job_s:g} s has passed"
        return _end(state, Cause(text, Exit.TIMEOUT, now), now)
    if state.join_deadline is not None and now >= state.join_deadline:
        return _join_overdue(state, now)
    if state.deadline is not None and now >= state.deadline:
        return _phase_overdue(state, now)
    return _retries_due(state, now)


def _retries_due(state: State, now: float) -> Step:
    actions: list[Action] = []
    for i, node in enumerate(state.nodes):
        if node.retry_at is not None and now >= node.retry_at:
            state = state.with_node(i, phase=NodePhase.CONNECTING, attempts=node.attempts + 1, retry_at=None)
            actions.append(Connect(i))
    return state, tuple(actions)


def _phase_overdue(state: State, now: float) -> Step:
    if state.phase is Phase.CONNECTING:
        return _connect_overdue(state, now)
    if state.phase is Phase.PREPARING:
        slow = _listed(
            [state.label(i) for i, node in enumerate(state.nodes) if not node.ready] or [state.label(0)]
        )
        return _end(state, Cause(f"no answer from {slow} while preparing", Exit.UNREACHABLE, now), now)
    return _stop_overdue(state, now)


def _connect_overdue(state: State, now: float) -> Step:
    said: list[Action] = []
    for i, node in enumerate(state.nodes):
        if node.phase in (NodePhase.CONNECTING, NodePhase.RETRYING):
            failure = LinkFailure(Kind.SILENT, f"no agent after {state.spec.timeouts.connect_s:g} s")
            state = state.with_node(i, phase=NodePhase.UNUSABLE, failure=failure, retry_at=None)
            said += [Drop(i), Notice("error", f"{state.label(i)}: {failure.kind.value}")]
    state, actions = _all_connected(state, now)
    return state, (*said, *actions)


def _stop_overdue(state: State, now: float) -> Step:
    said: list[Action] = []
    for i, node in enumerate(state.nodes):
        if not node.phase.over:
            clean = node.phase is NodePhase.SWEPT
            what = "its output did not arrive whole" if clean else "it did not confirm its clean-up"
            said += [Drop(i), Notice("warning", f"{state.label(i)}: given up, {what}")]
            state = state.with_node(i, phase=NodePhase.CLOSED if clean else NodePhase.LOST)
    state, actions = _all_closed(state, now)
    return state, (*said, *actions)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"


_HANDLERS: Mapping[type, Callable[[Any, State, float], Step]] = {
    AgentLeaving: _on_agent_leaving,
    AgentUp: _on_agent_up,
    LinkEnded: _on_link_ended,
    PortHeld: _on_port_held,
    PortRefused: _on_port_refused,
    RouteFound: _on_route_found,
    RouteFailed: _on_route_failed,
    WorkerStarted: _on_worker_started,
    WorkerUnstarted: _on_worker_unstarted,
    WorkerExited: _on_worker_exited,
    RanksJoined: _on_ranks_joined,
    Swept: _on_swept,
    OutputLost: _on_output_lost,
    Stuck: _on_stuck,
    Interrupted: _on_interrupted,
    Ticked: _on_ticked,
}
