"""The end of a job. Regardless of the reason, all nodes are stopped, swept and waited for.

Every `JobOver` arrives here through `allocation_end`.
"""

import signal

from distlaunch.agent.messages import AllSent, Close, Collect, Dismiss, Interrupted, Stuck, Swept
from distlaunch.agent.wire import WARNINGS
from distlaunch.errors import Exit
from distlaunch.supervisor.actions import Action, Drop, Finish, Send, ShowMessage
from distlaunch.supervisor.events import EndOvertaken, JobOver, OutputFlows, Step, TerminationWarning
from distlaunch.supervisor.nodes import (
    Connecting,
    End,
    Exited,
    Linked,
    Lost,
    RankState,
    Retrying,
    WorkerPhase,
    emptied,
    given_up,
    is_missing,
    is_over,
    may_be_occupied,
)
from distlaunch.supervisor.root_cause import capture
from distlaunch.supervisor.state import Cause, Phase, State, Timer, Verdict
from distlaunch.transports.transport import Joined
from distlaunch.wording import NO_SUSPENDING, NO_SUSPENDING_TORCHRUN, counted, listed, span_words

STOP_MARGIN_S = 14.0
"""Seconds from the end of the grace period until the controller gives up on a node that hasn't confirmed its
cleanup. The job ends within 15 s."""
DRAIN_S = 30.0
"""Seconds without output after which the controller gives up on a clean node."""
LATE_S = 3.0
"""Seconds that a stopping job waits for the scheduler's late answer on why it is ending."""
STOP_MESSAGE_S = 3.0
"""Seconds after which the ranks still running are listed, if the grace period is longer."""
SAME_SIGNAL_S = 1.0
"""Seconds within which a signal that a scheduler sends to all processes of a job reaches the last of them."""
ONE_WISH_S = 0.1
"""Seconds within which several signals count as one, since wrappers pass on a signal that the terminal has
already sent to every process."""


def end_job(found: JobOver, state: State, now: float) -> Step:
    """Begin to end the job on all nodes. A job that is already stopping keeps its root cause."""
    if state.phase is Phase.STOPPING:
        return state, ()
    cause = found.cause
    grace_s = state.spec.limits.stop_s if found.grace_s is None else found.grace_s
    grace_s = grace_s if cause or state.workers.counts.alive else 0.0
    evidence = [] if cause is None or cause.cancelled or cause.scheduled else capture(state)
    state = state.unwatched()._replace(phase=Phase.STOPPING, verdict=Verdict(cause, now), timers={})
    if state.asked:
        state = state.with_timer(Timer.ASK, now + LATE_S)
    state = with_end_of_workers(state, Timer.CLOSE, grace_s, now)
    state, closing = _close_all(state, grace_s, found.signum)
    return state, ((_announcement(state, cause, grace_s), *evidence, *closing) if cause else closing)


def _announcement(state: State, cause: Cause, grace_s: float) -> ShowMessage:
    """Return the message that announces a stop: its cause or, if the user stopped the job, its duration."""
    left = len(_still_running(state))
    if cause.scheduled or not (cause.cancelled and left and grace_s):
        return ShowMessage("error", cause.preliminary)
    name = signal.Signals(cause.exit_status - 128).name
    request = cause.text.removeprefix("stopped by ")  # the signal, or `distlaunch stop`
    them = "it" if left == 1 else "them"
    how = request if request.startswith("`") else "Ctrl-C" if name == "SIGINT" else name
    again = f"another {how} kills {them}"
    text = f"received {request}: waiting up to {span_words(grace_s)} for {counted(left, state.unit)} to exit"
    again += " without collecting files" if state.spec.collect.paths else ""
    return ShowMessage("warning", f"{text}; {again}" if state.interrupts else text)


def job_overdue(state: State, now: float) -> Step:
    """End a job that has exceeded its time limit."""
    text = f"the job timed out after {span_words(state.spec.limits.job_s or 0.0)} (timeouts.job)"
    return state, (JobOver(Cause(text, Exit.TIMEOUT, now)),)


def with_end_of_workers(state: State, limit: Timer, grace_s: float, now: float) -> State:
    """Return `state` after workers were told to stop, with the timers for their end.

    When `limit` expires, the controller gives up on nodes that haven't confirmed that their workers have
    ended. `limit` is CLEAR before a restart, and CLOSE at the end of the job.
    """
    state = state.unwatched().with_timer(limit, now + grace_s + STOP_MARGIN_S)
    return state.with_timer(Timer.STOP_MESSAGE, now + STOP_MESSAGE_S) if grace_s > STOP_MESSAGE_S else state


def stop_message_due(state: State, now: float) -> Step:
    """List the ranks still running, and announce when they will be killed."""
    slow = _still_running(state)
    limit = state.due_at(Timer.CLOSE) or state.due_at(Timer.CLEAR) or 0.0
    left_s = limit - STOP_MARGIN_S - now
    if not slow or left_s <= 0.0:
        return state, ()
    names = listed([state.named(worker.rank, f"pid {worker.pid}") for worker in slow])
    return state, (ShowMessage("warning", f"waiting for {names} to exit; SIGKILL in {left_s:.0f} s"),)


def _still_running(state: State) -> list[RankState]:
    parts = state.plan.nodes if state.plan else ()
    ranks = [rank for part in parts if may_be_occupied(state.nodes[part.node]) for rank in part.ranks]
    return [state.workers[rank] for rank in ranks if state.workers[rank].running]


def _close_all(
    state: State, grace_s: float, signum: int = signal.SIGTERM
) -> tuple[State, tuple[Action, ...]]:
    """Send all connected nodes `Close`, and drop those that are being connected."""
    actions: list[Action] = []
    close = Close(grace_s, signum, state.outcome, state.cause.preliminary if state.cause else "")
    for i, node in enumerate(state.nodes):
        if isinstance(node, Linked) or node is End.CLEAN:
            there = state.interrupts < 2 and not is_missing(node)  # one that is back may not become clean
            actions.append(Send(i, close._replace(collects=there and collect_of(state, i) is not None)))
        elif isinstance(node, Connecting | Retrying):
            if isinstance(node, Connecting) and isinstance(state.spec.pool[i].reach, Joined):
                actions.append(Send(i, close))  # its launcher reads the outcome before the end of the link
            actions.append(Drop(i))
            state = state.with_node(i, given_up(node, node.failure))
            state = state.without_timers(Timer.RETRY, Timer.ANSWER, node=i)
    return state, tuple(actions)


def collect_of(state: State, node: int) -> Collect | None:
    """Return the files that a node sends at the end of the job; None = it sends none.

    The controller ignores files from other nodes.
    """
    collect, spec = state.spec.collect, state.spec
    members = state.members if state.started_at is not None or state.restarts else ()
    chosen = members[:1] if collect.nodes == "rank 0" else members
    listed = not isinstance(collect.nodes, tuple) or state.label(node) in collect.nodes
    if not collect.paths or node not in chosen or not listed:
        return None
    workdir = spec.program_of(spec.pool[node]).workdir
    return Collect(collect.paths, workdir, collect.limit, spec.logs.directory)


def without_files(state: State) -> dict[int, str]:
    """Return the nodes to collect from that aren't in the last attempt, with reasons: listed or lost ones."""
    hosts, began = state.spec.collect.nodes, state.started_at is not None or state.restarts
    if hosts == "rank 0" or not began or state.interrupts > 1:
        return {}
    others = [i for i in range(len(state.nodes)) if i not in state.members]
    lost = {i: "the node was lost" for i in others if is_missing(state.nodes[i])}
    if hosts == "all":
        return lost
    idle = "the node took no part in the last attempt"
    return {i: lost.get(i, idle) for i in others if state.label(i) in hosts}


def on_swept(event: Swept, state: State, now: float) -> Step:
    """Record that a node is clean: nothing from the attempt is left on it."""
    node = state.nodes[event.node]
    if not isinstance(node, Linked):
        return state, ()
    if may_be_occupied(node) and (is_missing(node) or event.attempt != state.attempt):
        return state, ()  # the workers there belong to another agent or attempt
    if state.phase is not Phase.STOPPING:
        return state.with_node(event.node, emptied(node)), ()
    state = state.with_node(event.node, End.CLEAN)
    if event.leftovers and state.cause is None:
        whose = "its worker" if event.leftovers == 1 else "their workers"
        killed = counted(event.leftovers, "process")
        text = f"{state.label(event.node)}: killed {killed} that outlived {whose}"
        return state, (ShowMessage("warning", text),)
    return state, ()


def on_all_sent(event: AllSent, state: State, now: float) -> Step:
    """Let an agent exit, since all of its output has arrived."""
    if state.nodes[event.node] is End.CLEAN:
        state = state.with_node(event.node, End.DELIVERED)
    return state, (Send(event.node, Dismiss()),)


def drain_when_clean(state: State, now: float) -> Step:
    """Request the remaining data once every node is clean. The second rule of STOPPING."""
    if state.due_at(Timer.CLOSE) is None or state.nodes.counts.linked:
        return state, ()
    return _drain(state.without_timers(Timer.CLOSE), now)


def _drain(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    """Request the files to collect, which no rank changes anymore, and limit the time for the rest."""
    clean = (i for i, node in enumerate(state.nodes) if node is End.CLEAN and state.interrupts < 2)
    requests = [Send(i, collect) for i in clean if (collect := collect_of(state, i))]
    return state.with_timer(Timer.DRAIN, now + DRAIN_S), tuple(requests)


def on_output_flows(event: OutputFlows, state: State, now: float) -> Step:
    """Extend the time for the remaining output while clean nodes are still delivering it."""
    draining = state.due_at(Timer.DRAIN) is not None
    return (state.with_timer(Timer.DRAIN, now + DRAIN_S) if draining else state), ()


def on_stuck(event: Stuck, state: State, now: float) -> Step:
    """List processes that survived SIGKILL."""
    names = listed([f"{process.get('command')} (pid {process.get('pid')})" for process in event.processes])
    left = f"{counted(len(event.processes), 'process')} survived SIGKILL"
    advice = "kill other users' processes as root; one stuck in the kernel may exit later, or need a reboot"
    return state, (ShowMessage("warning", f"{state.label(event.node)}: {left}: {names}; {advice}"),)


def finish_when_closed(state: State, now: float) -> Step:
    """Finish once nothing more can arrive from any node. The last rule of STOPPING."""
    if state.asked or state.nodes.counts.over < len(state.nodes):
        return state, ()
    cause = state.cause
    if cause and cause.exit and any(worker.phase is WorkerPhase.VANISHED for worker in state.workers):
        # A rank on a lost node may have failed earlier.
        state = state.with_cause(cause._replace(text=cause.preliminary, inferred=True))
    return state._replace(phase=Phase.DONE, timers={}), (Finish(),)


def on_interrupted(event: Interrupted, state: State, now: float) -> Step:
    """Stop gracefully at the first signal, kill at the second, exit at the third.

    SIGTSTP only shows a message, a termination warning goes to `allocation_end`, and copies of a signal that
    arrive together count once.
    """
    if event.signum == signal.SIGTSTP:
        # If suspended for longer than the lease, this process would count as dead, and the job would end.
        why = NO_SUSPENDING_TORCHRUN if state.spec.invocation.shares_stdio else NO_SUSPENDING
        queued = state.spec.allocation and state.spec.allocation.queued  # its scheduler is suspending it
        return state, () if queued else (ShowMessage("warning", why),)
    if event.signum in WARNINGS and signal.Signals(event.signum).name not in state.spec.invocation.signals:
        return state, (TerminationWarning(),)
    insists = event.signum in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
    if insists and state.interrupted_at is not None:
        # A scheduler signals the launchers of all nodes, and each passes the signal on.
        one_wish_s = ONE_WISH_S if event.node == state.interrupted_by else SAME_SIGNAL_S
        if now - state.interrupted_at < one_wish_s:
            return state, ()
    if insists:
        state = state._replace(interrupts=state.interrupts + 1, interrupted_at=now, interrupted_by=event.node)
    if insists and event.signum != signal.SIGTERM:
        state = state._replace(unwanted=True)
    name = signal.Signals(event.signum).name
    where = "" if event.node is None else f" on {state.label(event.node)}"
    how = "`distlaunch stop`" if event.by_command else f"{name}{where}"
    stopped = Cause(f"stopped by {how}", 128 + event.signum, now, cancelled=True)
    if state.phase is not Phase.STOPPING:
        passed_on = event.signum if name in state.spec.invocation.signals else signal.SIGTERM
        # A rank that has failed is the root cause, even if its failure has not been reported yet, unless a
        # scheduler may have stopped its peers.
        asks = event.signum == signal.SIGTERM and state.spec.scheduler_answers
        cause = stopped if asks or state.suspect is None else state.suspect
        insisted = state.interrupts > 1  # the first one is held back until the scheduler has answered
        return state, (JobOver(cause, passed_on, 0.0 if insisted else None),)
    if state.cause and state.cause.agent_signum == event.signum and now - state.ended_at < SAME_SIGNAL_S:
        return state.with_cause(stopped), ()  # the signal went to all processes, and reached an agent first
    # A terminal that closes sends SIGHUP and breaks both streams. That counts as one request.
    return _interrupted_again(state, name, event.by_command, stopped) if insists else (state, ())


def _interrupted_again(state: State, name: str, by_command: bool, stopped: Cause) -> Step:
    """Handle a signal to a job that is already stopping."""
    by_signal = "press Ctrl-C" if name == "SIGINT" else f"send {name}"
    again = "run `distlaunch stop`" if by_command else by_signal
    overtaken = (EndOvertaken(),) if name == "SIGTERM" else ()
    ended = state.plan is not None and all(isinstance(each.phase, Exited) for each in state.workers)
    collects = bool(state.spec.collect.paths)
    if state.interrupts == 1:
        if state.cause and state.cause.scheduled:
            # Without a grace period, the signal is part of the same termination.
            return (
                _in_grace_period(state, stopped, overtaken, by_command) if state.cause.later else (state, ())
            )
        if not ended:
            files = ", without collecting files" if collects else ""
            text = f"already stopping; {again} again to kill the workers now{files}"
            return state, (ShowMessage("info", text), *overtaken)
        rest = "stop collecting files" if collects else "end the job now"
        text = f"all ranks have ended; {again} again to {rest}"
        return state, (ShowMessage("info", text), *overtaken)
    if state.interrupts == 2:
        state, closing = _close_all(state.unwatched()._replace(asked=None).without_timers(Timer.ASK), 0.0)
        after = "no longer collecting files" if collects else "still waiting for the nodes"
        what = after if ended else "killing the workers"
        return state, (ShowMessage("info", f"{what}; {again} again to exit now"), *closing)
    return state._replace(phase=Phase.DONE, timers={}), (
        ShowMessage("warning", "exiting without waiting for the agents, which kill all remaining workers"),
        Finish(),
    )


def _in_grace_period(
    state: State, stopped: Cause, overtaken: tuple[EndOvertaken, ...], by_command: bool
) -> Step:
    """Cancel a job that the scheduler would end only later, if the user wants that. Its ranks are stopping.

    After a SIGTERM, ask the scheduler: the period may have ended, or the job was cancelled.
    """
    if overtaken and not by_command:
        return state, overtaken
    return state.with_cause(stopped), (ShowMessage("info", stopped.text),)


def close_overdue(state: State, now: float) -> Step:
    """Give up on nodes that have not confirmed their cleanup. If all have, give up on those with output left.

    Called when CLOSE or DRAIN expires.
    """
    actions: list[Action] = []
    late = [i for i, node in enumerate(state.nodes) if not is_over(node)]
    unclean = [i for i in late if not isinstance(state.nodes[i], End)]
    for i in unclean or late:
        if state.nodes[i] is End.DELIVERED:  # nothing is missing
            text = f"{state.label(i)}: its agent did not exit within {DRAIN_S:.0f} s"
            actions += [Drop(i), ShowMessage("warning", text)]
            state = state.with_node(i, End.CLOSED)
            continue
        late_output = f"nothing arrived for {DRAIN_S:.0f} s; its output may be incomplete"
        unconfirmed = "it did not confirm its cleanup; check that no ranks are left there"
        what = unconfirmed if unclean else late_output
        actions += [Drop(i), ShowMessage("warning", f"gave up on {state.label(i)}: {what}")]
        state = state.with_node(i, Lost(occupied=may_be_occupied(state.nodes[i])))
    state, requests = _drain(state, now) if unclean else (state, ())
    return state, (*actions, *requests)
