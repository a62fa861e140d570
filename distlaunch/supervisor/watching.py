"""Watching workers that run: who does not join, who stands still, and what is done about it."""

from distlaunch.errors import Exit
from distlaunch.supervisor.actions import Action, Dump, Notice
from distlaunch.supervisor.ending import end_job, listed
from distlaunch.supervisor.events import RanksJoined, RanksLag, RanksStand, StackDumped
from distlaunch.supervisor.preparing import JOIN_NOTICE_S
from distlaunch.supervisor.restarting import generation_failed
from distlaunch.supervisor.state import (
    Cause,
    State,
    Step,
    WorkerPhase,
    WorkerState,
    span_words,
    status_words,
)

SETTLE_S = 2.0
"""Agents look at different times: so long a stall is let spread before it is told."""
DUMP_S = 5.0
"""Seconds for stacks to come before the ranks that stand are ended."""
MAX_DUMPS = 16
"""Ranks whose stacks are dumped: those of a thousand that wait for one tell nothing more."""


# Joining


def on_ranks_joined(event: RanksJoined, state: State, now: float) -> Step:
    """Say it once all ranks have joined the rendezvous."""
    before = all(worker.joined for worker in state.workers)
    for local_rank in event.local_ranks:
        rank = state.rank_of(event.node, local_rank)
        if rank is not None:
            state = state.with_worker(rank, joined=True)
    if before or not all(worker.joined for worker in state.workers):
        return state, ()
    assert state.plan is not None
    took_s = now - (state.started_at or now)
    where = f"{state.plan.master_addr}:{state.port}"
    counted = state.counted(len(state.workers))
    who = f"all {counted}" if len(state.workers) > 1 else f"the {counted.removeprefix('1 ')}"
    text = f"{who} joined the rendezvous at {where} in {took_s:.1f} s"
    return state.watching(join_by=None, join_notice_at=None), (Notice("info", text),)


def on_ranks_lag(event: RanksLag, state: State, now: float) -> Step:
    """Remember what the missing ranks do, for when it is told."""
    for local_rank, trying, words in event.seen:
        rank = state.rank_of(event.node, local_rank)
        if rank is not None:
            state = state.with_worker(rank, trying=trying, doing=words)
    return state, ()


def join_notice_due(state: State, now: float) -> Step:
    """Say who is missing, and why as far as it can be seen."""
    waited_s = now - (state.started_at or now)  # the next time after twice as long
    state = state.watching(join_notice_at=now + max(waited_s, JOIN_NOTICE_S))
    text = _missing_words(state)
    return state, (Notice("info", text),) if text else ()


def join_overdue(state: State, now: float) -> Step:
    """End the job with the names of those that have not joined, unless it does not use torch.distributed."""
    state = state.watching(join_by=None, join_notice_at=None)
    text = _missing_words(state)
    if not text:
        return state, ()
    text += f"; {span_words(state.spec.timeouts.join_s)} are over"
    return end_job(state, Cause(text, Exit.TIMEOUT, now), now)


def _missing_words(state: State) -> str:
    """`6/8 ranks joined; waiting for rank 5 (gpu-b, pid 812: has not imported torch yet) …`, or nothing.

    A job of which no rank has joined, or tries to, does not use the rendezvous.
    """
    here = [worker for worker in state.workers if worker.phase is not WorkerPhase.LOST]
    missing = [worker for worker in here if not worker.joined]
    begun = len(missing) < len(here) or any(worker.trying for worker in missing)
    if not missing or not begun:
        return ""
    names = listed([_named(state, worker) for worker in missing])
    return f"{len(here) - len(missing)}/{state.counted(len(here))} joined; waiting for {names}"


def _named(state: State, worker: WorkerState) -> str:
    if worker.status is not None:
        ended = f"{state.named(worker.rank)[:-1]}: ended with {status_words(worker.status)}"
        return f"{ended} without joining)"
    doing = f": {worker.doing}" if worker.doing else ""
    return state.named(worker.rank, f"pid {worker.pid}{doing}")


# Standing still


def on_ranks_stand(event: RanksStand, state: State, now: float) -> Step:
    """Note who stands; a stall is told once it has spread."""
    part = state.plan.part_of(event.node) if state.plan else None
    if part is None:
        return state, ()
    for rank in part.ranks:
        state = state.with_worker(rank, standing=rank - part.first_rank in event.local_ranks)
    if not any(worker.standing for worker in state.workers):
        said = (Notice("info", "the ranks that stood go on"),) if state.watch.stall_told else ()
        return state.watching(stall_notice_at=None, stall_act_at=None, stall_told=False), said
    if state.watch.stall_told or state.watch.stall_notice_at is not None:
        return state, ()
    return state.watching(stall_notice_at=now + SETTLE_S), ()


def stall_notice_due(state: State, now: float) -> Step:
    """Say which ranks stand and which run, and have their stacks dumped."""
    acts = state.spec.on_stall != "notice"
    act_at = now + DUMP_S if acts else None
    state = state.watching(stall_notice_at=None, stall_told=True, stall_act_at=act_at)
    return state, (Notice("warning", _stall_words(state)), *_dumps(state, acts))


def stall_act_due(state: State, now: float) -> Step:
    """Do what `on_stall` says."""
    state = state.watching(stall_act_at=None)
    end = generation_failed if state.spec.on_stall == "restart" else end_job
    return end(state, _stall_cause(state, now), now)


def _stall_cause(state: State, now: float) -> Cause:
    first = next((worker.rank for worker in state.workers if worker.standing), None)
    node = state.plan.node_of(first).node if state.plan and first is not None else None
    who = state.named(first) if first is not None else "no rank"
    text = f"stalled: {who} stood for {span_words(state.spec.timeouts.stall_s)}"
    return Cause(text, Exit.TIMEOUT, now, first, node)


def _stall_words(state: State) -> str:
    standing = [worker for worker in state.workers if worker.standing]
    names = listed([_named(state, worker) for worker in standing])
    what = f"no output, no CPU and no GPU use for {span_words(state.spec.timeouts.stall_s)}"
    return f"standing: {names}: {what}; {_others_words(state)}"


def _others_words(state: State) -> str:
    running = [w.rank for w in state.workers if w.phase is WorkerPhase.RUNNING and not w.standing]
    if not running:
        return f"no {'torch agent' if state.spec.torch_agents else 'rank'} runs"
    if len(running) == 1:
        return f"{state.called(running[0])} runs"
    numbers = listed([str(rank) for rank in running])
    return f"{state.counted(len(running))} run" if state.spec.torch_agents else f"ranks {numbers} run"


def _dumps(state: State, abort: bool) -> list[Action]:
    wanted: dict[int, list[int]] = {}
    for worker in [worker for worker in state.workers if worker.standing][:MAX_DUMPS]:
        assert state.plan is not None
        part = state.plan.node_of(worker.rank)
        wanted.setdefault(part.node, []).append(worker.rank - part.first_rank)
    return [Dump(node, tuple(ranks), abort) for node, ranks in wanted.items()]


def on_stack_dumped(event: StackDumped, state: State, now: float) -> Step:
    """Show where a rank stands: its innermost frames; the run folder has all of it."""
    rank = state.rank_of(event.node, event.local_rank)
    frames = [line.strip() for line in event.text.splitlines() if line.startswith("    ")] or [event.text]
    if rank is None:
        return state, ()
    return state, (Notice("info", f"{state.called(rank)} stands in: {' < '.join(frames[:3])}"),)
