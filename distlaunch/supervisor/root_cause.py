"""The root cause: the rank to name when ranks fail, lose a peer, time out or stall.

In this order, a rank is named that

1. exited on its own, not because it lost another rank (`exit_cause`); the earliest exit, whenever it is
   reported (`with_earlier_cause`)
2. never joined the rendezvous, while others waited for it (`waited_for`, as all until 6)
3. was stopped by a signal (or `stall_cause`, if nothing has failed)
4. was elsewhere, while others waited in a collective (or `stall_cause`)
5. was stalled
6. was in another collective than most; if there is a tie, nobody is named alone
7. was the first to lose a peer (`stacks_due`), or every stalled rank (`stall_cause`), if nothing better is
   known

Where a rank is blocked follows from its stack, if there is one: from its traceback, or from py-spy.
"""

import re
import signal
from collections.abc import Collection
from itertools import takewhile
from typing import Any

from distlaunch.agent.messages import WorkerExited
from distlaunch.diagnosis.exits import Ending, Words, exit_status_of, facts
from distlaunch.errors import Exit
from distlaunch.job.spec import FailureKind
from distlaunch.supervisor import joining
from distlaunch.supervisor.actions import Action, Capture
from distlaunch.supervisor.findings import AttemptFailed, Step
from distlaunch.supervisor.nodes import Exited, Linked, RankState
from distlaunch.supervisor.state import Cause, Phase, State, Timer
from distlaunch.wording import listed, lost_peer_words, rank_list, span_words

STACKS_S = 0.5
"""Seconds for the stacks of ranks that others timed out on to arrive."""
STOPPED = (-signal.SIGTERM, -signal.SIGKILL)
"""Statuses of ranks that were stopped, possibly after an exception."""
VERDICT_S = 1.0
"""Seconds for the failing rank to exit after another rank has lost its connection to it. The rank may
still be in a `finally` block or in interpreter shutdown, and SIGTERM would end it before its traceback is
out."""
MAX_DUMPS = 16
"""Ranks whose stacks are dumped. If a thousand ranks wait for one, further stacks add nothing."""
_TORCH = r"\((?:\S*/)?torch/"
_COLLECTIVE = (
    _TORCH + r"(?:distributed/(?!elastic/|launcher/|run\.py)|nn/parallel/distributed\.py|autograd/graph\.py)"
)
"""Frames in which a rank waits for others: a collective, or a backward pass that ends with one."""


# Exits


def exit_cause(state: State, rank: int, event: WorkerExited, words: Words) -> Cause:
    """Return the root cause in case this rank is the first that failed."""
    status, how = exit_status_of(event.status), facts(Ending(event.status, event.oom_kills, event.shm))
    after = lost_peer_words(words.peer_gone, words.timed_out)
    how += f", {after}" if after else ""
    if words.traceback and state.phase is not Phase.RUNNING and event.status in STOPPED:
        # Without the signal, it would have exited with the Python status for a traceback.
        status, how = 1, "it raised an exception"
    text, kind = f"{state.named(rank)} failed first: {how}", _kind_of(status, event, words)
    cause = Cause(text, status, event.at, rank, event.node, words.peer_gone, exit=True, kind=kind)
    return cause._replace(raised=words.raised) if kind == "exception" else cause


def _kind_of(status: int, event: WorkerExited, words: Words) -> FailureKind:
    if words.peer_gone:
        return "collective"
    if words.traceback and status in (1, 128 + signal.SIGABRT):  # a thread may abort after an exception
        return "exception"
    if event.status == -signal.SIGKILL and event.oom_kills > 0:
        return "oom"
    return "signal" if event.status < 0 else "exit"


def with_earlier_cause(state: State, rank: int, event: WorkerExited, words: Words) -> State:
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
    cause = exit_cause(state, rank, event, words).noted(known.note, known.final)
    return with_exit(state, rank, stopped=False).with_cause(cause)


def with_exit(state: State, rank: int, **changes: Any) -> State:
    """Return `state` with more known about the exit of a rank."""
    phase = state.worker(rank).phase
    assert isinstance(phase, Exited)
    return state.with_worker(rank, phase=phase._replace(**changes))


# Lost peers and timeouts


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
    if not running or waited_for(state, waiters)[0]:
        return stacks_due(state, now)
    state = state.with_timer(Timer.STACKS, now + STACKS_S)
    return state, tuple(capture(state, running[:MAX_DUMPS]))


def stacks_due(state: State, now: float) -> Step:
    """Make the rank that the others waited for the root cause; the first that lost a peer if it isn't
    known."""
    assert state.suspect is not None
    waiters = _timed_out(state)
    at_fault, what = waited_for(state, waiters) if waiters else ([], "")
    if not at_fault:
        cause = _with_absent_ranks(state.suspect, state)
        return state, (AttemptFailed(cause),)
    who = [state.named(w.rank) if w.joined else joining.named(state, w) for w in at_fault]
    others = [w for w in state.workers if w not in at_fault and (w in waiters or waits_in(w))]
    place = next((f" in {place}" for place in map(waits_in, others) if place), "")
    waits = f"; {rank_list([w.rank for w in others], state.unit)} {_were(others)} waiting{place}"
    text = f"{listed(who)} {what}{waits if others else ''}"
    cause = _cause_of(state, at_fault, text, state.suspect.exit_status, now)
    return state, (AttemptFailed(cause._replace(kind="collective")),)


def _timed_out(state: State) -> list[RankState]:
    return [w for w in state.workers if isinstance(w.phase, Exited) and w.phase.timed_out]


def _with_absent_ranks(cause: Cause, state: State) -> Cause:
    """Name ranks that may have kept the others waiting: those that had succeeded, or had not failed."""
    if early := [state.called(worker.rank) for worker in state.workers if worker.status == 0]:
        text = f"{listed(early)} had already exited with status 0 (uneven batches?)"
        return cause._replace(text=f"{cause.text}; {text}", exit=False)
    going = [state.called(worker.rank) for worker in state.workers if worker.going]
    if _timed_out(state) and going and len(going) <= len(state.workers) // 2:
        text = f"{listed(going)} had not failed (stalled, or in another collective?)"
        return cause._replace(text=f"{cause.text}; {text}")
    return cause


def _cause_of(state: State, ranks: list[RankState], text: str, exit_status: int, at: float) -> Cause:
    """Return a root cause that is one of `ranks`, if there is only one."""
    rank = ranks[0].rank if len(ranks) == 1 else None
    node = state.plan.node_of(rank).node if rank is not None and state.plan else None
    return Cause(text, exit_status, at, rank, node, inferred=True)


# Stalls


def stall_cause(state: State, now: float) -> Cause:
    """Return the root cause: the ranks stopped by a signal, else those outside a collective, else all."""
    # Includes ranks that have died of the dump.
    stalled = [worker for worker in state.workers if worker.stalled]
    waiting = [worker.rank for worker in stalled if waits_in(worker)]
    elsewhere = [worker for worker in stalled if worker.stack and worker.rank not in waiting]
    stopped = [worker for worker in stalled if worker.stopped_pid]
    active = [worker for worker in state.workers if worker.running and not worker.stalled]
    at_fault = stopped or (elsewhere if elsewhere and waiting else stalled)
    if active and len(waiting) == len(stalled):
        at_fault = active
    who = listed([state.named(worker.rank) for worker in at_fault])
    text = f"{who} stalled for {span_words(state.stall_s)}"
    if at_fault == active:
        stuck = f"{rank_list(waiting, state.unit)} stalled for {span_words(state.stall_s)}"
        text = f"{who} {_were(active)} still active; {stuck}, waiting in a collective"
    elif stopped:
        text += ": stopped by a signal"
    elif elsewhere and waiting:
        verb = "is" if len(waiting) == 1 else "are"
        text += f" in {_places(elsewhere)}"
        text += f"; {rank_list(waiting, state.unit)} {verb} waiting in a collective"
    if not state.spec.one_machine and any(map(is_joining, stalled)):
        text += "; some ranks are still in init_process_group; `distlaunch check-port` tests the network"
    return _cause_of(state, at_fault, text, Exit.TIMEOUT, now)._replace(kind="stall")


# Stacks


def capture(state: State, ranks: Collection[int] = (), abort: bool = False) -> list[Action]:
    """Return the requests for evidence from all nodes of a running attempt, with the stacks of these ranks.

    With `abort`, they may end the ranks. Without ranks, the attempt is about to be stopped.
    """
    found: list[Action] = []
    for part in state.plan.nodes if state.plan and state.phase is Phase.RUNNING else ():
        if isinstance(state.nodes[part.node], Linked):
            local_ranks = tuple(rank - part.first_rank for rank in ranks if rank in part.ranks)
            found.append(Capture(part.node, local_ranks, abort and bool(local_ranks), quick=not ranks))
    return found


def is_joining(worker: RankState) -> bool:
    """Return whether a rank waits for others in init_process_group."""
    return any(frame.startswith("init_process_group (") for frame in worker.stack)


def waits_in(worker: RankState) -> str:
    """Return the collective in which a rank waits, with its caller: `all_reduce (t.py:5)`. "" if in none."""
    inside = list(takewhile(lambda frame: re.search(_TORCH, frame), worker.stack))
    if not any(re.search(_COLLECTIVE, frame) for frame in inside):
        return ""
    names = [frame for frame in inside if "/c10d_logger.py" not in frame]  # a decorator
    caller = [frame.rpartition("(")[2] for frame in worker.stack[len(inside) :][:1]]
    return " (".join([(names or inside)[-1].partition(" ")[0], *caller])


def waited_for(state: State, waiters: list[RankState]) -> tuple[list[RankState], str]:
    """Return the ranks for which these waited until they timed out, as far as is known, and what they did."""
    left = [worker for worker in state.workers if worker.going or worker.status == 0]
    if any(map(is_joining, waiters)) and (away := [w for w in left if not (w.joined or w.trying)]):
        # Without rank 0, none of the others can join.
        return (away[:1] if away[0].rank == 0 else away), "never joined the rendezvous"
    running = [worker for worker in left if worker.running]
    elsewhere = [worker for worker in running if worker.stack and not waits_in(worker)]
    if halted := [worker for worker in running if worker.stopped_pid]:
        return halted, f"{_were(halted)} stopped by a signal"
    if elsewhere:
        return elsewhere, f"{_were(elsewhere)} in {_places(elsewhere)}"
    stalled = [worker for worker in running if worker.stalled and not worker.stack]
    if 0 < len(stalled) <= len(state.workers) // 2:  # many may only be about to time out, too
        return stalled, f"stalled: no output, CPU or GPU use for {span_words(state.stall_s)}"
    return _in_another_collective(state, [*waiters, *running])


def _in_another_collective(state: State, waiters: list[RankState]) -> tuple[list[RankState], str]:
    """Return the ranks in the rarest collective, and which it is; of several that are as rare, all."""
    places: dict[str, list[RankState]] = {}
    for worker in waiters:
        places.setdefault(waits_in(worker), []).append(worker)
    places.pop("", None)
    if len(places) < 2:
        return [], ""
    fewest = min(map(len, places.values()))
    odd = {where: workers for where, workers in places.items() if len(workers) == fewest}
    at_fault = sorted((worker for workers in odd.values() for worker in workers), key=lambda w: w.rank)
    if len(odd) == 1:
        return at_fault, f"{_were(at_fault)} in {next(iter(odd))}"
    ranks = {where: sorted(worker.rank for worker in workers) for where, workers in odd.items()}
    calls = listed([f"{rank_list(ranks[where], state.unit)} in {where}" for where in odd])
    return at_fault, f"disagree about the next collective: {calls}"


def _were(workers: list[RankState]) -> str:
    return "was" if len(workers) == 1 else "were"


def _places(workers: list[RankState]) -> str:
    """Return the innermost frames of these ranks in words."""
    return listed(list(dict.fromkeys(worker.stack[0] for worker in workers)))
