"""Who is blamed when ranks fail: one that failed by itself before one that lost a peer; else the first."""

import signal
from typing import Any

from distlaunch.diagnosis.exits import Ending, Words, exit_status_of, facts, words_of
from distlaunch.state.events import WorkerExited
from distlaunch.state.findings import GenerationFailed, JobOver, Step, WorkerFailed, WorkerFinished
from distlaunch.state.job import Cause, Phase, State
from distlaunch.state.timers import Timer
from distlaunch.state.workers import Exited
from distlaunch.supervisor.stalling import dumping
from distlaunch.wording import listed, lost_peer_words

VERDICT_S = 1.0
"""Seconds for the rank at fault to end after another one has lost its connection to it: it may still be in a
`finally`, or the interpreter's shutdown, and SIGTERM would end it before its traceback is out."""


def rank_failed(found: WorkerFailed, state: State, now: float) -> Step:
    """A rank has ended with a status other than 0: end the generation, once it is clear who is to blame."""
    rank, event = found
    words = words_of(event.status, event.words, event.error_record)
    if words.peer_gone or words.timed_out:
        state = _with_exit(state, rank, peer_gone=words.peer_gone, timed_out=words.timed_out)
    if state.phase is not Phase.RUNNING:
        return blamed_instead(state, rank, event, words), ()
    if words.peer_gone and dumping(state):
        return state, ()  # the peer died of its dump
    cause = cause_of(state, rank, event, words)
    if not cause.peer_gone:
        return state, (GenerationFailed(cause),)
    if state.suspect is None:
        state = state.unwatched().with_generation(suspect=cause).with_timer(Timer.VERDICT, now + VERDICT_S)
    return state, ()


def rank_finished(found: WorkerFinished, state: State, now: float) -> Step:
    """A rank has succeeded; the job has, too, once all ranks have."""
    done = state.workers.succeeded == len(state.workers)
    return state, (JobOver(),) if done and not state.asked else ()


def cause_of(state: State, rank: int, event: WorkerExited, words: Words | None = None) -> Cause:
    """The cause, if this rank is the first that failed."""
    who = f"{state.named(rank)} failed first"
    peer_gone = words is not None and words.peer_gone
    if words and words.traceback and _was_told_to_end(state, event):
        # How it would have ended: Python's status after a traceback.
        return Cause(f"{who}: it raised an exception", 1, event.at, rank, event.node, peer_gone)
    how = facts(Ending(event.status, event.oom_kills, event.shm))
    after = lost_peer_words(words.peer_gone, words.timed_out) if words else ""
    how += f", {after}" if after else ""
    return Cause(f"{who}: {how}", exit_status_of(event.status), event.at, rank, event.node, peer_gone)


def _was_told_to_end(state: State, event: WorkerExited) -> bool:
    return state.phase is not Phase.RUNNING and event.status in (-signal.SIGTERM, -signal.SIGKILL)


def verdict_when_all_ended(state: State, now: float) -> Step:
    """No other rank is left to blame: stop waiting."""
    if state.suspect is None or state.workers.going:
        return state, ()
    return verdict_due(state, now)


def verdict_due(state: State, now: float) -> Step:
    """No other rank has failed by itself: blame the first that lost a peer."""
    suspect = state.suspect
    assert suspect is not None
    return state, (GenerationFailed(suspect._replace(text=suspect.text + _absent_words(state))),)


def _absent_words(state: State) -> str:
    """Who may have kept the others waiting: ranks that had succeeded, or did not fail with the others."""
    early = [worker for worker in state.workers if worker.status == 0]
    waited = any(isinstance(worker.phase, Exited) and worker.phase.timed_out for worker in state.workers)
    if early:
        names = listed([state.called(worker.rank) for worker in early])
        never = waited and not any(worker.meeting.joined for worker in early)
        why = " without joining the rendezvous" if never else " (uneven batches?)"
        return f"; {names} had already exited with status 0{why}"
    going = [state.called(worker.rank) for worker in state.workers if worker.going]
    if waited and going and len(going) <= len(state.workers) // 2:
        return f"; {listed(going)} had not failed (stalled, or in another collective?)"
    return ""


def blamed_instead(state: State, rank: int, event: WorkerExited, words: Words | None = None) -> State:
    """`state`, which is ending, with the blame on this rank if it came first: not all is heard in order."""
    known = state.cause
    if known is None or known.rank is None:
        return state
    peer_gone = words is not None and words.peer_gone
    if known.peer_gone and not peer_gone:
        earlier = bool(words and words.traceback) or event.at <= state.ended_at
    else:
        # Its link was slower than that of the rank we heard of first.
        earlier = known.peer_gone is peer_gone and event.at < known.at
    if not earlier:
        return state
    return _with_exit(state, rank, stopped=False).blaming(cause_of(state, rank, event, words))


def _with_exit(state: State, rank: int, **changes: Any) -> State:
    phase = state.worker(rank).phase
    assert isinstance(phase, Exited)
    return state.with_worker(rank, phase=phase._replace(**changes))
