"""The end of an allocation: the scheduler's warning, if any, and failures caused by the end.

`step.py` passes every `AttemptFailed` and `JobOver`, most of them from `ranks`, to this part first. This part
hands failures on to `restarting`, which may return `JobOver`, and hands the end of the job on to `stopping`.

If the scheduler can be asked, a failure that it may have caused is held back until it answers. If the
scheduler is ending the job, the message says so, and the job is not restarted.
"""

import signal

from distlaunch.agent.messages import WarningReceived, WarnWorkers
from distlaunch.errors import Exit
from distlaunch.supervisor import restarting, stopping
from distlaunch.supervisor.actions import AskScheduler, Send, ShowMessage
from distlaunch.supervisor.connecting import has_finished
from distlaunch.supervisor.events import (
    AllocationReported,
    AttemptFailed,
    EndOvertaken,
    JobOver,
    LinkEnded,
    Step,
    SuccessDoubted,
    TerminationWarning,
)
from distlaunch.supervisor.nodes import Up, failure_of
from distlaunch.supervisor.state import Asked, Cause, Phase, State, Timer
from distlaunch.transports.failure import Kind
from distlaunch.wording import listed

ASK_S = 1.0
"""Seconds for the scheduler to answer. A failure must not wait longer."""
ASK_CALMLY_S = 5.0
"""Seconds for the scheduler to say when the job ends. A termination warning comes long before that."""
DOUBT_S = 10.0
"""Seconds that a success which the scheduler may have caused waits for the answer."""
SAME_S = 0.5
"""Seconds within which the agents of several nodes report the same signal."""
WITH_NODE_S = 1.0
"""Seconds within which the loss of a node is noticed after one of its ranks was killed with it."""
SPARE_S = 5.0
"""Seconds of the remaining time reserved for ending the job."""
STATUS = 128 + signal.SIGTERM
_DOWN = (Kind.SILENT, Kind.NODE_DOWN)
_BY_SCHEDULER = (128 + signal.SIGTERM, 128 + signal.SIGKILL, Exit.NODE_LOST)
_BY_SIGNALS = (128 + signal.SIGTERM, 128 + signal.SIGKILL, 128 + signal.SIGINT)


def ask_before_failing(found: AttemptFailed, state: State, now: float) -> Step:
    """Until the scheduler has been asked, hold back a failure that it may have caused.

    The decider of `AttemptFailed`. If several failures are held back, keep the one that explains the others.
    """
    if state.asked:
        known = state.asked.cause
        cause = found.cause if known is None or _explains(found.cause, known) else known
        asked = state.asked._replace(cause=cause, also=state.asked.also + found.also)
        return _hold(state.unwatched(), asked, now), ()
    may_come_from_it = found.cause.rank is None or found.cause.exit_status in _BY_SIGNALS
    if not state.spec.scheduler_answers or not may_come_from_it:
        return restarting.attempt_failed(found, state, now)
    return _ask(state.unwatched(), Asked(*found), now)


def ask_before_ending(found: JobOver, state: State, now: float) -> Step:
    """Hold back the end of a job that the scheduler may be ending: one that lacks nodes or received SIGTERM.

    The decider of `JobOver`.
    """
    if found.asked or not _may_be_by_scheduler(found.cause, state) or not state.spec.scheduler_answers:
        return stopping.end_job(found, state, now)
    asked = Asked(found.cause)
    return (_hold(state, asked, now), ()) if state.asked else _ask(state, asked, now)


def _may_be_by_scheduler(cause: Cause | None, state: State) -> bool:
    if cause is None or cause.scheduled:
        return False
    if cause.cancelled:
        return cause.exit_status == STATUS and state.interrupts < 2
    return state.phase is Phase.CONNECTING and cause.exit_status in (Exit.UNREACHABLE, Exit.NODE_LOST)


def _explains(later: Cause, held: Cause) -> bool:
    """Return whether `later` explains the failure `held`.

    A failed rank explains the failures of its peers. A lost node explains the failures of its ranks."""
    node_of_the_rank = later.rank is None and held.rank is not None and later.node == held.node
    return node_of_the_rank or (held.peer_gone and not later.peer_gone)


def termination_warning(found: TerminationWarning | WarningReceived, state: State, now: float) -> Step:
    """Pass the first termination warning on to the ranks, after asking the scheduler how long they have.

    The decider of `TerminationWarning`, and the handler of `WarningReceived`.
    """
    if state.warned or state.phase is Phase.STOPPING:
        return state, ()
    state = state._replace(warned=True)
    if state.asked:
        return state, ()
    if not state.spec.scheduler_answers:
        return _warn_ranks(state, None, now)
    return _ask(state, Asked(), now, ASK_CALMLY_S)


def _ask(state: State, asked: Asked, now: float, within_s: float = ASK_S) -> Step:
    return state._replace(asked=asked).with_timer(Timer.ASK, now + within_s), (AskScheduler(),)


def _hold(state: State, asked: Asked, now: float) -> State:
    """Hold back `asked`, too, until the scheduler answers. Failures wait less than termination warnings."""
    calmly = state.asked is not None and state.asked.cause is None
    state = state._replace(asked=asked)
    return state.with_timer(Timer.ASK, now + ASK_S) if calmly else state


def on_allocation_reported(event: AllocationReported, state: State, now: float) -> Step:
    """End the job if the scheduler is ending it. Otherwise, handle the failure as usual."""
    asked = state.asked
    if asked is None:
        return state, ()
    state = state._replace(asked=None).without_timers(Timer.ASK)
    # A grace period begins with SIGTERM for the agents. Without a failure, there is still time for a warning.
    if event.ends or (event.why and (asked.cause or state.phase is Phase.STOPPING)):
        return _ended_by_scheduler(state, event, asked, now)
    held = asked.cause if state.phase is Phase.RUNNING else None
    signum = held.agent_signum if held else None
    waits_s = SAME_S if signum else WITH_NODE_S if held and _is_kill(held) else 0.0
    if waits_s and event.ends is False and not asked.goes_on:
        return state._replace(asked=asked._replace(goes_on=True)).with_timer(Timer.ASK, now + waits_s), ()
    if signum and asked.goes_on and _all_were_stopped(state):
        name, count = signal.Signals(signum).name, len(state.members)
        text = f"stopped by {name}, sent to the agents on all {count} nodes"
        return state, (JobOver(Cause(text, 128 + signum, now, cancelled=True), asked=True),)
    return (state, ()) if state.phase is Phase.STOPPING else _resume(asked, event.left_s, state, now)


def _is_kill(cause: Cause) -> bool:
    """Return whether a rank was killed, perhaps together with its agent, as when a step is canceled."""
    return cause.rank is not None and cause.exit_status == 128 + signal.SIGKILL


def _resume(asked: Asked, left_s: float | None, state: State, now: float) -> Step:
    """Handle what was held back: the end of all ranks, a stop request, a failure or a termination warning."""
    failed = asked.cause is not None and asked.cause.rank is not None
    if state.phase is Phase.RUNNING and state.succeeded and not failed:
        return state, (JobOver(),)
    if asked.cause and (asked.cause.cancelled or state.phase is Phase.CONNECTING):
        return state, (JobOver(asked.cause, asked=True),)
    if asked.cause:
        return restarting.attempt_failed(AttemptFailed(asked.cause, asked.also), state, now)
    return _warn_ranks(state, left_s, now)


def _all_were_stopped(state: State) -> bool:
    """Return whether agents of several nodes were stopped while their ranks were running, and none is left.

    `scancel --signal=TERM` signals all steps of a job, but not the controller in its script.
    """
    left = any(isinstance(state.nodes[i], Up) or has_finished(state, i) for i in state.members)
    return len(state.members) > 1 and not left


def _ended_by_scheduler(state: State, answer: AllocationReported, asked: Asked, now: float) -> Step:
    """End the job. If it is already ending, replace a root cause that the end of the allocation explains."""
    cancelled, later = "cancelled" in answer.why, not answer.ends
    told = f"{_allocation_name(state)} {answer.why}"
    text = f"{'' if cancelled else _lost_words(state)}{told}"
    cause = Cause(text, STATUS, now, scheduled=True, later=later, cancelled=cancelled, final=answer.final)
    if later:
        state = state._replace(interrupts=0)  # the scheduler sent the signal, not the user
    if state.phase is not Phase.STOPPING:
        return state, (JobOver(cause, _signal(state)),)
    signalled = state.cause is None or state.cause.exit_status in _BY_SCHEDULER
    in_grace = state.cause is not None and state.cause.later
    if asked.coincides or (cancelled if in_grace else signalled and not asked.ending):
        return state.with_cause(cause), (ShowMessage("error", cause.text),)
    known = state.cause is not None and state.cause.text == told
    return state if later else state.overtaken(), () if known else (ShowMessage("error", told),)


def _lost_words(state: State) -> str:
    """List the nodes that are down, since their loss may be why the scheduler is ending the job."""
    failures = ((node, failure_of(state.nodes[node])) for node in state.members)
    down = [state.label(node) for node, failure in failures if failure and failure.kind in _DOWN]
    if not down and state.phase is Phase.RESTARTING and (cause := state.restarts[-1].cause).node is not None:
        lost = cause.kind == "node_lost" and cause.agent_signum is None  # the scheduler may have sent it
        down = [state.label(cause.node)] if lost else []
    return f"{listed(down)} {'was' if len(down) == 1 else 'were'} lost; " if down else ""


def name_lost_node(event: LinkEnded, state: State, now: float) -> Step:
    """Name a node whose loss is why the scheduler is ending the job, although its answer arrived first."""
    cause = state.cause
    if not (cause and cause.scheduled) or cause.cancelled or now - state.ended_at > WITH_NODE_S:
        return state, ()
    if event.failure.kind not in _DOWN or event.node not in state.members:
        return state, ()
    cause = cause._replace(text=f"{state.label(event.node)} was lost; {cause.text}")
    return state.with_cause(cause), (ShowMessage("error", cause.text),)


def success_doubted(found: SuccessDoubted, state: State, now: float) -> Step:
    """Ask the scheduler whether it stopped the ranks. The decider of `SuccessDoubted`.

    Ranks that had ended before it began to stop the job succeeded.
    """
    if now - state.ended_at > stopping.LATE_S or not state.spec.scheduler_answers:
        return state, ()
    if state.asked:
        return (state._replace(asked=Asked()) if state.asked.ending else state), ()
    return _ask(state, Asked(), now)


def end_overtaken(found: EndOvertaken, state: State, now: float) -> Step:
    """Ask the scheduler whether it is ending the allocation. The decider of `EndOvertaken`."""
    if state.asked or not state.spec.scheduler_answers:
        return state, ()
    coincides = state.cause is not None and now - state.ended_at < stopping.SAME_SIGNAL_S
    return _ask(state, Asked(ending=True, coincides=coincides), now, stopping.LATE_S)


def ask_overdue(state: State, now: float) -> Step:
    """Continue without the scheduler's answer. A job that is ending still waits for the reason."""
    asked = state.asked
    if state.phase is Phase.STOPPING and asked:
        doubted = state.cause is None and not asked.ending and now < state.ended_at + DOUBT_S
        if doubted or state.nodes.counts.over < len(state.nodes):
            return state.with_timer(Timer.ASK, now + ASK_S), ()
    state, found = on_allocation_reported(AllocationReported(None), state, now)
    answered = asked is not None and asked.goes_on
    ends = any(isinstance(each, JobOver) for each in found)
    return state._replace(asked=asked if ends and not answered else None), found


def _warn_ranks(state: State, left_s: float | None, now: float) -> Step:
    """Send all ranks the job's warning signal.

    If that is SIGTERM or SIGINT, or if no attempt is running, end the job.
    """
    signum, allocation = _signal(state), state.spec.allocation
    announced = "received a warning signal"
    if allocation:  # the scheduler may be suspending the job, or a user has sent the signal
        announced = f"{allocation.name} received a warning signal"
    if allocation and left_s is not None:
        announced = f"{allocation.name} ends in {_minutes(left_s)}"
    name, key = signal.Signals(signum).name, state.spec.key_words("on_warning")
    nodes = [i for i, node in enumerate(state.nodes) if isinstance(node, Up) and node.occupied]
    if state.phase is not Phase.RUNNING or signum in (signal.SIGTERM, signal.SIGINT):
        stop_s = state.spec.limits.stop_s
        grace_s = stop_s if left_s is None else max(stop_s, left_s - SPARE_S)
        text = f"{announced}: sent {name} to all ranks, which must exit{key}"
        if state.phase is not Phase.RUNNING:
            text = f"{announced}, before the ranks were {'re' if state.restarts else ''}started"
            text += "; if its time limit is the reason, request more" if allocation else ""
        deadline = () if left_s is None else (Send(i, WarnWorkers(0, left_s)) for i in nodes)
        return state, (*deadline, JobOver(Cause(text, STATUS, now), signum, grace_s))
    text = f"{announced}: sent {name} to all ranks{key}"
    return state, (ShowMessage("warning", text), *(Send(i, WarnWorkers(signum, left_s)) for i in nodes))


def _minutes(left_s: float) -> str:
    return f"{left_s / 60:.0f} min" if left_s >= 120 else f"{max(1.0, left_s):.0f} s"


def _signal(state: State) -> int:
    return signal.Signals[f"SIG{state.spec.limits.on_warning}"]


def _allocation_name(state: State) -> str:
    return state.spec.allocation.name if state.spec.allocation else "the job"


MISTAKES = (2, 126, 127)
"""Exit statuses that a requeued job would only repeat: wrong usage, and a program that can't be run."""


def is_to_go_on(state: State) -> bool:
    """Return whether the job with this final state is unfinished, as far as distlaunch can tell.

    The controller requeues such a job. After a termination warning, success may only mean that a rank has
    saved its work.
    """
    cause, wanted = state.cause, state.spec.restarts.requeue
    if not wanted or state.unwanted or (cause and (cause.cancelled or cause.final)):
        return False
    if cause and not (cause.scheduled or state.warned) and restarting.is_excluded(state):
        return False
    return state.warned if state.outcome == 0 else state.outcome not in MISTAKES
