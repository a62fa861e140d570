"""Reaching all nodes: those that can't be reached are told together, and then nothing is started."""

from distlaunch.errors import Exit
from distlaunch.supervisor.actions import Action, Connect, GiveUp, Notice
from distlaunch.supervisor.ending import all_closed, end_job, listed
from distlaunch.supervisor.events import AgentUp
from distlaunch.supervisor.preparing import prepare
from distlaunch.supervisor.state import Cause, NodePhase, Phase, State, Step
from distlaunch.transport.failure import LinkFailure

MAX_ATTEMPTS = 6
RETRY_S = 0.4
"""Seconds before the second attempt; each further one waits twice as long, all with jitter."""


def on_agent_up(event: AgentUp, state: State, now: float) -> Step:
    """A node can be used."""
    if state.nodes[event.node].phase is not NodePhase.CONNECTING:
        return state, ()
    state = state.with_node(event.node, phase=NodePhase.UP, facts=event.facts, failure=None)
    return all_connected(state, now)


def not_connected(state: State, node: int, failure: LinkFailure, now: float) -> Step:
    """A node can't be used, or not yet: try again where that can help."""
    attempts = state.nodes[node].attempts
    in_time = state.phase is Phase.CONNECTING and state.deadline is not None
    if in_time and failure.worth_retrying and attempts < MAX_ATTEMPTS:
        retry_at = now + RETRY_S * 2 ** (attempts - 1) * _jitter(node, attempts)
        return state.with_node(node, phase=NodePhase.RETRYING, retry_at=retry_at, failure=failure), ()
    return _unusable(state, node, failure, now)


def _unusable(state: State, node: int, failure: LinkFailure, now: float) -> Step:
    state = state.with_node(node, phase=NodePhase.UNUSABLE, failure=failure, retry_at=None)
    if state.phase is Phase.STOPPING:
        return all_closed(state, now)
    said = Notice("error", f"{state.label(node)}: {failure.kind.value}")
    state, actions = all_connected(state, now)
    return state, (said, *actions)


def _jitter(node: int, attempt: int) -> float:
    """0.5 to 1.5, spread over nodes by the golden ratio: nodes dropped together don't come back together."""
    return 0.5 + ((node + 1) * 0.618034 + attempt * 0.414214) % 1.0


def all_connected(state: State, now: float) -> Step:
    """Once every node has answered or failed: prepare, or end with all that failed."""
    waiting = (NodePhase.CONNECTING, NodePhase.RETRYING)
    if state.phase is not Phase.CONNECTING or any(node.phase in waiting for node in state.nodes):
        return state, ()
    unusable = [i for i, node in enumerate(state.nodes) if node.phase is NodePhase.UNUSABLE]
    if unusable:
        names = listed([state.label(i) for i in unusable])
        text = f"{len(unusable)} of {len(state.nodes)} nodes can't be used ({names}); nothing was started"
        return end_job(state, Cause(text, Exit.UNREACHABLE, now, node=unusable[0]), now)
    return prepare(state, now)


def connect_overdue(state: State, now: float) -> Step:
    """Give up the nodes that have not answered in time: each reports its end, the last ends the phase."""
    why = f"no agent after {state.spec.timeouts.connect_s:g} s"
    actions: tuple[Action, ...] = tuple(
        GiveUp(i, why) for i, node in enumerate(state.nodes) if node.phase is NodePhase.CONNECTING
    )
    state = state._replace(deadline=None)
    for i, node in enumerate(state.nodes):
        if node.phase is NodePhase.RETRYING and node.failure:
            state, said = _unusable(state, i, node.failure, now)
            actions += said
    return state, actions


def retries_due(state: State, now: float) -> Step:
    """Connect again where the wait is over."""
    actions: list[Action] = []
    for i, node in enumerate(state.nodes):
        if node.retry_at is not None and now >= node.retry_at:
            state = state.with_node(i, phase=NodePhase.CONNECTING, attempts=node.attempts + 1, retry_at=None)
            actions.append(Connect(i))
    return state, tuple(actions)
