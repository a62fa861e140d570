"""Determines the root cause when ranks fail, lose a peer, time out or stall.

A rank that exited on its own, not because it lost another rank, is the root cause (`exit_cause`). If several
did, the first to exit is the root cause, even if its report arrives later (`with_earlier_cause`). If none
did, the first rule that picks a rank decides: a rule in `IF_RANKS_TIMED_OUT`, or in `IF_RANKS_STALLED` if
nothing has failed. If no rule picks a rank, the root cause is the first rank that lost a peer (`stacks_due`).

A rank's stack, if known from its traceback or from py-spy, shows where the rank is blocked.
"""

import re
import signal
from collections.abc import Callable, Collection, Sequence
from itertools import chain, takewhile
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.messages import Capture, WorkerExited
from distlaunch.diagnosis.exits import Ending, Words, exit_status_of, facts
from distlaunch.errors import Exit
from distlaunch.job.spec import FailureKind
from distlaunch.supervisor.actions import Action, Send
from distlaunch.supervisor.events import AttemptFailed, Step
from distlaunch.supervisor.nodes import Exited, Linked, RankState
from distlaunch.supervisor.state import Cause, Phase, State, Timer
from distlaunch.wording import listed, lost_peer_words, rank_list, span_words

STACKS_S = 1.0
"""Seconds to wait for the stacks of ranks that others timed out waiting for."""
STOPPED = (-signal.SIGTERM, -signal.SIGKILL)
"""Statuses of ranks that were stopped, possibly after an exception."""
VERDICT_S = 1.0
"""Seconds that a failing rank has to exit once another rank has lost its connection. The failing rank may
still be in a `finally` block or in interpreter shutdown, and SIGTERM would kill it before it has printed its
traceback."""
MAX_DUMPS = 16
"""Maximum ranks whose stacks are dumped. If a thousand ranks wait for one, more stacks don't add anything."""
_TORCH = r"\((?:\S*/)?torch/"
_COLLECTIVE = (
    _TORCH + r"(?:distributed/(?!elastic/|launcher/|run\.py)|nn/parallel/distributed\.py|autograd/graph\.py)"
)
"""Frames in which a rank waits for others: a collective, or a backward pass that ends with one."""
_ONE_SIDED = r"(?:gather|reduce|scatter|broadcast|i?send|i?recv|batch_isend_irecv)(?:_object(?:_list)?)?\b"
"""Operations that some ranks leave before others have called them."""


# Rules


class Scene(Frozen):
    """The input of the rules: the ranks that may be the root cause, and the ranks that waited in vain."""

    state: State
    ranks: list[RankState]
    waiting: list[RankState]


def _never_joined(scene: Scene) -> list[RankState]:
    left = [w for w in scene.state.workers if w.going or w.status == 0]
    away = [w for w in left if not (w.joined or w.trying)] if any(map(is_joining, scene.waiting)) else []
    return away[:1] if away and away[0].rank == 0 else away  # without rank 0, none of the others can join


def _active(scene: Scene) -> list[RankState]:
    active = [w for w in scene.state.workers if w.running and not w.stalled]
    return active if len(scene.waiting) == len(scene.ranks) else []


def _halted(scene: Scene) -> list[RankState]:
    return [w for w in scene.ranks if w.stopped_pid]


def _elsewhere(scene: Scene) -> list[RankState]:
    return [w for w in scene.ranks if w.stack and not waits_in(w)] if scene.waiting else []


def _seen_elsewhere(scene: Scene) -> list[RankState]:
    return [] if _on_gpu(scene) else _elsewhere(scene)


def _on_gpu(scene: Scene) -> bool:
    """Return whether a rank waited on its GPU. Then others may, too, whatever their stacks show."""
    return any(isinstance(w.phase, Exited) and w.phase.on_gpu for w in scene.waiting)


def _idle(scene: Scene) -> list[RankState]:
    idle = [w for w in scene.ranks if w.stalled and not w.stack]
    return idle if len(idle) <= len(scene.state.workers) // 2 else []  # many may just be slow to time out


def _in_the_rarest_collective(scene: Scene) -> list[RankState]:
    return [*chain(*rarest.values())] if len(rarest := _rarest(scene)) == 1 else []


def _in_one_of_the_rarest(scene: Scene) -> list[RankState]:
    return sorted(chain(*_rarest(scene).values()), key=lambda worker: worker.rank)


def _in_one_place(scene: Scene) -> list[RankState]:
    places = {w.stack[0] if w.stack and not _call_into_torch(w, _TORCH) else "" for w in scene.ranks}
    return scene.ranks if len(places) == 1 and places != {""} else []


def _all(scene: Scene) -> list[RankState]:
    return scene.ranks


def _rarest(scene: Scene) -> dict[str, list[RankState]]:
    """If ranks wait in several collectives, return those with the fewest ranks, mapped to these ranks.

    A rank that lost its connection because others had timed out was waiting, too. While other ranks are still
    running, their stacks say more. Ranks may leave a one-sided operation early, which proves nothing.
    """
    lost: list[RankState] = []
    if scene.waiting and not _on_gpu(scene) and all(worker.stack for worker in scene.ranks):
        exits = [(w, w.phase) for w in scene.state.workers if isinstance(w.phase, Exited)]
        lost = [w for w, phase in exits if phase.peer_gone and not phase.timed_out]
    places: dict[str, list[RankState]] = {}
    for worker in sorted((*scene.waiting, *scene.ranks, *lost), key=lambda worker: worker.rank):
        places.setdefault(waits_in(worker), []).append(worker)
    places.pop("", None)
    if any(re.match(_ONE_SIDED, place) for place in places):
        return {}
    fewest = min(map(len, places.values()), default=0)
    return {each: there for each, there in places.items() if len(there) == fewest and len(places) > 1}


Rule = tuple[Callable[[Scene], list[RankState]], str]
"""A function that picks the ranks that failed first, if the rule applies, and a sentence about them."""
IF_RANKS_TIMED_OUT: tuple[Rule, ...] = (
    (_never_joined, "{who} never joined the rendezvous"),
    (_halted, "{who} {were} stopped by a signal"),
    (_seen_elsewhere, "{who} {were} in {frames}"),
    (_idle, "{who} stalled: no output, CPU or GPU use for {span}"),
    (_in_the_rarest_collective, "{who} {were} in {collective}"),
    (_in_one_of_the_rarest, "{who} disagree about the next collective: {calls}"),
)
"""The rules for ranks that others timed out waiting for. The first one that picks a rank decides."""
IF_RANKS_STALLED: tuple[Rule, ...] = (
    (_active, "{who} {were} still active; {others} stalled for {span}, waiting in a collective"),
    (_halted, "{who} stalled for {span}: stopped by a signal"),
    (_elsewhere, "{who} stalled for {span} in {frames}; {others} {are} waiting in a collective"),
    (_in_one_place, "{who} stalled for {span} in {frames}"),
    (_all, "{who} stalled for {span}"),
)
"""The rules for ranks that stalled, if nothing has failed."""


def _judged(
    scene: Scene, rules: Sequence[Rule], named: Callable[[State, RankState], str]
) -> tuple[list[RankState], str]:
    """Return the ranks picked by the first rule that picks any, and the rule's sentence about them."""
    picked = ((ranks, sentence) for picks, sentence in rules if (ranks := picks(scene)))
    ranks, sentence = next(picked, (list[RankState](), ""))
    state, waiting, rarest = scene.state, scene.waiting, _rarest(scene)
    calls = (f"{rank_list([w.rank for w in there], state.unit)} in {each}" for each, there in rarest.items())
    return ranks, sentence.format(
        who=listed([named(state, worker) for worker in ranks]),
        were=_were(ranks),
        others=rank_list([worker.rank for worker in waiting], state.unit),
        are="is" if len(waiting) == 1 else "are",
        frames=listed(list(dict.fromkeys(worker.stack[0] for worker in ranks if worker.stack))),
        collective=", ".join(rarest),
        calls=listed([*calls]),
        span=span_words(state.stall_s),
    )


def _were(workers: list[RankState]) -> str:
    return "was" if len(workers) == 1 else "were"


# Exits


def exit_cause(state: State, rank: int, event: WorkerExited, words: Words) -> Cause:
    """Return the root cause that applies if this rank was the first to fail."""
    status, how = exit_status_of(event.status), facts(Ending(event.status, event.oom_kills, event.shm))
    after = lost_peer_words(words.peer_gone, words.timed_out)
    how += f", {after}" if after else ""
    if words.traceback and state.phase is not Phase.RUNNING and event.status in STOPPED:
        # Without the signal, it would have exited with Python's status for a traceback.
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
    """Return `state`, which is ending, with this rank as the root cause if it failed first.

    Reports don't always arrive in the order of the failures.
    """
    known = state.cause
    if known is None or known.rank is None:
        return state
    # If its agent stopped it, the time of its exit proves nothing: the agent may have been told from outside.
    unasked = not event.asked
    if known.peer_gone and not words.peer_gone:
        earlier = words.traceback or (unasked and event.at <= state.ended_at)
    else:
        # Its link was slower than that of the rank reported first, or it took longer to exit.
        before = (unasked and event.at < known.at) or _recorded_earlier(state, rank, known)
        earlier = known.peer_gone is words.peer_gone and before
    if not earlier:
        return state
    cause = exit_cause(state, rank, event, words).noted(known.note, known.final)
    if not known.peer_gone:
        cause = cause._replace(at=min(event.at, known.at))  # when it failed, at the latest
    return with_exit(state, rank, stopped=False).with_cause(cause)


def _recorded_earlier(state: State, rank: int, known: Cause) -> bool:
    """Return whether a rank raised its exception before the known cause, by the clock of their node."""
    if known.peer_gone or known.rank is None or known.node != state.planned.node_of(rank).node:
        return False
    phases = [state.workers[each].phase for each in (rank, known.rank)]
    records = [phase.error_record or {} if isinstance(phase, Exited) else {} for phase in phases]
    stamps = [record.get("timestamp", "") for record in records]
    return all(re.fullmatch(r"[0-9]{1,12}", stamp) for stamp in stamps) and int(stamps[0]) < int(stamps[1])


def with_exit(state: State, rank: int, **changes: Any) -> State:
    """Return `state` with additional facts about the exit of a rank."""
    phase = state.workers[rank].phase
    assert isinstance(phase, Exited)
    return state.with_worker(rank, phase=phase._replace(**changes))


# Lost peers and timeouts


def lost_connection(state: State, suspect: Cause) -> bool:
    """Return whether a rank failed because it lost its connection to another, not because it timed out."""
    phase = state.workers[suspect.rank].phase if suspect.rank is not None else None
    return isinstance(phase, Exited) and not phase.timed_out


def verdict_when_all_ended(state: State, now: float) -> Step:
    """Stop waiting if no remaining rank can be the root cause. The rule of RUNNING."""
    if state.suspect is None or state.workers.counts.alive:
        return state, ()
    return verdict_due(state, now)


def verdict_due(state: State, now: float) -> Step:
    """Find the rank that the others waited for, because no rank failed on its own.

    If that requires the stacks of ranks that are still running, request them.
    """
    scene = _timed_out(state)
    running = [w.rank for w in scene.ranks if not w.stack]
    if not running or _judged(scene, IF_RANKS_TIMED_OUT, _named)[0]:
        return stacks_due(state, now)
    state = state.with_timer(Timer.STACKS, now + STACKS_S)
    return state, tuple(capture(state, running[:MAX_DUMPS]))


def stacks_due(state: State, now: float) -> Step:
    """Report the rank that the others waited for as the root cause.

    If that rank isn't known, report the first one that lost a peer.
    """
    assert state.suspect is not None
    scene = _timed_out(state)
    at_fault, text = _judged(scene, IF_RANKS_TIMED_OUT, _named)
    if not at_fault:
        return state, (AttemptFailed(_with_absent_ranks(state.suspect, scene)),)
    others = [w for w in state.workers if w not in at_fault and (w in scene.waiting or waits_in(w))]
    place = next((f" in {place}" for place in map(waits_in, others) if place), "")
    waits = f"; {rank_list([w.rank for w in others], state.unit)} {_were(others)} waiting{place}"
    text += waits if others else ""
    cause = _cause_of(state, at_fault, text, state.suspect.exit_status, now)
    return state, (AttemptFailed(cause._replace(kind="collective")),)


def _timed_out(state: State) -> Scene:
    waiting = [w for w in state.workers if isinstance(w.phase, Exited) and w.phase.timed_out]
    return Scene(state, [w for w in state.workers if w.running and waiting], waiting)


def _named(state: State, worker: RankState) -> str:
    return state.named(worker.rank) if worker.joined else state.described(worker.rank)


def _with_absent_ranks(cause: Cause, scene: Scene) -> Cause:
    """List ranks that may have kept the others waiting: those that exited with 0, or are still running."""
    state = scene.state
    if early := [state.called(worker.rank) for worker in state.workers if worker.status == 0]:
        text = f"{listed(early)} had already exited with status 0 (uneven batches?)"
        return cause._replace(text=f"{cause.text}; {text}", exit=False)
    going = [state.called(worker.rank) for worker in state.workers if worker.going]
    if going and len(going) <= len(state.workers) // 2:
        still = "were still running" if len(going) > 1 else "was still running"  # perhaps in its `finally:`
        text = "had not failed (stalled, or in another collective?)" if scene.waiting else still
        return cause._replace(text=f"{cause.text}; {listed(going)} {text}")
    return cause


def _cause_of(state: State, ranks: list[RankState], text: str, exit_status: int, at: float) -> Cause:
    """Return a root cause, with its rank if `ranks` contains only one."""
    rank = ranks[0].rank if len(ranks) == 1 else None
    node = None if rank is None else state.planned.node_of(rank).node
    return Cause(text, exit_status, at, rank, node, inferred=True)


# Stalls


def stall_cause(state: State, now: float) -> Cause:
    """Return the root cause of a stall in which nothing has failed."""
    stalled = [worker for worker in state.workers if worker.stalled]  # the dump may have killed some
    scene = Scene(state, stalled, [worker for worker in stalled if waits_in(worker)])
    at_fault, text = _judged(scene, IF_RANKS_STALLED, lambda state, worker: state.named(worker.rank))
    if any(map(is_joining, stalled)) and (advice := network_advice(state)):
        text += f"; some ranks are still in init_process_group{advice}"
    return _cause_of(state, at_fault, text, Exit.TIMEOUT, now)._replace(kind="stall")


def network_advice(state: State) -> str:
    """Return advice about ranks that can't connect to each other; "" if they don't use the network."""
    if state.spec.one_machine:
        return ""
    if not state.spec.invocation.file:
        return "; check that no firewall blocks connections between the nodes"
    from shlex import quote  # few jobs need it

    return f"; `distlaunch check-port {quote(state.spec.source)}` tests the network"


# Stacks


def capture(state: State, ranks: Collection[int] = (), abort: bool = False) -> list[Action]:
    """Return requests for evidence from all nodes of a running attempt, including the stacks of these ranks.

    With `abort`, the requests may kill the ranks. If `ranks` is empty, the attempt is about to be stopped.
    """
    found: list[Action] = []
    # In these two cases, the ranks are about to be stopped: see `agent.messages.Capture`.
    quick = not ranks or state.due_at(Timer.STALL_ACT) is not None
    for part in state.plan.nodes if state.plan and state.phase is Phase.RUNNING else ():
        if isinstance(state.nodes[part.node], Linked):
            local_ranks = tuple(rank - part.first_rank for rank in ranks if rank in part.ranks)
            found.append(Send(part.node, Capture(local_ranks, abort and bool(local_ranks), quick)))
    return found


def is_joining(worker: RankState) -> bool:
    """Return whether a rank is waiting for others in init_process_group."""
    return any(frame.startswith("init_process_group (") for frame in worker.stack)


def waits_in(worker: RankState) -> str:
    """Return the collective in which a rank is waiting, with its caller: `all_reduce (t.py:5)`; or ""."""
    return _call_into_torch(worker, _COLLECTIVE)


def place_of(worker: RankState) -> str:
    """Return where a rank with a known stack is: a torch function and its caller, or any other function."""
    return _call_into_torch(worker, _TORCH) or worker.stack[0]


def _call_into_torch(worker: RankState, wanted: str) -> str:
    """Return a worker's current call into torch, with its caller, if a frame in it is `wanted`; else ""."""
    inside = list(takewhile(lambda frame: re.search(_TORCH, frame), worker.stack))
    if not any(re.search(wanted, frame) for frame in inside):
        return ""
    names = [frame for frame in inside if "/c10d_logger.py" not in frame]  # a decorator
    caller = [frame.rpartition("(")[2] for frame in worker.stack[len(inside) :][:1]]
    return " (".join([(names or inside)[-1].partition(" ")[0], *caller])
