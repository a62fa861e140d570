"""Stalled ranks: which ones, where they are blocked, and the reaction to them."""

import signal

from distlaunch.agent.messages import RanksStalled, StackDumped
from distlaunch.agent.wire import DUMP_S, STALL_LOOK_MAX_S, STALL_LOOKS
from distlaunch.diagnosis.exits import py_spy_frames, python_frames
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.events import AttemptFailed, JobOver, Step
from distlaunch.supervisor.nodes import RankState
from distlaunch.supervisor.root_cause import MAX_DUMPS, capture, stall_cause
from distlaunch.supervisor.state import Phase, State, Timer
from distlaunch.wording import listed, rank_list, span_words

SETTLE_S = 2.0
"""Seconds for a stall to spread to every rank that it blocks, in addition to one interval between checks,
since agents check at different moments."""
SHOWN_FRAMES = 3


def on_ranks_stalled(event: RanksStalled, state: State, now: float) -> Step:
    """Record stalled ranks. They are reported once the stall has spread, and again if it spreads further."""
    part = state.plan.part_of(event.node) if state.plan else None
    if part is None:
        return state, ()
    before, stopped = {worker.rank for worker in _stalled(state)}, dict(event.stopped)
    for rank in part.ranks:
        local_rank = rank - part.first_rank
        stalled = local_rank in event.local_ranks
        stack = state.workers[rank].stack if stalled else ()
        pid = stopped.get(local_rank) if stalled else None
        state = state.with_worker(rank, stalled=stalled, stack=stack, stopped_pid=pid)
    after = {worker.rank for worker in _stalled(state)}
    if not after:
        message = (ShowMessage("info", "stalled ranks resumed"),) if state.stall_told else ()
        state = state.without_timers(Timer.STALL_MESSAGE, Timer.STALL_ACT)
        return state._replace(stall_told=False), message
    if after <= before or state.due_at(Timer.STALL_MESSAGE) is not None:
        return state, ()
    settle_s = SETTLE_S + min(STALL_LOOK_MAX_S, state.stall_s / STALL_LOOKS)
    return state.with_timer(Timer.STALL_MESSAGE, now + settle_s), ()


def _stalled(state: State) -> list[RankState]:
    return [worker for worker in state.workers if worker.stalled and worker.running]


def stall_message_due(state: State, now: float) -> Step:
    """Report which ranks are stalled and which are not, and request the stacks of the stalled ones."""
    acts, again = state.spec.limits.on_stall != "warn", state.stall_told
    names = listed([_named(state, worker) for worker in _stalled(state)])
    what = f"no output, CPU or GPU use for {span_words(state.stall_s)}"
    text = f"{'now ' if again else ''}stalled: {names}: {what}; {_others_words(state)}"
    # Only of ranks without a known stack. The stack of a rank stopped by a signal is meaningless.
    ranks = [w.rank for w in _stalled(state)[:MAX_DUMPS] if not (w.stack or w.stopped_pid)]
    evidence = capture(state, ranks, acts)
    state = state._replace(stall_told=True)
    if acts and not again:
        state = state.with_timer(Timer.STALL_ACT, now + DUMP_S)
    for rank in ranks if acts else ():
        state = state.with_worker(rank, dumping=True)
    return state, (ShowMessage("warning", text), *evidence)


def _named(state: State, worker: RankState) -> str:
    pid = worker.stopped_pid
    why = f": stopped by a signal; `kill -CONT {pid}` resumes it" if pid else ""
    return state.named(worker.rank, f"pid {worker.pid}{why}")


def _others_words(state: State) -> str:
    active = [w.rank for w in state.workers if w.running and not w.stalled]
    if not active:
        return f"no {state.unit} is still active"
    verb = "is" if len(active) == 1 else "are"
    return f"{rank_list(active, state.unit)} {verb} still active"


def on_stack_dumped(event: StackDumped, rank: int, state: State, now: float) -> Step:
    """Show the innermost frames of a blocked rank. The run directory contains the whole stack."""
    if not (state.workers[rank].stalled or (state.suspect and state.workers[rank].running)):
        return state, ()  # it has resumed, or ended, in the meantime
    frames = py_spy_frames(event.text)
    if not frames:
        return _no_stack(state, rank, event.text.strip().partition("\n")[0])
    state = state.with_worker(rank, stack=frames)
    where = " < ".join(frames[:SHOWN_FRAMES])
    return state, (ShowMessage("info", f"{state.called(rank)} is blocked in: {where}"),)


def _no_stack(state: State, rank: int, why: str) -> Step:
    """Report once why a stack is missing, since the reason is usually the same for all ranks."""
    if why in state.stackless:
        return state, ()
    message = ShowMessage("info", f"no stack for {state.called(rank)}: {why}")
    return state._replace(stackless=state.stackless | {why}), (message,)


def died_of_its_dump(state: State, rank: int, status: int) -> bool:
    """Return whether a rank died of the SIGABRT that makes Python print its stacks.

    The rank may have resumed in between.
    """
    return state.phase is Phase.RUNNING and state.workers[rank].dumping and status == -signal.SIGABRT


def dumping(state: State) -> bool:
    """Return whether ranks are dying of a dump's SIGABRT, which explains failures of their peers."""
    died = any(worker.stalled and worker.stopped for worker in state.workers)
    return died and state.due_at(Timer.STALL_ACT) is not None


def dump_came(state: State, rank: int, words: str, now: float) -> Step:
    """Record the stack of a rank that died of its dump. Act once all dumps have arrived.

    Called for an exit of which `died_of_its_dump` is true. The stack is in the output of faulthandler.
    """
    thread = words.rpartition("Current thread ")[2].partition("\n\n")[0]  # the one that received SIGABRT
    state = state.with_worker(rank, stalled=True, stack=python_frames(thread))
    if any(not worker.stopped_pid for worker in _stalled(state)):
        return state, ()
    return stall_act_due(state.without_timers(Timer.STALL_ACT), now)


def stall_act_due(state: State, now: float) -> Step:
    """Stop or restart the job, according to `on_stall`."""
    cause = stall_cause(state, now)
    return state, (AttemptFailed(cause) if state.spec.limits.on_stall == "restart" else JobOver(cause),)
