"""Restarts. The next attempt starts only once the end of the previous one is confirmed on every node.

Failures come from `allocation_end`. If no further attempt is allowed, the `JobOver` returned here is passed
back to `allocation_end`, and from there to `stopping`.
"""

from distlaunch.agent.messages import Reap, StopWorkers
from distlaunch.errors import Exit
from distlaunch.job.spec import FOREVER_S, Restarts
from distlaunch.supervisor import preparing
from distlaunch.supervisor.actions import Action, Drop, Send, ShowMessage
from distlaunch.supervisor.connecting import (
    choose_members,
    lost,
    may_come,
    repeatedly_failed,
    returning,
    with_time_to_return,
)
from distlaunch.supervisor.events import (
    AttemptFailed,
    JobOver,
    NodeBack,
    NodeLeaving,
    NodeLost,
    StartAgain,
    Step,
)
from distlaunch.supervisor.nodes import (
    Leaving,
    Linked,
    emptied,
    is_missing,
    is_usable,
    may_be_occupied,
    unfit_words,
)
from distlaunch.supervisor.root_cause import capture
from distlaunch.supervisor.state import Cause, Phase, Restart, State, Timer, Why
from distlaunch.supervisor.stopping import with_end_of_workers
from distlaunch.transports.failure import Kind, LinkFailure
from distlaunch.wording import counted, listed, span_words

HEALTHY_S = 300.0
"""Seconds after which an attempt counts as healthy, which ends a series of failures."""
BACKOFF_MAX_S = 300.0
MAX_PORT_MOVES = 3
MAX_GROWTHS, GROWTHS_S = 3, 3600.0
"""Maximum number of restarts within GROWTHS_S to include the same node, whose connection may be unstable."""


def attempt_failed(found: AttemptFailed, state: State, now: float) -> Step:
    """Restart if the job allows it, else end the job. Only the first failure of an attempt counts."""
    if state.phase not in (Phase.PREPARING, Phase.RUNNING):
        return state, found.also
    most, cause = state.spec.restarts.most, found.cause
    recent = len(_recent(state, Why.FAILURE, now))
    this = Restart(now, Why.FAILURE, cause, _lived_s(state, now))
    left = _fence_words(state, cause.node, now, waits=False)
    if why := "" if state.warned else _excluded_words(state, (*state.restarts, this)):
        return state, (_excluded(cause, why), *left)
    if most == 0:
        return state, (JobOver(cause), *left)
    if state.warned or recent >= most:
        why = "received a termination warning" if state.warned else _used_up_words(state)
        return state, (JobOver(cause.noted(f"; not restarting: {why}", final=False)), *left)
    state, done = _restart(state, Why.FAILURE, cause, f"restart {recent + 1} of {most}", now)
    return state, (*done, *found.also)


def _excluded(cause: Cause, why: str) -> JobOver:
    """Return the end of a job that must not be requeued either."""
    return JobOver(cause.noted(f"; not restarting: {why}", final=True))


def _excluded_words(state: State, failures: tuple[Restart, ...]) -> str:
    """Return why no attempt may follow the last of these failures, regardless of their number, or ""."""
    if failures[-1].why is not Why.FAILURE:
        return ""
    return _unlisted_words(failures[-1].cause, state.spec.restarts) or _repeated_words(state, failures[-2:])


def _unlisted_words(cause: Cause, limit: Restarts) -> str:
    """Return a phrase naming the key that rules out a restart, or "" if none does.

    The status of an exit takes precedence over its kind.
    """
    is_exit, on = cause.kind == "exit", limit.on or ()
    keys = (cause.exit_status, cause.kind) if is_exit else (cause.kind,)
    decisive = next((key for key in keys if key in on or key in limit.never), None)
    if decisive in on or (decisive is None and limit.on is None):
        return ""
    what = f"exit status {cause.exit_status}" if is_exit else cause.kind
    return f"restarts.never includes {what}" if decisive else f"restarts.on doesn't include {what}"


def is_excluded(state: State) -> bool:
    """Return whether no attempt may follow the failure that ends the job, regardless of their number."""
    failed = state.verdict and state.verdict.cause and state.verdict.cause.kind
    return bool(failed and _excluded_words(state, (*state.restarts[: state.attempt], _last_failure(state))))


def _last_failure(state: State) -> Restart:
    """Return the failure that ends the job as if a restart had followed."""
    assert state.verdict
    assert state.verdict.cause
    if len(state.restarts) > state.attempt:  # the job ended during the restart
        return state.restarts[-1]._replace(cause=state.verdict.cause)
    at, started_at = state.verdict.at, state.started_at
    return Restart(at, Why.FAILURE, state.verdict.cause, 0.0 if started_at is None else at - started_at)


def _repeated_words(state: State, failures: tuple[Restart, ...]) -> str:
    """Return a message if the same exception ended both of the last two attempts early, else ""."""
    first, last = failures[0], failures[-1]
    same = len(failures) == 2 and first.why is Why.FAILURE and first.cause.raised == last.cause.raised
    if not same or state.spec.restarts.repeat or max(first.lived_s, last.lived_s) >= HEALTHY_S:
        return ""
    return repetition_words(state, last.cause)


def repetition_words(state: State, cause: Cause) -> str:
    """Return a message that a rank raised the same exception again, or "" if it raised none.

    The controller shows it instead of requeueing the job if `early_exception` returns the same digest as at
    the previous requeue.
    """
    if cause.raised is None or cause.rank is None:
        return ""
    what = f"{state.called(cause.rank)} raised the same {cause.raised.words}"
    return f"{what} as in the previous attempt (to restart anyway, set restarts.repeat: true)"


def early_exception(state: State) -> str:
    """Return a digest of the exception that ended the job early, or "", for a comparison after a requeue.

    The exception itself isn't recorded, because its message may contain a secret.
    """
    if not state.verdict or not state.verdict.cause or not state.verdict.cause.raised:
        return ""
    last = _last_failure(state)
    if state.spec.restarts.repeat or last.lived_s >= HEALTHY_S:
        return ""
    import hashlib  # loads OpenSSL, and few jobs are requeued

    return hashlib.sha256(repr(last.cause.raised).encode()).hexdigest()[:16]


def _used_up_words(state: State) -> str:
    limit, key = state.spec.restarts, "restarts.max" if state.spec.places else "--max-restarts"
    times = {1: "once", 2: "twice"}.get(limit.most, f"{limit.most} times")
    span = span_words(limit.window_s)
    when = "" if limit.window_s == FOREVER_S else f" in the last {'hour' if span == '1 h' else span}"
    return f"already restarted {times}{when} ({key})"


def start_again(found: StartAgain, state: State, now: float) -> Step:
    """Start a new attempt although none has failed, but not endlessly. The decider of `StartAgain`."""
    if found.why is Why.PORT and len(_recent(state, Why.PORT, now)) >= MAX_PORT_MOVES:
        note = f"; not restarting: this already happened on {MAX_PORT_MOVES} other ports"
        return state, (JobOver(found.cause.noted(note, final=False)),)
    return _restart(state, found.why, found.cause, found.what, now)


def node_lost(found: NodeLost, state: State, now: float) -> Step:
    """Fail the attempt if the lost node takes part in it. Otherwise only report the loss.

    The decider of `NodeLost`.
    """
    fenced = _fence_words(state, found.node, now)
    if state.phase is not Phase.RESTARTING and found.node in state.members:
        return state, (AttemptFailed(found.cause, fenced),)  # shown if a restart follows
    warning = () if found.told else (ShowMessage("warning", found.cause.text),)
    return state, (*warning, *fenced)


def node_leaving(found: NodeLeaving, state: State, now: float) -> Step:
    """Handle a node that will be lost in a moment. The decider of `NodeLeaving`."""
    if state.phase is not Phase.RESTARTING and found.node in state.members:
        return state, (AttemptFailed(found.cause),)
    # A scheduler that ends the job stops the agents of all nodes, often in a restart after it lost one.
    may_end = state.spec.allocation and state.spec.allocation.answers and found.cause.agent_signum
    hidden = may_end and state.phase is Phase.RESTARTING
    return state, () if hidden else (ShowMessage("warning", found.cause.text),)


def _fence_words(state: State, node: int | None, now: float, waits: bool = True) -> tuple[ShowMessage, ...]:
    """Report how long ranks may be running on a lost node. A restart `waits` for them."""
    fence_at = None if node is None else state.due_at(Timer.FENCE, node)
    if node is None or fence_at is None:
        return ()
    span = f"{fence_at - now:.0f} s"
    text = f"its ranks exit within {span}"
    if waits:
        text = f"waiting up to {span} for its ranks to exit, or for it to reconnect"
    return (ShowMessage("warning", f"{state.label(node)}: {text}"),)


def _recent(state: State, why: Why, now: float) -> list[Restart]:
    """Return the restarts that count against a limit: those within its window."""
    window_s = state.spec.restarts.window_s
    return [restart for restart in state.restarts if restart.why is why and now - restart.at < window_s]


def node_back(found: NodeBack, state: State, now: float) -> Step:
    """Use a node that has connected: now, at the next restart, or not at all. The decider of `NodeBack`."""
    back = f"{state.label(found.node)} {'joined' if found.new else 'is back'}"
    if state.phase is Phase.RESTARTING:
        return state, (ShowMessage("info", back),) if state.wait_told else ()
    complete = len(state.members) >= len(state.spec.nodes) or found.node in state.members
    if complete or state.warned:  # after a termination warning, the ranks are saving their work
        return state, ()
    if found.node in repeatedly_failed(state):
        when = "after causing three failures in a row, it is used only if too few others are left"
        return state, (ShowMessage("info", f"{back}; {when}"),)
    # A failure that is being judged causes a restart by itself, and ranks that have finished won't run again.
    ending = state.suspect or state.asked or state.workers.counts.succeeded
    lately = [each for each in state.restarts if each.why is Why.GROWTH and now - each.at < GROWTHS_S]
    comes_and_goes = sum(each.cause.node == found.node for each in lately) >= MAX_GROWTHS
    if state.spec.membership.grow == "now" and not (ending or comes_and_goes):
        cause = Cause(back, Exit.OK, now, node=found.node)
        return state, (StartAgain(Why.GROWTH, cause, "restarting to include it"),)
    return state, (ShowMessage("info", f"{back}; it takes part from the next restart"),)


def _restart(state: State, why: Why, cause: Cause, what: str, now: float) -> Step:
    """Stop the workers of this attempt, and set the timers that the restart waits for.

    `what` describes the restart in the message.
    """
    lived_s = _lived_s(state, now)
    evidence = capture(state) if why is Why.FAILURE else []
    delay_s = _backoff_s(state, lived_s) if why is Why.FAILURE else 0.0
    wait = f" in {delay_s:.1f} s" if delay_s else ""
    grace_s = state.spec.limits.stop_s
    restarts = (*state.restarts, Restart(now, why, cause, lived_s))
    state = state._replace(phase=Phase.RESTARTING, restarts=restarts, wait_told=False)
    state = with_end_of_workers(state.without_timers(Timer.PREPARE), Timer.CLEAR, grace_s, now)
    for timer, wait_s in ((Timer.BACKOFF, delay_s), (Timer.REJOIN, state.spec.limits.rejoin_s)):
        if wait_s:
            state = state.with_timer(timer, now + wait_s)
    error = f" ({cause.raised.words})" if cause.raised else ""
    text = f"{cause.preliminary}{error}; {what}{wait}"
    message = ShowMessage("info" if why is Why.GROWTH else "warning", text)
    busy = [i for i, n in enumerate(state.nodes) if isinstance(n, Linked) and may_be_occupied(n)]
    return state, (message, *evidence, *(Send(i, StopWorkers(grace_s, cause.preliminary)) for i in busy))


def _lived_s(state: State, now: float) -> float:
    """Return how long the current attempt has been running."""
    return now - state.started_at if state.started_at and state.phase is Phase.RUNNING else 0.0


def _backoff_s(state: State, lived_s: float) -> float:
    """Return 0 after a healthy attempt, else a delay that doubles with each failure in a row, with jitter."""
    in_a_row = 0
    for restart in reversed(state.restarts):
        in_a_row += restart.why is Why.FAILURE
        if restart.lived_s >= HEALTHY_S:
            break
    if in_a_row == 0 or lived_s >= HEALTHY_S:
        return 0.0
    doubled = state.spec.restarts.backoff_s * 2.0 ** min(in_a_row - 1, 30)
    return min(doubled, BACKOFF_MAX_S) * (0.75 + 0.5 * ((state.chance + in_a_row * 0.618034) % 1.0))


def end_if_excluded(state: State, now: float) -> Step:
    """End the job if a late report has changed the root cause to one that excludes a further attempt.

    The first rule of RESTARTING.
    """
    why = _excluded_words(state, state.restarts)
    return state, (_excluded(state.restarts[-1].cause, why),) if why else ()


def end_if_finished(state: State, now: float) -> Step:
    """End the job if it had succeeded before its ranks were told to stop for a restart.

    The second rule of RESTARTING.
    """
    return state, (JobOver(),) if state.restarts[-1].why is Why.GROWTH and state.succeeded else ()


def include_again(state: State, now: float) -> Step:
    """Lift an exclusion if a late report has changed the root cause to one that no rule excludes.

    Then the job may be requeued. The first rule of STOPPING.
    """
    cause = state.cause
    if not (cause and cause.final and cause.note) or is_excluded(state):
        return state, ()
    text = cause.text.removesuffix(cause.note)
    return state.with_cause(cause._replace(text=text, note="", final=False)), ()


def go_on_when_cleared(state: State, now: float) -> Step:
    """Start the next attempt as soon as that is safe and enough nodes are available.

    The third rule of RESTARTING.
    """
    if state.due_at(Timer.BACKOFF) is not None or any(map(may_be_occupied, state.nodes)):
        return state, ()
    found = choose_members(state)
    if len(found) < len(state.spec.nodes) and may_come(state):
        return state, ()  # wait until that node answers or is overdue
    if len(found) >= state.spec.fewest:
        return _next_attempt(state, found, now)
    if any(isinstance(node, Leaving) for node in state.nodes):
        return state, ()  # wait until its link has ended and the node can be connected again
    if state.due_at(Timer.REJOIN) is None or not returning(state):
        return state, (_nobody_came(state, len(found), now),)
    return _waiting(state.without_timers(Timer.CLEAR), len(found), now)


def _waiting(state: State, found: int, now: float) -> Step:
    """Report once which nodes the job is waiting for, and for how long."""
    until = state.due_at(Timer.REJOIN)
    if state.wait_told or until is None:
        return state, ()
    left, names = _left_words(state, found), listed(returning(state))
    key = state.spec.key_words("timeouts.rejoin")
    text = f"{left}; waiting up to {until - now:.0f} s for {names} to return{key}"
    return state._replace(wait_told=True), (ShowMessage("warning", text),)


def fence_due(state: State, node: int, now: float) -> Step:
    """Treat a lost node as empty: its workers must have ended by now. Another host may take its place."""
    reap = (Send(node, Reap(state.run_id, 0.0)),) if state.replaces_host(node) else ()
    if reap:
        state = with_time_to_return(state, now)
    return state.with_node(node, emptied(state.nodes[node])), reap


def _next_attempt(state: State, found: tuple[int, ...], now: float) -> Step:
    """Prepare an attempt on the nodes `found`, and report which nodes are new or left out."""
    before = [state.label(index) for index in state.members]
    names = [state.label(index) for index in found]
    state = state.without_timers(Timer.CLEAR, Timer.STOP_MESSAGE, Timer.REJOIN)
    text = f"continuing with {len(names)} of {len(state.spec.nodes)} nodes: {', '.join(names)}"
    message = () if names == before else (ShowMessage("info", text),)
    left_out = [i for i in state.members if i not in found and is_usable(state.nodes[i])]
    why = "root cause of three failures in a row; continuing without it"
    warnings = [ShowMessage("warning", f"{state.label(index)}: {why}") for index in left_out]
    state, todo = preparing.prepare(state, found, now)
    return state, (*warnings, *message, *todo)


def _left_words(state: State, found: int) -> str:
    return f"only {found} of {counted(state.spec.fewest, 'required node')} available"


def _nobody_came(state: State, found: int, now: float) -> JobOver:
    """End the job for lack of nodes. The root cause is the last attempt's, or the loss of other nodes."""
    cause, after = state.restarts[-1].cause, ""
    gone = [index for index in state.members if is_missing(state.nodes[index])]
    told = cause.kind == "node_lost" and cause.node in (None, *gone)  # None: this machine was suspended
    if gone and not told:
        names, verb = listed([state.label(index) for index in gone]), "was" if len(gone) == 1 else "were"
        text, after = f"{names} {verb} lost and did not return", f"; reason for the restart: {cause.text}"
        cause = Cause(text, Exit.NODE_LOST, now, node=gone[0], kind="node_lost")
    waited = "" if returning(state) else "; no lost node can return"
    if state.due_at(Timer.REJOIN) is None:
        key = state.spec.key_words("timeouts.rejoin")
        waited = f" after waiting {span_words(state.spec.limits.rejoin_s)}{key}"
    for index, node in enumerate(state.nodes):
        unfit = unfit_words(node)
        waited += f"; {state.label(index)} can't be used: {unfit}" if unfit else ""
    text = f"{cause.text}; {_left_words(state, found)}{waited}{after}"
    return JobOver(cause._replace(text=text))


def clearing_overdue(state: State, now: float) -> Step:
    """Drop and fence the nodes that have not confirmed the end of their workers in time."""
    actions: list[Action] = []
    for i, node in enumerate(state.nodes):
        if isinstance(node, Linked) and may_be_occupied(node) and state.due_at(Timer.FENCE, i) is None:
            text = f"{state.label(i)} did not confirm its cleanup; treating the node as lost"
            actions += [Drop(i), ShowMessage("warning", text)]
            state = lost(state, i, node, LinkFailure(Kind.SILENT), now)
            actions += _fence_words(state, i, now)
    return state, tuple(actions)
