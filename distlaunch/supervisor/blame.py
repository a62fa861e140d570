"""Who is blamed when ranks fail: one that failed by itself before one that lost a peer; else the first."""

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from distlaunch.supervisor import stalling
from distlaunch.supervisor.ending import end_job, listed
from distlaunch.supervisor.events import WorkerExited
from distlaunch.supervisor.restarting import generation_failed
from distlaunch.supervisor.state import Cause, Phase, State, Step, exit_status_of
from distlaunch.supervisor.stories import Ending, facts
from distlaunch.supervisor.timers import Timer
from distlaunch.supervisor.workers import Exited

if TYPE_CHECKING:
    from distlaunch.supervisor.peer_errors import Words

VERDICT_S = 1.0
"""Seconds for the rank at fault to end after another one has lost its connection to it: it may still be in a
`finally`, or the interpreter's shutdown, and SIGTERM would end it before its traceback is out."""


def rank_failed(state: State, rank: int, event: WorkerExited, now: float) -> Step:
    """A rank has ended with a status other than 0: end the generation, once it is clear who is to blame."""
    from distlaunch.supervisor.peer_errors import words_of  # most ranks don't fail

    words = words_of(event.status, event.words, event.error_record)
    state = _with_exit(
        state, rank, lambda exited: exited._replace(peer_gone=words.peer_gone, timed_out=words.timed_out)
    )
    cause = cause_of(state, rank, event, words)
    if stalling.died_of_its_dump(state, rank, event.status):
        return stalling.dump_came(_with_exit(state, rank, _stopped), rank, event.words, now)
    if state.phase is not Phase.RUNNING:
        return blamed_instead(state, cause, words), ()
    if words.peer_gone and stalling.dumping(state):
        return state, ()  # the peer died of its dump
    if not cause.peer_gone:
        return generation_failed(state, cause, now)
    if state.suspect is None:
        state = state.unwatched()._replace(suspect=cause).with_timer(Timer.VERDICT, now + VERDICT_S)
    return when_all_ended(state, now)


def rank_finished(state: State, now: float) -> Step:
    """A rank has ended well: so has the job, when all have."""
    done = all(worker.status == 0 for worker in state.workers)
    return end_job(state, None, now) if done else when_all_ended(state, now)


def cause_of(state: State, rank: int, event: WorkerExited, words: "Words") -> Cause:
    """What is said of the rank, or torch agent, if it is the first that failed."""
    who = f"{state.named(rank)} failed first"
    if words.traceback and _was_told_to_end(state, event):
        # How it would have ended: Python's status after a traceback.
        return Cause(f"{who}: it raised an exception", 1, event.at, rank, event.node, words.peer_gone)
    how = facts(Ending(event.status, event.oom_kills, event.shm))
    how += _after(words)
    return Cause(f"{who}: {how}", exit_status_of(event.status), event.at, rank, event.node, words.peer_gone)


def _after(words: "Words") -> str:
    if words.timed_out:
        return ", after waiting for another rank until it timed out"
    return ", after losing its connection to another rank" if words.peer_gone else ""


def _was_told_to_end(state: State, event: WorkerExited) -> bool:
    return state.phase is not Phase.RUNNING and event.status in (-signal.SIGTERM, -signal.SIGKILL)


def when_all_ended(state: State, now: float) -> Step:
    """Nobody is left who could be to blame: don't wait any longer."""
    going = any(worker.going for worker in state.workers)
    return (state, ()) if going or state.suspect is None else verdict_due(state, now)


def verdict_due(state: State, now: float) -> Step:
    """No other rank has failed by itself: who lost a peer first is all that is known."""
    suspect = state.suspect
    assert suspect is not None
    return generation_failed(state, suspect._replace(text=suspect.text + _absent_words(state)), now)


def _absent_words(state: State) -> str:
    """Who may have been waited for: ranks that had ended well, or that did not fail when the others did."""
    early = [worker for worker in state.workers if worker.status == 0]
    waited = any(isinstance(worker.phase, Exited) and worker.phase.timed_out for worker in state.workers)
    if early:
        names = listed([state.called(worker.rank) for worker in early])
        never = waited and not any(worker.meeting.joined for worker in early)
        why = " without joining the rendezvous" if never else " (uneven batches?)"
        return f"; {names} had already ended with exit status 0{why}"
    going = [state.called(worker.rank) for worker in state.workers if worker.going]
    if waited and going and len(going) <= len(state.workers) // 2:
        return f"; {listed(going)} had not failed (stalled, or in another collective?)"
    return ""


def blamed_instead(state: State, cause: Cause, words: "Words") -> State:
    """`state`, which is ending, with the blame on `cause` if that came first: not all is heard in order."""
    known = state.cause
    if known is None or known.rank is None or cause.rank is None:
        return state
    if known.peer_gone and not cause.peer_gone:
        earlier = words.traceback or cause.at <= _told_at(state)
    else:
        # Its link was slower than that of the rank we heard of first.
        earlier = known.peer_gone is cause.peer_gone and cause.at < known.at
    return _with_cause(_with_exit(state, cause.rank, _by_itself), cause) if earlier else state


def _with_exit(state: State, rank: int, change: Callable[[Exited], Exited]) -> State:
    phase = state.worker(rank).phase
    assert isinstance(phase, Exited)
    return state.with_worker(rank, phase=change(phase))


def _stopped(exited: Exited) -> Exited:
    return exited._replace(stopped=True)


def _by_itself(exited: Exited) -> Exited:
    return exited._replace(stopped=False)


def _told_at(state: State) -> float:
    """When the ranks were told to end."""
    return state.ended_at or state.restarts[-1].at


def _with_cause(state: State, cause: Cause) -> State:
    state = state._replace(cause=cause)
    if state.phase is not Phase.RESTARTING:
        return state
    *earlier, last = state.restarts
    return state._replace(restarts=(*earlier, last._replace(cause=cause)))
