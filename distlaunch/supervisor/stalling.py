"""Stalled ranks: which ones, where they are blocked, and the reaction to them."""

import re
import signal
from itertools import takewhile

from distlaunch.agent.messages import RanksStalled, StackDumped
from distlaunch.agent.wire import STALL_LOOK_MAX_S, STALL_LOOKS
from distlaunch.diagnosis.exits import python_frames
from distlaunch.errors import Exit
from distlaunch.job.spec import FOREVER_S
from distlaunch.supervisor.actions import Action, DumpStacks, ShowMessage
from distlaunch.supervisor.findings import AttemptFailed, JobOver, Step
from distlaunch.supervisor.nodes import Worker
from distlaunch.supervisor.state import Cause, Phase, State, Timer
from distlaunch.wording import listed, span_words

SETTLE_S = 2.0
"""Seconds for a stall to spread to every rank that it blocks, in addition to one interval between checks,
since agents check at different moments."""
DUMP_S = 5.0
"""Seconds for stacks to arrive before stalled ranks are stopped."""
MAX_DUMPS = 16
"""Ranks whose stacks are dumped. If a thousand ranks wait for one, further stacks add nothing."""
SHOWN_FRAMES = 3
_TORCH = r"\((?:\S*/)?torch/"
_COLLECTIVE = (
    _TORCH + r"(?:distributed/(?!elastic/|launcher/|run\.py)|nn/parallel/distributed\.py|autograd/graph\.py)"
)
"""Frames in which a rank waits for others: a collective, or a backward pass that ends with one."""


def on_ranks_stalled(event: RanksStalled, state: State, now: float) -> Step:
    """Record stalled ranks. They are reported once the stall has spread, and again if it spreads further."""
    part = state.plan.part_of(event.node) if state.plan else None
    if part is None:
        return state, ()
    before, stopped = {worker.rank for worker in _stalled(state)}, dict(event.stopped)
    for rank in part.ranks:
        local_rank = rank - part.first_rank
        stalled = local_rank in event.local_ranks
        stack = state.worker(rank).stack if stalled else ()
        pid = stopped.get(local_rank) if stalled else None
        state = state.with_worker(rank, stalled=stalled, stack=stack, stopped_pid=pid)
    after = {worker.rank for worker in _stalled(state)}
    if not after:
        message = (ShowMessage("info", "stalled ranks resumed"),) if state.stall_told else ()
        state = state.without_timers(Timer.STALL_MESSAGE, Timer.STALL_ACT)
        return state._replace(stall_told=False), message
    if after <= before or state.due_at(Timer.STALL_MESSAGE) is not None:
        return state, ()
    return state.with_timer(Timer.STALL_MESSAGE, now + _settle_s(state)), ()


def _limit_s(state: State) -> float:
    return state.spec.limits.stall_s or FOREVER_S


def _settle_s(state: State) -> float:
    return SETTLE_S + min(STALL_LOOK_MAX_S, _limit_s(state) / STALL_LOOKS)


def _stalled(state: State) -> list[Worker]:
    return [worker for worker in state.workers if worker.stalled and worker.running]


def stall_message_due(state: State, now: float) -> Step:
    """Report which ranks are stalled and which are not, and request the stacks of the stalled ones."""
    acts, again = state.spec.limits.on_stall != "warn", state.stall_told
    message = ShowMessage("warning", _stall_words(state, again))
    # Only of ranks without a known stack. The stack of a rank stopped by a signal is meaningless.
    ranks = [w.rank for w in _stalled(state)[:MAX_DUMPS] if not (w.stack or w.stopped_pid)]
    dumps = dump_stacks(state, ranks, acts)
    state = state._replace(stall_told=True)
    if acts and not again:
        state = state.with_timer(Timer.STALL_ACT, now + DUMP_S)
    for rank in ranks if acts else ():
        state = state.with_worker(rank, dumping=True)
    return state, (message, *dumps)


def _stall_words(state: State, again: bool) -> str:
    names = listed([_named(state, worker) for worker in _stalled(state)])
    what = f"no output, CPU or GPU use for {span_words(_limit_s(state))}"
    return f"{'now ' if again else ''}stalled: {names}: {what}; {_others_words(state)}"


def _named(state: State, worker: Worker) -> str:
    pid = worker.stopped_pid
    why = f": stopped by a signal; `kill -CONT {pid}` resumes it" if pid else ""
    return state.named(worker.rank, f"pid {worker.pid}{why}")


def _others_words(state: State) -> str:
    active = [w.rank for w in state.workers if w.running and not w.stalled]
    if not active:
        return f"no {state.unit} is still active"
    verb = "is" if len(active) == 1 else "are"
    return f"{_ranks_words(state, active)} {verb} still active"


def _ranks_words(state: State, ranks: list[int]) -> str:
    if len(ranks) == 1:
        return state.called(ranks[0])
    return f"{state.unit}s {listed([*map(str, ranks)])}"


def dump_stacks(state: State, ranks: list[int], abort: bool = False) -> list[Action]:
    """Return the requests for the stacks of these ranks. With `abort`, they may end the ranks."""
    wanted: dict[int, list[int]] = {}
    for rank in ranks:
        assert state.plan is not None
        part = state.plan.node_of(rank)
        wanted.setdefault(part.node, []).append(rank - part.first_rank)
    return [DumpStacks(node, tuple(local_ranks), abort) for node, local_ranks in wanted.items()]


def on_stack_dumped(event: StackDumped, state: State, now: float) -> Step:
    """Show the innermost frames of a blocked rank. The run directory contains the whole stack."""
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None or not (state.worker(rank).stalled or (state.suspect and state.worker(rank).running)):
        return state, ()  # it has resumed, or ended, in the meantime
    frames = _frames(event.text)
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


def _frames(dump: str) -> tuple[str, ...]:
    """Return the frames of the first thread, innermost first, as py-spy prints them: `read (t.py:3)`."""
    first_thread = re.split(r"(?m)^Thread .*\n", dump)[1:2] or [dump]
    return tuple(line.strip() for line in first_thread[0].splitlines() if line.startswith("    "))


def died_of_its_dump(state: State, rank: int, status: int) -> bool:
    """Return whether a rank died of the SIGABRT that makes Python print its stacks.

    The rank may have resumed in between.
    """
    return state.phase is Phase.RUNNING and state.worker(rank).dumping and status == -signal.SIGABRT


def dumping(state: State) -> bool:
    """Return whether ranks are dying of that SIGABRT. Failures of their peers are then no news."""
    died = any(worker.stalled and worker.stopped for worker in state.workers)
    return died and state.due_at(Timer.STALL_ACT) is not None


def dump_came(state: State, rank: int, words: str, now: float) -> Step:
    """Record the stack of a rank that died of its dump. Act once all dumps have arrived."""
    state = state.with_worker(rank, stalled=True, stack=_frames_of_python(words))
    if any(not worker.stopped_pid for worker in _stalled(state)):
        return state, ()
    return stall_act_due(state.without_timers(Timer.STALL_ACT), now)


def _frames_of_python(words: str) -> tuple[str, ...]:
    """Return the frames of the thread that received SIGABRT, as `_frames` does, from faulthandler output."""
    _, _, thread = words.rpartition("Current thread ")
    return python_frames(thread.split("\n\n")[0])


def stall_act_due(state: State, now: float) -> Step:
    """Stop or restart the job, as `on_stall` demands."""
    cause = _cause(state, now)
    return state, (AttemptFailed(cause) if state.spec.limits.on_stall == "restart" else JobOver(cause),)


def _cause(state: State, now: float) -> Cause:
    """Return the root cause: the ranks stopped by a signal, else those outside a collective, else all."""
    # Includes ranks that have died of the dump.
    stalled = [worker for worker in state.workers if worker.stalled]
    waiting = [worker.rank for worker in stalled if waits_in(worker)]
    elsewhere = [worker for worker in stalled if worker.stack and worker.rank not in waiting]
    stopped = [worker for worker in stalled if worker.stopped_pid]
    at_fault = stopped or (elsewhere if elsewhere and waiting else stalled)
    who = listed([state.named(worker.rank) for worker in at_fault])
    text = f"{who} stalled for {span_words(_limit_s(state))}"
    if stopped:
        text += ": stopped by a signal"
    elif elsewhere and waiting:
        verb = "is" if len(waiting) == 1 else "are"
        text += f" in {_places(elsewhere)}"
        text += f"; {_ranks_words(state, waiting)} {verb} waiting in a collective"
    if not state.spec.one_machine and any(map(is_joining, stalled)):
        text += "; some ranks are still in init_process_group; `distlaunch check-port` tests the network"
    if len(at_fault) > 1:
        return Cause(text, Exit.TIMEOUT, now)
    rank = at_fault[0].rank
    node = state.plan.node_of(rank).node if state.plan else None
    return Cause(text, Exit.TIMEOUT, now, rank, node)


def is_joining(worker: Worker) -> bool:
    """Return whether a rank waits for others in init_process_group."""
    return any(frame.startswith("init_process_group (") for frame in worker.stack)


def waits_in(worker: Worker) -> str:
    """Return the collective in which a rank waits, with its caller: `all_reduce (t.py:5)`. "" if in none."""
    inside = list(takewhile(lambda frame: re.search(_TORCH, frame), worker.stack))
    if not any(re.search(_COLLECTIVE, frame) for frame in inside):
        return ""
    names = [frame for frame in inside if "/c10d_logger.py" not in frame]  # a decorator
    caller = [frame.rpartition("(")[2] for frame in worker.stack[len(inside) :][:1]]
    return " (".join([(names or inside)[-1].partition(" ")[0], *caller])


def waited_for(state: State, waiters: list[Worker]) -> tuple[list[Worker], str]:
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
        return stalled, f"stalled: no output, CPU or GPU use for {span_words(_limit_s(state))}"
    places: dict[str, list[Worker]] = {}
    for worker in (*waiters, *running):
        places.setdefault(waits_in(worker), []).append(worker)
    places.pop("", None)
    where, fewest = min(places.items(), key=lambda each: len(each[1]), default=("", []))
    return (fewest, f"{_were(fewest)} in {where}") if len(places) > 1 else ([], "")


def _were(workers: list[Worker]) -> str:
    return "was" if len(workers) == 1 else "were"


def _places(workers: list[Worker]) -> str:
    """Return the innermost frames of these ranks in words."""
    return listed(list(dict.fromkeys(worker.stack[0] for worker in workers)))
