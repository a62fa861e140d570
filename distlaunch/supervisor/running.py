"""The workers' life: who has started, who has ended, who was lost with a node."""

import errno

from distlaunch.errors import Exit
from distlaunch.supervisor import blame, torch_agents, workers
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
from distlaunch.supervisor.restarting import advance, generation_failed, growth_failed, lose_node
from distlaunch.supervisor.state import (
    Cause,
    Phase,
    State,
    Step,
    signal_words,
)
from distlaunch.supervisor.timers import Timer
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
        return blame.rank_failed(state, rank, event, now)
    if state.phase is not Phase.RUNNING:
        return state, ()
    if state.spec.torch_agents:
        return torch_agents.finish(state, now)
    done = all(worker.status == 0 for worker in state.workers)
    return end_job(state, None, now) if done else blame.when_all_ended(state, now)


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
    fenced = _fence_words(state, node, now)
    if state.phase is Phase.CONNECTING:
        return end_job(state, cause, now)
    if state.spec.torch_agents and node in state.members:
        return torch_agents.go_on(state, now) if leaving else torch_agents.node_gone(state, node, cause, now)
    if state.phase is not Phase.RESTARTING and node in state.members:
        state, actions = generation_failed(state, cause, now)
        return state, (*actions, *fenced)
    said: tuple[Notice, ...] = () if leaving else (Notice("warning", text),)
    state, failed = growth_failed(state, cause, now) if state.phase is Phase.RESTARTING else (state, ())
    state, actions = advance(state, now)
    return state, (*said, *failed, *fenced, *actions)


def _fence_words(state: State, node: int, now: float) -> tuple[Notice, ...]:
    fence_at = state.due_at(Timer.FENCE, node)
    if fence_at is None or state.spec.restarts.most == 0:
        return ()
    until = f"until its ranks are certain to have ended (at most {fence_at - now:.0f} s), or until it returns"
    text = f"{state.label(node)}: waiting {until}"
    return (Notice("info", text),)


def on_agent_leaving(event: AgentLeaving, state: State, now: float) -> Step:
    """An agent was stopped by someone: its workers are not to blame for ending."""
    node = state.nodes[event.node]
    if state.phase is Phase.STOPPING or not isinstance(node, Up | Reaping):
        return state, ()
    attempt = node.attempt if isinstance(node, Reaping) else 1
    leaving = Leaving(may_be_occupied(node), attempt, returned=isinstance(node, Reaping))
    state = state.with_node(event.node, leaving)
    text = f"{state.label(event.node)} was lost: its agent was stopped by {signal_words(event.signum)}"
    cause = Cause(text, Exit.NODE_LOST, now, node=event.node)
    if state.phase is Phase.CONNECTING:
        return end_job(state, cause, now)
    if state.spec.torch_agents and event.node in state.members:
        return torch_agents.node_gone(state, event.node, cause, now)
    if state.phase is not Phase.RESTARTING and event.node in state.members:
        return generation_failed(state, cause, now)
    return state, (Notice("warning", text),)
