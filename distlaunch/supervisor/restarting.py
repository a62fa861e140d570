"""Between two generations: the old one is ended everywhere, and known to be, before the new one starts."""

from distlaunch.errors import Exit
from distlaunch.job.spec import FOREVER_S
from distlaunch.supervisor import workers
from distlaunch.supervisor.actions import Action, Drop, Notice, StopWorkers
from distlaunch.supervisor.ending import end_job, listed, with_end_of_workers
from distlaunch.supervisor.events import PortUsurped, RouteFailed
from distlaunch.supervisor.members import choose_members, hope_is_left, may_come
from distlaunch.supervisor.nodes import (
    Away,
    Leaving,
    Linked,
    Reaping,
    Retrying,
    Route,
    Up,
    emptied,
    is_missing,
    is_usable,
    may_be_occupied,
    no_more,
    route_of,
    unfit_words,
)
from distlaunch.supervisor.preparing import holders_words, prepare, start_when_prepared
from distlaunch.supervisor.state import (
    Cause,
    Phase,
    Restart,
    State,
    Step,
    Why,
    span_words,
)
from distlaunch.supervisor.timers import Timer
from distlaunch.transport.failure import Kind, LinkFailure

FENCE_MARGIN_S = 5.0
"""Seconds beyond lease and grace until a node that can't be asked is taken to be empty."""
HEALTHY_S = 300.0
"""A generation that lived so long has worked: the next failure is not one more in a row."""
BACKOFF_MAX_S = 300.0
RECONNECT_S = 0.2
RECONNECT_MAX_S = 30.0
MAX_PORT_MOVES = 3


def generation_failed(state: State, cause: Cause, now: float) -> Step:
    """Start again, if the job may; else end it. One failure ends a generation, whatever else follows."""
    if state.phase not in (Phase.PREPARING, Phase.RUNNING):
        return state, ()
    limit = state.spec.restarts
    if limit.most == 0:
        return end_job(state, cause, now)
    recent = _recent(state, Why.FAILURE, now)
    if len(recent) >= limit.most:
        times = {1: "once", 2: "twice"}.get(limit.most, f"{limit.most} times")
        span = span_words(limit.window_s)
        when = "" if limit.window_s == FOREVER_S else f" in the last {'hour' if span == '1 h' else span}"
        used_up = f"; not restarting: already restarted {times}{when}"
        return end_job(state, cause._replace(text=cause.text + used_up), now)
    return _restart(state, Why.FAILURE, cause, f"restart {len(recent) + 1} of {limit.most}", now)


def member_lost(state: State, node: int, cause: Cause, leaving: bool, now: float) -> Step:
    """A node that took part is lost: that fails the generation."""
    fenced = fence_words(state, node, now)
    state, actions = generation_failed(state, cause, now)
    return state, (*actions, *fenced)


def member_leaving(state: State, node: int, cause: Cause, now: float) -> Step:
    """A node that takes part will be lost in a moment."""
    return generation_failed(state, cause, now)


def fence_words(state: State, node: int, now: float) -> tuple[Notice, ...]:
    """Why a lost node is waited for, if it is."""
    fence_at = state.due_at(Timer.FENCE, node)
    if fence_at is None or state.spec.restarts.most == 0:
        return ()
    until = f"until its ranks are certain to have ended (at most {fence_at - now:.0f} s), or until it returns"
    return (Notice("info", f"{state.label(node)}: waiting {until}"),)


def _recent(state: State, why: Why, now: float) -> list[Restart]:
    """The restarts that count against a limit: those in its window."""
    window_s = state.spec.restarts.window_s
    return [restart for restart in state.restarts if restart.why is why and now - restart.at < window_s]


def growth_failed(state: State, cause: Cause, now: float) -> Step:
    """A node was lost while one was taken in: that counts, or a bad node could do so for ever."""
    *earlier, last = state.restarts
    if last.why is not Why.GROWTH:
        return state, ()
    state = state._replace(restarts=(*earlier, last._replace(why=Why.FAILURE, cause=cause)), cause=cause)
    if len(_recent(state, Why.FAILURE, now)) > state.spec.restarts.most:
        return end_job(state, cause, now)
    return state, ()


def is_back(state: State, node: int, now: float) -> Step:
    """A node can be used: now, at the next restart, or not at all."""
    if len(state.members) >= len(state.spec.nodes) or node in state.members:
        return state, ()
    if state.spec.grow == "now":
        return _grow(state, node, now)
    return state, (Notice("info", f"{state.label(node)} is back, and is taken in at the next restart"),)


def _grow(state: State, node: int, now: float) -> Step:
    cause = Cause(f"{state.label(node)} is back", Exit.OK, now, node=node)
    return _restart(state, Why.GROWTH, cause, "restarting to take it in", now)


def on_port_usurped(event: PortUsurped, state: State, now: float) -> Step:
    """Somebody else has got the rendezvous port: move to another one, or end when it is the user's choice."""
    if event.node not in state.members[:1]:
        return state, ()
    text = f"port {state.port} on {state.label(event.node)} was taken by {holders_words(event.owners)}"
    cause = Cause(text, Exit.PORT_TAKEN, now, node=event.node)
    fixed = state.spec.master_port is not None or not state.spec.engine.gives_ranks
    if fixed or len(_recent(state, Why.PORT, now)) >= MAX_PORT_MOVES:
        return end_job(state, cause, now)
    return _restart(state, Why.PORT, cause, "restarting with another", now)


def on_route_failed(event: RouteFailed, state: State, now: float) -> Step:
    """A node knows no way to the master: go on without it where others do, else end, saying what to set."""
    node = state.nodes[event.node]
    if state.plan is None or event.node not in state.members or not isinstance(node, Up) or node.route:
        return state, ()  # nobody asked it
    first = state.members[0]
    if event.node == first and state.spec.engine.serves_store:
        return start_when_prepared(state.with_node(first, node._replace(route=Route())), now)
    text = _no_route_words(state, state.plan.master_addr, event)
    if state.phase is Phase.RUNNING:  # the others go on without it
        return state, (Notice("warning", text),)
    cause = Cause(text, Exit.USAGE, now, node=event.node)
    if state.generation and route_of(state.nodes[first]):
        return generation_failed(state.with_node(event.node, node._replace(unfit=text)), cause, now)
    return end_job(state, cause, now)


def _no_route_words(state: State, master: str, event: RouteFailed) -> str:
    node, first = state.label(event.node), state.members[0]
    if not state.spec.engine.serves_store:
        return f"{node} can't reach etcd at {master}: {event.error}"
    return (
        f"{node} can't reach MASTER_ADDR {master}: {event.error}; "
        f"set {state.spec.pool[first].path}.address to what the other nodes call {state.label(first)}"
    )


def _restart(state: State, why: Why, cause: Cause, what: str, now: float) -> Step:
    lived_s = now - state.started_at if state.started_at and state.phase is Phase.RUNNING else 0.0
    delay_s = _backoff_s(state, lived_s) if why is Why.FAILURE else 0.0
    wait = f" in {delay_s:.1f} s" if delay_s else ""
    grace_s = state.spec.timeouts.stop_s
    restarts = (*state.restarts, Restart(now, why, cause, lived_s))
    state = state._replace(phase=Phase.RESTARTING, cause=cause, restarts=restarts, wait_told=False)
    state = with_end_of_workers(state.without_timers(Timer.PREPARE), Timer.CLEAR, grace_s, now)
    for timer, wait_s in ((Timer.BACKOFF, delay_s), (Timer.REJOIN, state.spec.timeouts.rejoin_s)):
        state = state.with_timer(timer, now + wait_s if wait_s else None)
    said = Notice("info" if why is Why.GROWTH else "warning", f"{cause.text}; {what}{wait}")
    busy = [i for i, n in enumerate(state.nodes) if isinstance(n, Linked) and may_be_occupied(n)]
    stops = [StopWorkers(i, grace_s) for i in busy]
    state, more = advance(state, now)
    return state, (said, *stops, *more)


def _backoff_s(state: State, lived_s: float) -> float:
    """0 after a generation that worked; else the longer, the more have failed in a row, with jitter."""
    in_a_row = 0
    for restart in reversed(state.restarts):
        in_a_row += restart.why is Why.FAILURE
        if restart.lived_s >= HEALTHY_S:
            break
    if in_a_row == 0 or lived_s >= HEALTHY_S:
        return 0.0
    doubled = state.spec.restarts.backoff_s * 2.0 ** min(in_a_row - 1, 30)
    return min(doubled, BACKOFF_MAX_S) * (0.75 + 0.5 * ((state.chance + in_a_row * 0.618034) % 1.0))


def advance(state: State, now: float) -> Step:
    """Start the next generation as soon as that is safe and there are nodes for it."""
    if state.phase is not Phase.RESTARTING:
        return state, ()
    if state.due_at(Timer.BACKOFF) is not None or any(map(may_be_occupied, state.nodes)):
        return state, ()
    found = choose_members(state)
    if len(found) < len(state.spec.nodes) and may_come(state):
        return state, ()  # its answer, or its time, is awaited
    if len(found) >= state.spec.fewest:
        return _next_generation(state, found, now)
    if state.due_at(Timer.REJOIN) is None or not hope_is_left(state):
        return _nobody_came(state, len(found), now)
    return _waiting(state.without_timers(Timer.CLEAR), len(found), now)


def _waiting(state: State, found: int, now: float) -> Step:
    """Say once who is waited for, and how long."""
    until = state.due_at(Timer.REJOIN)
    if state.wait_told or until is None:
        return state, ()
    names = [state.label(i) for i, node in enumerate(state.nodes) if not is_usable(node)]
    there = f"{found} of at least {state.spec.fewest} nodes {'is' if found == 1 else 'are'} there"
    text = f"{there}: waiting up to {until - now:.0f} s for {listed(names)} to return (timeouts.rejoin)"
    return state._replace(wait_told=True), (Notice("info", text),)


def fence_due(state: State, node: int, now: float) -> Step:
    """Whatever a lost node's workers did, they have ended by now."""
    return advance(state.with_node(node, emptied(state.nodes[node])), now)


def _next_generation(state: State, found: tuple[int, ...], now: float) -> Step:
    before = [state.label(index) for index in state.members]
    names = [state.label(index) for index in found]
    state = state._replace(generation=state.generation + 1, cause=None, port=None)
    state = state.without_timers(Timer.CLEAR, Timer.STOP_NOTICE, Timer.REJOIN)
    state, actions = prepare(state, found, now)
    if names == before:
        return state, actions
    text = f"going on with {len(names)} of {len(state.spec.nodes)} nodes: {', '.join(names)}"
    return state, (Notice("info", text), *actions)


def _nobody_came(state: State, found: int, now: float) -> Step:
    assert state.cause is not None
    waited = "" if hope_is_left(state) else ", and no other can come"
    if state.due_at(Timer.REJOIN) is None:
        waited = f" after waiting {span_words(state.spec.timeouts.rejoin_s)} for others"
    for index, node in enumerate(state.nodes):
        unfit = unfit_words(node)
        waited += f"; {state.label(index)} can't take part: {unfit}" if unfit else ""
    text = f"{state.cause.text}; {found} of at least {state.spec.fewest} nodes are left{waited}"
    return end_job(state, state.cause._replace(text=text), now)


def lose_node(state: State, node: int, before: Linked, failure: LinkFailure, now: float) -> State:
    """`state` after the end of a node's agent: its workers are lost, and it is fenced unless it is clean."""
    returned = is_missing(before)
    clean = failure.clean and not returned  # a later agent speaks for itself alone
    away = Away(occupied=may_be_occupied(before) and not clean)
    attempt = before.attempt if isinstance(before, Reaping | Leaving) else 1
    part = state.plan.part_of(node) if state.plan else None
    for rank in part.ranks if part else ():
        if state.worker(rank).going:
            state = state.with_worker(rank, phase=workers.Phase.VANISHED)
    state = _fenced(state, node, away, now)
    return reconnect_later(state, node, Retrying(attempt, failure, away), now)


def _fenced(state: State, node: int, away: Away, now: float) -> State:
    """`state` with a time when a lost node is certain to be clean; a later loss does not put it off."""
    if not away.occupied or state.phase is Phase.STOPPING:
        return state.without_timers(Timer.FENCE, node=node)
    times = state.spec.timeouts
    fence_at = now + times.lease_s + times.stop_s + FENCE_MARGIN_S
    return state.with_timer(Timer.FENCE, state.due_at(Timer.FENCE, node) or fence_at, node)


def reconnect_later(state: State, node: int, this: Retrying, now: float) -> State:
    """Have a node connected again, ever more slowly, where the job could use it and that can help."""
    hopeless = this.failure is not None and not this.failure.may_pass
    state = state.without_timers(Timer.RETRY, Timer.ANSWER, node=node)
    if not state.spec.takes_nodes_back or hopeless or state.phase in (Phase.STOPPING, Phase.CONNECTING):
        return state.with_node(node, no_more(this, this.failure))
    spread = 0.75 + 0.5 * state.chance_of(node, this.attempt)
    wait_s = min(RECONNECT_MAX_S, RECONNECT_S * 2.0 ** min(this.attempt - 1, 30)) * spread
    state = state.with_node(node, this._replace(away=this.away or Away()))
    return state.with_timer(Timer.RETRY, now + wait_s, node)


def clearing_overdue(state: State, now: float) -> Step:
    """Drop the nodes that have not confirmed the end of their workers in time: they are fenced."""
    actions: list[Action] = []
    for i, node in enumerate(state.nodes):
        occupied = isinstance(node, Linked) and may_be_occupied(node)
        if isinstance(node, Linked) and occupied and state.due_at(Timer.FENCE, i) is None:
            actions += [Drop(i), Notice("warning", f"{state.label(i)} did not confirm its clean-up: fenced")]
            state = lose_node(state, i, node, LinkFailure(Kind.SILENT), now)
    state, more = advance(state, now)
    return state, (*actions, *more)
