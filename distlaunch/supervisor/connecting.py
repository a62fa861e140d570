"""Reaching the nodes: at the start all together, and later those that were lost, until they return."""

from distlaunch.errors import Exit
from distlaunch.state.actions import Action, Drop, GiveUp, Notice, Reap
from distlaunch.state.events import AgentUp, ImagePulled, NodeArrived, OrphansKilled, Reaped
from distlaunch.state.findings import ConnectAgain, Finding, JobOver, NodeBack, Planned, Prepare, Step
from distlaunch.state.job import Cause, Phase, State
from distlaunch.state.nodes import (
    Away,
    Connecting,
    Reaping,
    Retrying,
    Unusable,
    Up,
    is_expected,
    unfit_words,
)
from distlaunch.state.timers import Timer
from distlaunch.supervisor.losing import RECONNECT_MAX_S, reconnect_later
from distlaunch.supervisor.members import choose_members, misfit
from distlaunch.transports.failure import Kind, LinkFailure
from distlaunch.wording import counted, listed

MAX_ATTEMPTS = 6
PULL_S = 3600.0
"""Seconds for an image to come: those of large ones take minutes."""
RETRY_S = 0.4
"""Seconds before the second attempt; each further one waits twice as long, all with jitter."""


def on_agent_up(event: AgentUp, state: State, now: float) -> Step:
    """A node can be used, once nothing is left there of an agent that was lost."""
    node = state.nodes[event.node]
    if not isinstance(node, Connecting):
        return state, ()
    state = state.without_timers(Timer.ANSWER, node=event.node)
    if node.away:
        return state.with_node(event.node, Reaping(event.facts, node.attempt, node.away)), (Reap(event.node),)
    return _in_the_pool(state, event.node, Up(event.facts, asked=node.asked, held=node.held), 1, now)


def on_reaped(event: Reaped, state: State, now: float) -> Step:
    """A node that returned is clean."""
    node = state.nodes[event.node]
    if not isinstance(node, Reaping):
        return state, ()
    state = state.without_timers(Timer.FENCE, node=event.node)
    up = Up(node.facts, unfit=node.away.unfit)
    return _in_the_pool(state, event.node, up, node.attempt, now)


def _in_the_pool(state: State, node: int, up: Up, attempt: int, now: float) -> Step:
    state = state.with_node(node, up)
    if state.phase is Phase.STOPPING:
        return state, ()
    why = misfit(state, node)
    if state.phase is Phase.CONNECTING:
        return state.with_node(node, up._replace(unfit=why)), _misfit_notice(state, node, why)
    if why:
        return _let_go(state, node, why, attempt, now)
    return state.with_node(node, up._replace(unfit="")), (NodeBack(node),)


def _misfit_notice(state: State, node: int, why: str) -> tuple[Notice, ...]:
    """A warning, once, about a node that can't take part."""
    known = unfit_words(state.nodes[node]) == why
    return () if known else (Notice("warning", f"{state.label(node)} can't be used: {why}"),)


def _let_go(state: State, node: int, why: str, attempt: int, now: float) -> tuple[State, tuple[Action, ...]]:
    """A node can't take part as it is: look at it again later, for its GPUs may come."""
    said = _misfit_notice(state, node, why)
    again = Retrying(max(2, attempt), None, Away(unfit=why))
    return reconnect_later(state, node, again, now), (*said, Drop(node))


def let_misfits_go(found: Planned, state: State, now: float) -> Step:
    """Now that there is a plan: drop the spares that can't stand in."""
    actions: tuple[Action, ...] = ()
    for index, node in enumerate(state.nodes):
        idle = isinstance(node, Up) and index not in state.members
        if idle and (why := misfit(state, index)):
            state, more = _let_go(state, index, why, 1, now)
            actions += more
    return state, actions


def on_orphans_killed(event: OrphansKilled, state: State, now: float) -> Step:
    """An agent that was killed together with its guardian had left processes there."""
    killed = counted(event.processes, "process")
    return state, (Notice("warning", f"{state.label(event.node)}: killed {killed} left by a dead agent"),)


def not_connected(state: State, node: int, this: Connecting, failure: LinkFailure, now: float) -> Step:
    """A node can't be used, or not yet: try again where that can help."""
    if this.away or state.phase is not Phase.CONNECTING:
        return reconnect_later(state, node, Retrying(this.attempt, failure, this.away), now), ()
    answer_by = state.due_at(Timer.ANSWER, node)
    in_time = answer_by is not None and now < answer_by
    if in_time and failure.worth_retrying and this.attempt < MAX_ATTEMPTS:
        retry_at = now + RETRY_S * 2 ** (this.attempt - 1) * (0.5 + state.chance_of(node, this.attempt))
        state = state.with_node(node, Retrying(this.attempt, failure))
        return state.with_timer(Timer.RETRY, retry_at, node), ()
    if not in_time and this.failure and failure.kind is Kind.SILENT:
        failure = this.failure  # a try that was cut short knows less than the one before
    return _unusable(state, node, failure)


def _unusable(state: State, node: int, failure: LinkFailure) -> Step:
    state = state.with_node(node, Unusable(failure)).without_timers(Timer.RETRY, Timer.ANSWER, node=node)
    if failure.kind is Kind.ABSENT:
        return state, ()  # it will say itself that it comes
    if not _more_may_come(state) and len(choose_members(state)) < state.spec.fewest:
        return state, ()  # the summary, which follows at once, tells it with what to do
    return state, (Notice("error", f"{state.label(node)}: {failure.kind.value}"),)


def _more_may_come(state: State) -> bool:
    """Whether a node that the job would rather begin with is still expected."""
    wanted = len(state.spec.nodes)
    if not state.nodes.expected or wanted == len(state.nodes):
        return state.nodes.expected > 0
    if any(map(is_expected, state.nodes[:wanted])):
        return True
    return any(map(is_expected, state.nodes)) and len(choose_members(state)) < wanted


def begin_when_connected(state: State, now: float) -> Step:
    """Prepare once the job has its nodes; end once it can't have enough of them."""
    if _more_may_come(state):
        return state, ()
    found = choose_members(state)
    if len(found) < state.spec.fewest:
        return state, (_too_few(state, now),)
    said: tuple[Finding | Notice, ...] = ()
    if missing := [state.label(i) for i in range(len(state.spec.nodes)) if i not in found]:
        said = (Notice("warning", f"starting on {counted(len(found), 'node')}, without {listed(missing)}"),)
    return _with_another_try(state, now), (*said, Prepare(found))


def _too_few(state: State, now: float) -> JobOver:
    unusable = [i for i, node in enumerate(state.nodes) if isinstance(node, Unusable)]
    names = listed([state.label(i) for i in unusable])
    which = "the only node" if len(state.nodes) == 1 else f"{len(unusable)} of {len(state.nodes)} nodes"
    text = f"{which} can't be used ({names}); nothing was started"
    return JobOver(Cause(text, Exit.UNREACHABLE, now, node=unusable[0]))


def _with_another_try(state: State, now: float) -> State:
    """The job starts without some nodes: those that may come later are tried again."""
    for index, node in enumerate(state.nodes):
        if isinstance(node, Unusable) and node.failure and node.failure.may_pass:
            state = state.with_node(index, Retrying(2, node.failure, Away()))
            state = state.with_timer(Timer.RETRY, now + RECONNECT_MAX_S, index)
    return state


def on_image_pulled(event: ImagePulled, state: State, now: float) -> Step:
    """Fetching an image takes its time, which does not count as the node's."""
    container = state.spec.container
    if container is None or not isinstance(state.nodes[event.node], Connecting):
        return state, ()
    left_s = state.spec.timeouts.connect_s if event.over else PULL_S
    state = state.with_timer(Timer.ANSWER, now + left_s, event.node)
    what = "has" if event.over else "pulling"
    return state, (Notice("info", f"{state.label(event.node)}: {what} image {container.image}"),)


def answer_overdue(state: State, node: int, now: float) -> Step:
    """Give up a node that has not answered in time."""
    this = state.nodes[node]
    if isinstance(this, Connecting):
        why = f"no agent within {state.spec.timeouts.connect_s:g} s (timeouts.connect)"
        return state, (GiveUp(node, why),)  # it reports its end, which says what was heard from it
    if not isinstance(this, Retrying) or this.failure is None:
        return state, ()
    if state.phase is Phase.CONNECTING:
        return _unusable(state, node, this.failure)
    return reconnect_later(state, node, this, now), ()


def on_node_arrived(event: NodeArrived, state: State, now: float) -> Step:
    """There is something to connect to: do so now."""
    if isinstance(state.nodes[event.node], Retrying):
        return state.with_timer(Timer.RETRY, now, event.node), ()
    return state, ()


def retry_due(state: State, node: int, now: float) -> Step:
    """Connect again."""
    this = state.nodes[node]
    assert isinstance(this, Retrying)
    state = state.with_node(node, Connecting(this.attempt + 1, this.failure, this.away))
    if this.away:
        state = state.with_timer(Timer.ANSWER, now + state.spec.timeouts.connect_s, node)
    return state, (ConnectAgain(node),)
