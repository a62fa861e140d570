"""Workers: how they start and end, and which rank is the root cause if several fail."""

import errno
import signal
from typing import Any

from distlaunch.agent.messages import OutputLost, WorkerExited, WorkerStarted, WorkerUnstarted
from distlaunch.diagnosis.exits import Ending, Words, exit_status_of, facts, words_of
from distlaunch.supervisor import joining, stalling
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.findings import AttemptFailed, JobOver, Step
from distlaunch.supervisor.nodes import Exited, Worker, WorkerPhase
from distlaunch.supervisor.stalling import dumping
from distlaunch.supervisor.state import Cause, Phase, State, Timer
from distlaunch.wording import listed, lost_peer_words, rank_list


def on_worker_started(event: WorkerStarted, state: State, now: float) -> Step:
    """Record that a worker runs."""
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None:
        return state, ()
    return state.with_worker(rank, phase=WorkerPhase.RUNNING, pid=event.pid, cpus=event.cpus), ()


def on_worker_unstarted(event: WorkerUnstarted, state: State, now: float) -> Step:
    """End the job because a worker can't be started, which is a mistake in the job."""
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None:
        return state, ()
    from distlaunch.plan.start_advice import unstarted_advice  # needed only for mistakes

    state = state.with_worker(rank, phase=WorkerPhase.UNSTARTED)
    # As in a shell: 127 if the program doesn't exist, 126 if it can't be run.
    status = 127 if event.errno == errno.ENOENT else 126
    advice = unstarted_advice(state.spec, event.node, event.stage, event.errno)
    text = f"{state.named(rank)} could not be started: {event.text}{advice}"
    return state, (JobOver(Cause(text, status, now, rank, event.node)),)


def on_worker_exited(event: WorkerExited, state: State, now: float) -> Step:
    """Record the exit of a worker."""
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None or isinstance(state.worker(rank).phase, Exited):
        return state, ()
    running = state.phase is Phase.RUNNING
    dumped = stalling.died_of_its_dump(state, rank, event.status)
    told = dumped or (not running and event.at >= state.ended_at)
    exited = Exited(event.status, event.at, told, event.error_record, event.oom_kills, event.shm)
    state = state.with_worker(rank, phase=exited)
    if dumped:
        return stalling.dump_came(state, rank, event.words, now)
    if event.status != 0:
        return _rank_failed(state, rank, event, now)
    if not (running and state.succeeded) or state.asked:
        return state, ()
    text = f"{state.called(rank)} finished, so the others are stopped (success: {state.spec.success})"
    return state, (*((ShowMessage("info", text),) if state.workers.counts.alive else ()), JobOver())


def on_output_lost(event: OutputLost, state: State, now: float) -> Step:
    """Report how much output a node was unable to keep."""
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None:
        return state, ()
    stream = "stderr" if event.stream else "stdout"
    lost = f"{event.size} bytes of {state.called(rank)}'s {stream} were lost"
    return state, (ShowMessage("warning", f"{lost}: its node had no room to buffer them"),)


STACKS_S = 0.5
"""Seconds for the stacks of ranks that others timed out on to arrive."""
STOPPED = (-signal.SIGTERM, -signal.SIGKILL)
"""Statuses of ranks that were stopped, possibly after an exception."""
VERDICT_S = 1.0
"""Seconds for the failing rank to exit after another rank has lost its connection to it. The rank may
still be in a `finally` block or in interpreter shutdown, and SIGTERM would end it before its traceback is
out."""


def _rank_failed(state: State, rank: int, event: WorkerExited, now: float) -> Step:
    """End the attempt after a nonzero exit, once the root cause is clear."""
    words = words_of(event.status, event.words, event.error_record)
    if words.peer_gone:
        state = _with_exit(state, rank, peer_gone=True, timed_out=words.timed_out)
    if words.stack:
        state = state.with_worker(rank, stack=words.stack)
    if state.phase is not Phase.RUNNING:
        return _with_earlier_cause(state, rank, event, words), ()
    if words.peer_gone and dumping(state):
        return state, ()  # the lost peer died of its dump
    cause = _cause_of(state, rank, event, words)
    if not cause.peer_gone:
        return state, (AttemptFailed(cause),)
    if state.suspect is None:
        state = state.unwatched()._replace(suspect=cause).with_timer(Timer.VERDICT, now + VERDICT_S)
    return state, ()


def _cause_of(state: State, rank: int, event: WorkerExited, words: Words) -> Cause:
    """Return the root cause in case this rank is the first that failed."""
    who = f"{state.named(rank)} failed first"
    if words.traceback and state.phase is not Phase.RUNNING and event.status in STOPPED:
        # Without the signal, it would have exited with the Python status for a traceback.
        return Cause(f"{who}: it raised an exception", 1, event.at, rank, event.node, words.peer_gone)
    how = facts(Ending(event.status, event.oom_kills, event.shm))
    after = lost_peer_words(words.peer_gone, words.timed_out)
    how += f", {after}" if after else ""
    return Cause(f"{who}: {how}", exit_status_of(event.status), event.at, rank, event.node, words.peer_gone)


def verdict_when_all_ended(state: State, now: float) -> Step:
    """Stop waiting if no other rank is left that may be the root cause."""
    if state.suspect is None or state.workers.counts.alive:
        return state, ()
    return verdict_due(state, now)


def verdict_due(state: State, now: float) -> Step:
    """Find the rank that the others waited for, since no rank failed for its own reason.

    If that takes the stacks of ranks that are still running, request them.
    """
    waiters = _timed_out(state)
    running = [w.rank for w in state.workers if w.running and not w.stack] if waiters else []
    if not running or stalling.waited_for(state, waiters)[0]:
        return stacks_due(state, now)
    state = state.with_timer(Timer.STACKS, now + STACKS_S)
    return state, tuple(stalling.dump_stacks(state, running[: stalling.MAX_DUMPS]))


def stacks_due(state: State, now: float) -> Step:
    """Make the rank that the others waited for the root cause; the first that lost a peer if it isn't
    known."""
    assert state.suspect is not None
    waiters = _timed_out(state)
    at_fault, what = stalling.waited_for(state, waiters) if waiters else ([], "")
    if not at_fault:
        return state, (AttemptFailed(state.suspect._replace(text=state.suspect.text + _absent_words(state))),)
    who = [state.named(w.rank) if w.joined else joining.named(state, w) for w in at_fault]
    others = [w for w in state.workers if w not in at_fault and (w in waiters or stalling.waits_in(w))]
    were = f"{rank_list([w.rank for w in others], state.unit)} {'was' if len(others) == 1 else 'were'}"
    place = next((f" in {place}" for place in map(stalling.waits_in, others) if place), "")
    text = f"{listed(who)} {what}; {were} waiting{place}"
    rank = at_fault[0].rank if len(at_fault) == 1 else None
    node = state.plan.node_of(rank).node if rank is not None and state.plan else None
    cause = state.suspect._replace(text=text, rank=rank, node=node, peer_gone=False)
    return state, (AttemptFailed(cause),)


def _timed_out(state: State) -> list[Worker]:
    return [w for w in state.workers if isinstance(w.phase, Exited) and w.phase.timed_out]


def _absent_words(state: State) -> str:
    """Name ranks that may have kept the others waiting: those that had succeeded, or had not failed."""
    early = [state.called(worker.rank) for worker in state.workers if worker.status == 0]
    if early:
        return f"; {listed(early)} had already exited with status 0 (uneven batches?)"
    going = [state.called(worker.rank) for worker in state.workers if worker.going]
    if _timed_out(state) and going and len(going) <= len(state.workers) // 2:
        return f"; {listed(going)} had not failed (stalled, or in another collective?)"
    return ""


def _with_earlier_cause(state: State, rank: int, event: WorkerExited, words: Words) -> State:
    """Return `state`, which is ending, with this rank as root cause if it failed first.

    Reports don't always arrive in the order of the failures.
    """
    known = state.cause
    if known is None or known.rank is None:
        return state
    if known.peer_gone and not words.peer_gone:
        earlier = words.traceback or event.at <= state.ended_at
    else:
        # Its link was slower than that of the rank reported first.
        earlier = known.peer_gone is words.peer_gone and event.at < known.at
    if not earlier:
        return state
    return _with_exit(state, rank, stopped=False).with_cause(_cause_of(state, rank, event, words))


def _with_exit(state: State, rank: int, **changes: Any) -> State:
    phase = state.worker(rank).phase
    assert isinstance(phase, Exited)
    return state.with_worker(rank, phase=phase._replace(**changes))
