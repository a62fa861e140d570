"""Losing a node: it is fenced until its workers are certain to have ended, and connected again."""

from distlaunch.errors import Exit
from distlaunch.plan.layout import Facts
from distlaunch.state import workers
from distlaunch.state.actions import Notice
from distlaunch.state.events import AgentLeaving
from distlaunch.state.findings import JobOver, NodeLeaving, NodeLost, Step, SuccessDoubted
from distlaunch.state.job import Cause, Phase, State
from distlaunch.state.nodes import (
    Away,
    Leaving,
    Linked,
    Reaping,
    Retrying,
    Up,
    facts_of,
    is_missing,
    may_be_occupied,
    no_more,
)
from distlaunch.state.timers import Timer
from distlaunch.transports.failure import LinkFailure
from distlaunch.wording import signal_words

FENCE_MARGIN_S = 5.0
"""Seconds beyond lease and grace until a node that can't be asked is taken to be empty."""
RECONNECT_S = 0.2
RECONNECT_MAX_S = 30.0


def link_ended(state: State, node: int, before: Linked, failure: LinkFailure, now: float) -> Step:
    """A node is gone, and its workers with it."""
    state = lost(state, node, before, failure, now)
    if state.phase is Phase.STOPPING:
        if state.cause and state.cause.scheduled:  # which sweeps, too
            return state, ()
        text = f"{state.label(node)}: its agent exited before confirming its cleanup"
        return state, (Notice("warning", text),)
    last = failure.words.splitlines()[-1:] or ["its agent exited"]
    cause = cause_of_loss(state, node, last[0].rstrip("."), now)
    if state.phase is Phase.CONNECTING:
        return state, (JobOver(cause),)
    return state, (NodeLost(node, cause, told=isinstance(before, Leaving)),)


def on_agent_leaving(event: AgentLeaving, state: State, now: float) -> Step:
    """Somebody stopped an agent: its workers are not to blame for ending."""
    node = state.nodes[event.node]
    if state.phase is Phase.STOPPING:
        return state, (SuccessDoubted(),) if state.cause is None else ()
    if not isinstance(node, Up | Reaping):
        return state, ()
    attempt = node.attempt if isinstance(node, Reaping) else 1
    leaving = Leaving(may_be_occupied(node), attempt, returned=isinstance(node, Reaping))
    state = state.with_node(event.node, leaving)
    cause = cause_of_loss(state, event.node, _why_it_leaves(event, facts_of(node)), now)
    cause = cause._replace(agent_signum=None if event.orphaned else event.signum or None)
    if state.phase is Phase.CONNECTING:
        return state, (JobOver(cause),)
    return state, (NodeLeaving(event.node, cause),)


def _why_it_leaves(event: AgentLeaving, facts: Facts) -> str:
    if event.orphaned:
        above = "launcher" if facts.logs is not None else "agent's guardian process"
        return f"its {above} was killed"
    if event.signum:
        return f"its agent was stopped by {signal_words(event.signum)}"
    if event.damage:
        return f"the data sent to its agent was altered on the way ({event.damage})"
    return "the connection to its agent was closed on the way"


def cause_of_loss(state: State, node: int, why: str, now: float) -> Cause:
    """The cause, if the loss of this node is what ends the generation."""
    return Cause(f"{state.label(node)} was lost: {why}", Exit.NODE_LOST, now, node=node)


def lost(state: State, node: int, before: Linked, failure: LinkFailure, now: float) -> State:
    """`state` after the end of a node's agent: its workers are lost, and it is fenced unless it is clean."""
    clean = failure.clean and not is_missing(before)  # a later agent speaks for itself alone
    away = Away(occupied=may_be_occupied(before) and not clean)
    attempt = before.attempt if isinstance(before, Reaping | Leaving) else 1
    part = state.plan.part_of(node) if state.plan else None
    for rank in part.ranks if part else ():
        if state.worker(rank).going:
            state = state.with_worker(rank, phase=workers.WorkerPhase.VANISHED)
    state = _fenced(state, node, away, now)
    return reconnect_later(state, node, Retrying(attempt, failure, away), now)


def _fenced(state: State, node: int, away: Away, now: float) -> State:
    """`state` with the time when a lost node is certain to be clean; a later loss does not move it."""
    if not away.occupied or state.phase is Phase.STOPPING:
        return state.without_timers(Timer.FENCE, node=node)
    times = state.spec.timeouts
    fence_at = now + times.lease_s + times.stop_s + FENCE_MARGIN_S
    return state.with_timer(Timer.FENCE, state.due_at(Timer.FENCE, node) or fence_at, node)


def reconnect_later(state: State, node: int, this: Retrying, now: float) -> State:
    """Connect a node again after a growing wait, if the job can use it and that can help."""
    hopeless = this.failure is not None and not this.failure.may_pass
    state = state.without_timers(Timer.RETRY, Timer.ANSWER, node=node)
    of_use = state.spec.takes_nodes_back and state.phase not in (Phase.STOPPING, Phase.CONNECTING)
    if hopeless or not of_use:
        return state.with_node(node, no_more(this, this.failure))
    spread = 0.75 + 0.5 * state.chance_of(node, this.attempt)
    wait_s = min(RECONNECT_MAX_S, RECONNECT_S * 2.0 ** min(this.attempt - 1, 30)) * spread
    state = state.with_node(node, this._replace(away=this.away or Away()))
    return state.with_timer(Timer.RETRY, now + wait_s, node)
