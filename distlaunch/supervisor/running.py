"""The workers' life: who has started, who has ended, who was lost with a node."""

import errno

from distlaunch.errors import Exit
from distlaunch.supervisor import workers
from distlaunch.supervisor.actions import Notice
from distlaunch.supervisor.ending import all_closed, end_job, with_time_to_drain
from distlaunch.supervisor.events import (
    AgentLeaving,
    PeerFailed,
    WorkerExited,
    WorkerStarted,
    WorkerUnstarted,
)
from distlaunch.supervisor.nodes import Leaving, Linked, Reaping, Up, may_be_occupied
from distlaunch.supervisor.policies import policy_of
from distlaunch.supervisor.restarting import advance, fence_words, growth_failed, lose_node
from distlaunch.supervisor.state import (
    Cause,
    Phase,
    State,
    Step,
    signal_words,
)
from distlaunch.supervisor.workers import Exited
from distlaunch.transport.failure import LinkFailure


def on_worker_started(event: WorkerStarted, state: State, now: float) -> Step:
    """A worker runs."""
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None:
        return state, ()
    return state.with_worker(rank, phase=workers.Phase.RUNNING, pid=event.pid, cpus=event.cpus), ()


def on_worker_unstarted(event: WorkerUnstarted, state: State, now: float) -> Step:
    """A worker can't be started: a mistake in the job, so end."""
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None:
        return state, ()
    from distlaunch.plan.advice import unstarted_advice

    state = state.with_worker(rank, phase=workers.Phase.UNSTARTED)
    # As a shell has it: 127 for what is not there, 126 for what can't be run.
    status = 127 if event.errno == errno.ENOENT else 126
    advice = unstarted_advice(state.spec, event.node, event.stage, event.errno)
    text = f"{state.named(rank)} could not be started: {event.text}{advice}"
    return end_job(state, Cause(text, status, now, rank, event.node), now)


def on_worker_exited(event: WorkerExited, state: State, now: float) -> Step:
    """A worker has ended: go on, succeed when all have, or fail with the first."""
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None or isinstance(state.worker(rank).phase, Exited):
        return state, ()
    stopped = state.phase is not Phase.RUNNING
    exited = Exited(event.status, event.at, stopped, event.error_record, event.oom_kills, event.shm)
    state = state.with_worker(rank, phase=exited)
    if event.status != 0:
        return policy_of(state).worker_failed(state, rank, event, now)
    return policy_of(state).worker_finished(state, now) if state.phase is Phase.RUNNING else (state, ())


def on_peer_failed(event: PeerFailed, state: State, now: float) -> Step:
    """Another node, whose launcher was started by hand, has failed: so has the job."""
    if state.phase is Phase.STOPPING:
        return state, ()
    return end_job(state, Cause(event.text, event.status, now), now)


def node_lost(state: State, node: int, before: Linked, failure: LinkFailure, now: float) -> Step:
    """A node is gone, and its workers with it."""
    leaving = isinstance(before, Leaving)
    state = lose_node(state, node, before, failure, now)
    if state.phase is Phase.STOPPING:
        unsure = Notice("warning", f"{state.label(node)}: the agent ended before it confirmed its clean-up")
        state, actions = all_closed(with_time_to_drain(state, now), now)
        return state, (unsure, *actions)
    last = failure.words.splitlines()[-1:] or ["its agent ended"]
    text = f"{state.label(node)} was lost: {last[0].rstrip('.')}"
    cause = Cause(text, Exit.NODE_LOST, now, node=node)
    if state.phase is Phase.CONNECTING:
        return end_job(state, cause, now)
    if state.phase is not Phase.RESTARTING and node in state.members:
        return policy_of(state).member_lost(state, node, cause, leaving, now)
    said: tuple[Notice, ...] = () if leaving else (Notice("warning", text),)
    state, failed = growth_failed(state, cause, now) if state.phase is Phase.RESTARTING else (state, ())
    fenced = fence_words(state, node, now)
    state, actions = advance(state, now)
    return state, (*said, *failed, *fenced, *actions)


def on_agent_leaving(event: AgentLeaving, state: State, now: float) -> Step:
    """An agent was stopped by someone: its workers are not to blame for ending."""
    node = state.nodes[event.node]
    if state.phase is Phase.STOPPING or not isinstance(node, Up | Reaping):
        return state, ()
    attempt = node.attempt if isinstance(node, Reaping) else 1
    leaving = Leaving(may_be_occupied(node), attempt, returned=isinstance(node, Reaping))
    state = state.with_node(event.node, leaving)
    stopped = f"its agent was stopped by {signal_words(event.signum)}"
    why = "its agent's guardian process was killed" if event.orphaned else stopped
    text = f"{state.label(event.node)} was lost: {why}"
    cause = Cause(text, Exit.NODE_LOST, now, node=event.node)
    if state.phase is Phase.CONNECTING:
        return end_job(state, cause, now)
    if state.phase is not Phase.RESTARTING and event.node in state.members:
        return policy_of(state).member_leaving(state, event.node, cause, now)
    return state, (Notice("warning", text),)
