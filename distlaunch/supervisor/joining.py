"""Watches ranks join the rendezvous, and ends a job whose ranks are waiting for one that never joins.

A script may not use torch.distributed at all. Therefore, the default time limit applies only once a rank has
joined or tries to join. A limit in the job file applies from the start.
"""

from distlaunch.agent.messages import RanksJoined, RanksLag
from distlaunch.errors import Exit
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.events import JobOver, Step
from distlaunch.supervisor.nodes import RankState
from distlaunch.supervisor.state import Cause, State, Timer
from distlaunch.wording import counted, exit_words, listed, span_words

MESSAGE_S = 15.0
"""Seconds after the start until ranks that have not joined are named. Each further message takes twice as
long."""

_UNUSED = "the script does not use MASTER_ADDR and MASTER_PORT"


def watch(state: State, now: float) -> State:
    """Return `state`, at the start of an attempt, with the timers for joining."""
    limit_s, explicit = state.planned.join_s, state.spec.names_join_limit
    state = state.unwatched()
    if limit_s is None:
        return state
    state = state.with_timer(Timer.JOIN_MESSAGE, now + MESSAGE_S)
    return state.with_timer(Timer.JOIN, now + limit_s) if explicit else state


def on_ranks_joined(event: RanksJoined, state: State, now: float) -> Step:
    """Record ranks that joined the rendezvous, and report it once all have."""
    already_complete = state.workers.counts.joined == len(state.workers)
    for local_rank in event.local_ranks:
        rank = state.rank_of(event.node, local_rank)
        if rank is not None:
            state = state.with_worker(rank, joined=True, torch=event.torch)
    if already_complete or state.workers.counts.joined < len(state.workers):
        return _with_limit(state, now), ()
    took_s = now - (state.started_at or now)
    shown = [
        ShowMessage("info", f"{_all_words(state)} joined the rendezvous at {_where(state)} in {took_s:.1f} s")
    ]
    versions = torch_versions(state)
    if len(versions) > 1:
        words = "; ".join(f"{version} on {listed(nodes)}" for version, nodes in versions.items())
        shown.append(ShowMessage("warning", f"the nodes have different versions of torch: {words}"))
    return state.without_timers(Timer.JOIN, Timer.JOIN_MESSAGE), tuple(shown)


def torch_versions(state: State) -> dict[str, list[str]]:
    """Return the versions of torch that the ranks have loaded, each with the names of its nodes."""
    versions: dict[str, list[str]] = {}
    for part in state.planned.nodes:
        for version in sorted({state.workers[rank].torch for rank in part.ranks} - {""}):
            versions.setdefault(version, []).append(part.label)
    return versions


def _all_words(state: State) -> str:
    count = len(state.workers)
    if state.unit == "mpirun":
        return "mpirun"
    words = {1: "the", 2: "both"}.get(count, f"all {count}")
    return f"{words} {counted(count, state.unit).partition(' ')[2]}"


def on_ranks_lag(event: RanksLag, state: State, now: float) -> Step:
    """Record the activity of the missing ranks for the next message."""
    for local_rank, trying, words in event.seen:
        rank = state.rank_of(event.node, local_rank)
        if rank is not None:
            state = state.with_worker(rank, trying=trying, doing=words)
    return _with_limit(state, now), ()


def _with_limit(state: State, now: float) -> State:
    """Return `state` with a time limit once a rank is waiting for others."""
    limit_s = state.planned.join_s
    unwatched, limited = state.due_at(Timer.JOIN_MESSAGE) is None, state.due_at(Timer.JOIN) is not None
    if unwatched or limited or limit_s is None or not _uses_rendezvous(state):
        return state
    return state.with_timer(Timer.JOIN, now + limit_s)


def _uses_rendezvous(state: State) -> bool:
    """Return whether the ranks use the rendezvous: one has joined, or is trying to join."""
    return state.workers.counts.joining > 0


def join_message_due(state: State, now: float) -> Step:
    """List the missing ranks and, if known, why they are missing."""
    waited_s = now - (state.started_at or now)
    first = waited_s < 2 * MESSAGE_S
    state = state.with_timer(Timer.JOIN_MESSAGE, now + max(waited_s, MESSAGE_S))
    missing = missing_ranks(state)
    if _uses_rendezvous(state):
        return state, (ShowMessage("info" if first else "warning", missing_words(state, missing)),)
    alone = len(state.workers) == 1  # a single rank waits for no other
    text = f"{missing_words(state, missing)}; ignore this, or set rendezvous: none, if {_UNUSED}"
    return state, (ShowMessage("info", text),) if first and not alone else ()


def join_overdue(state: State, now: float) -> Step:
    """End the job, naming the ranks that have not joined."""
    state = state.without_timers(Timer.JOIN_MESSAGE)
    limit = span_words(state.planned.join_s or 0.0)
    text = f"{missing_words(state, missing_ranks(state))}; gave up after {limit} (timeouts.join)"
    if not _uses_rendezvous(state):
        text += f"; if {_UNUSED}, set rendezvous: none"
    return state, (JobOver(Cause(text, Exit.TIMEOUT, now)),)


def missing_ranks(state: State) -> list[RankState]:
    """Return the ranks that have not joined the rendezvous."""
    return [worker for worker in state.workers if not worker.joined]


def missing_words(state: State, missing: list[RankState]) -> str:
    """Describe the missing ranks: `6/8 ranks joined; waiting for rank 5 (gpu-b, pid 812: …) …`."""
    names = listed([named(state, worker) for worker in missing])
    count = len(state.workers)
    text = f"{count - len(missing)}/{counted(count, state.unit)} joined; waiting for {names}"
    first = missing[0]
    if first.rank == 0 and not first.trying and _uses_rendezvous(state):
        return f"{text}; the others are waiting for rank 0"
    none_joined, trying = not state.workers.counts.joined, any(worker.trying for worker in state.workers)
    return f"{text}; the rendezvous is at {_where(state)}" if none_joined and trying else text


def _where(state: State) -> str:
    return f"{state.planned.master_addr}:{state.port}"


def named(state: State, worker: RankState) -> str:
    """Return the name of a rank with its activity: `rank 5 (gpu-b, pid 812: torch imported, idle)`."""
    if worker.status is not None:
        return f"{state.named(worker.rank)[:-1]}: {exit_words(worker.status)})"
    if worker.pid is None:
        return state.named(worker.rank, "not started yet")
    doing = f": {worker.doing}" if worker.doing else ""
    return state.named(worker.rank, f"pid {worker.pid}{doing}")
