"""The end of a job: everything is stopped, swept and waited for, whatever the reason."""

import signal

from distlaunch.errors import Exit
from distlaunch.supervisor.actions import Action, Close, Drop, Finish, Notice
from distlaunch.supervisor.events import Interrupted, OutputFlows, OutputLost, Stuck, Swept
from distlaunch.supervisor.nodes import (
    Connecting,
    End,
    Linked,
    Lost,
    Retrying,
    emptied,
    is_missing,
    is_over,
    may_be_occupied,
    no_more,
)
from distlaunch.supervisor.state import Cause, Phase, State, Step
from distlaunch.supervisor.timers import Timer
from distlaunch.supervisor.workers import Worker

STOP_MARGIN_S = 14.0
"""Seconds beyond the grace until a node that does not confirm its clean-up is given up: all is over at 15."""
DRAIN_S = 30.0
"""Seconds without output after which a clean node is not waited for any longer."""
STOP_NOTICE_S = 3.0
"""Seconds after which it is told who has not ended yet, where the grace is longer."""
ONE_WISH_S = 0.1
"""Seconds within which several signals are one wish: wrappers pass on what the terminal has sent to all."""
NO_SUSPENDING = "a run can't be suspended: start it with nohup, or in tmux, to leave the terminal"
MAX_NAMED = 8
"""Ranks or nodes named in one line."""


def end_job(state: State, cause: Cause | None, now: float, signum: int = signal.SIGTERM) -> Step:
    """Begin to end the job everywhere, its workers by `signum`; `cause` None is success.

    A job that is ending keeps its cause.
    """
    if state.phase is Phase.STOPPING:
        return state, ()
    grace_s = state.spec.timeouts.stop_s if cause else 0.0
    state = state.unwatched()._replace(phase=Phase.STOPPING, cause=cause, timers={}, ended_at=now)
    state = with_end_of_workers(state, Timer.CLOSE, grace_s, now)
    said = (Notice("error", cause.text),) if cause else ()
    state, closing = _close_all(state, grace_s, signum)
    state, finished = all_closed(state, now)
    return state, (*said, *closing, *finished)


def job_overdue(state: State, now: float) -> Step:
    """The job's own time is over."""
    text = f"the job's time limit of {state.spec.timeouts.job_s:g} s has passed"
    return end_job(state, Cause(text, Exit.TIMEOUT, now), now)


def with_end_of_workers(state: State, limit: Timer, grace_s: float, now: float) -> State:
    """`state` from the moment that workers are told to end: until `limit` that is waited for."""
    state = state.unwatched().with_timer(limit, now + grace_s + STOP_MARGIN_S)
    return state.with_timer(Timer.STOP_NOTICE, now + STOP_NOTICE_S) if grace_s > STOP_NOTICE_S else state


def stop_notice_due(state: State, now: float) -> Step:
    """Say who has not ended yet, and how long that is waited for."""
    slow = _still_running(state)
    limit = state.due_at(Timer.CLOSE) or state.due_at(Timer.CLEAR) or 0.0
    left_s = limit - STOP_MARGIN_S - now
    if not slow or left_s <= 0.0:
        return state, ()
    names = listed([state.named(worker.rank, f"pid {worker.pid}") for worker in slow])
    return state, (Notice("warning", f"waiting for {names} to end; SIGKILL follows in {left_s:.0f} s"),)


def _still_running(state: State) -> list[Worker]:
    parts = state.plan.nodes if state.plan else ()
    ranks = [rank for part in parts if may_be_occupied(state.nodes[part.node]) for rank in part.ranks]
    return [worker for worker in map(state.worker, ranks) if worker.running]


def _close_all(state: State, grace_s: float, signum: int = signal.SIGTERM) -> Step:
    actions: list[Action] = []
    for i, node in enumerate(state.nodes):
        if isinstance(node, Linked) or node is End.CLEAN:
            actions.append(Close(i, grace_s, signum))
        elif isinstance(node, Connecting | Retrying):
            actions.append(Drop(i))
            state = state.with_node(i, no_more(node, node.failure))
            state = state.without_timers(Timer.RETRY, Timer.ANSWER, node=i)
    return state, tuple(actions)


def on_swept(event: Swept, state: State, now: float) -> Step:
    """A node is clean: nothing of the job is left there."""
    node = state.nodes[event.node]
    if not isinstance(node, Linked):
        return state, ()
    if may_be_occupied(node) and (is_missing(node) or event.generation != state.generation):
        return state, ()  # what is there is not of this agent, or this generation
    if state.phase is not Phase.STOPPING:
        return state.with_node(event.node, emptied(node)), ()
    state = with_time_to_drain(state.with_node(event.node, End.CLEAN), now)
    if event.leftovers and state.cause is None:
        whose = "its worker" if event.leftovers == 1 else "their workers"
        text = f"{state.label(event.node)}: killed {processes_words(event.leftovers)} that outlived {whose}"
        return state, (Notice("warning", text),)
    return state, ()


def with_time_to_drain(state: State, now: float) -> State:
    """`state`, with time for the rest of the output once no node is left that has to clean up."""
    if any(isinstance(node, Linked) for node in state.nodes):
        return state
    return state.with_timer(Timer.CLOSE, now + DRAIN_S)


def on_output_flows(event: OutputFlows, state: State, now: float) -> Step:
    """A clean node is still delivering: it has more time."""
    return (with_time_to_drain(state, now) if state.phase is Phase.STOPPING else state), ()


def on_stuck(event: Stuck, state: State, now: float) -> Step:
    """Some processes resist SIGKILL: say which."""
    names = listed([f"{process.get('command')} (pid {process.get('pid')})" for process in event.processes])
    return state, (Notice("warning", f"{state.label(event.node)}: can't be killed: {names}"),)


def on_output_lost(event: OutputLost, state: State, now: float) -> Step:
    """A node could not keep some output: say how much."""
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None:
        return state, ()
    stream = "stderr" if event.stream else "stdout"
    return state, (
        Notice("warning", f"{event.size} bytes of {state.called(rank)}'s {stream} were lost on its node"),
    )


def all_closed(state: State, now: float) -> Step:
    """Finish once every node is done with."""
    if state.phase is not Phase.STOPPING or not all(map(is_over, state.nodes)):
        return state, ()
    return state._replace(phase=Phase.DONE, timers={}), (Finish(),)


def on_interrupted(event: Interrupted, state: State, now: float) -> Step:
    """Stop gracefully at the first signal, kill at the second, leave at the third."""
    if event.signum == signal.SIGTSTP:
        # Silent for longer than the lease, we would be taken for dead, and the job would end.
        return state, (Notice("warning", NO_SUSPENDING),)
    insists = event.signum in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
    if insists and state.interrupted_at is not None and now - state.interrupted_at < ONE_WISH_S:
        return state, ()
    if insists:
        state = state._replace(interrupts=state.interrupts + 1, interrupted_at=now)
    if state.phase is not Phase.STOPPING:
        name = signal.Signals(event.signum).name
        passed_on = event.signum if name in state.spec.invocation.signals else signal.SIGTERM
        # A rank that has failed is the cause, though it was not told yet.
        cause = state.suspect or Cause(f"stopped by {name}", 128 + event.signum, now)
        return end_job(state, cause, now, passed_on)
    # A terminal that closes sends SIGHUP and breaks both streams: that is one wish.
    return _interrupted_again(state) if insists else (state, ())


def _interrupted_again(state: State) -> Step:
    if state.interrupts == 1:
        return state, (Notice("info", "already stopping; press Ctrl-C again to kill now"),)
    if state.interrupts == 2:
        state, closing = _close_all(state.unwatched(), 0.0)
        return state, (Notice("info", "killing the workers; press Ctrl-C again to exit now"), *closing)
    return state._replace(phase=Phase.DONE, timers={}), (
        Notice("warning", "exited; agents are still cleaning up"),
        Finish(),
    )


def close_overdue(state: State, now: float) -> Step:
    """Give up the nodes that have not confirmed their clean-up in time."""
    said: list[Action] = []
    for i, node in enumerate(state.nodes):
        if not is_over(node):
            clean = node is End.CLEAN
            what = "its output is incomplete" if clean else "it did not confirm its clean-up"
            said += [Drop(i), Notice("warning", f"{state.label(i)}: given up, {what}")]
            state = state.with_node(i, End.CLOSED if clean else Lost(occupied=may_be_occupied(node)))
    state, actions = all_closed(state, now)
    return state, (*said, *actions)


def processes_words(number: int) -> str:
    """So many processes for people."""
    return f"{number} process{'es' if number != 1 else ''}"


def listed(names: list[str]) -> str:
    """Some names for people; the number of the rest."""
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"
