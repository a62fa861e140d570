"""Agents' reports that ranks of an attempt have started, joined the rendezvous, stalled or exited.

`root_cause` picks the rank to report. The consequences are decided elsewhere: `step.py` passes
`AttemptFailed` and `JobOver` to `allocation_end`, which hands them on to `restarting` or `stopping`.

A script might not use torch.distributed at all. Therefore, the default time limit for joining applies only
once a rank has joined or tries to join. A limit in the job file applies from the start.
"""

import errno
import signal

from distlaunch.agent.messages import (
    OutputLost,
    RanksJoined,
    RanksLag,
    RanksStalled,
    StackDumped,
    WorkerExited,
    WorkerStarted,
    WorkerUnstarted,
)
from distlaunch.agent.wire import DUMP_S, STALL_LOOK_MAX_S, STALL_LOOKS
from distlaunch.diagnosis.exits import py_spy_error, py_spy_frames, python_frames, words_of
from distlaunch.errors import Exit
from distlaunch.job.spec import JobSpec
from distlaunch.supervisor import checking, root_cause
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.events import AttemptFailed, JobOver, Step
from distlaunch.supervisor.nodes import Exited, RankState, Up, WorkerPhase
from distlaunch.supervisor.state import Cause, Phase, State, Timer
from distlaunch.wording import counted, listed, rank_list, span_words, stopped_words

MESSAGE_S = 15.0
"""Seconds from the start until the ranks that have not joined are listed. This time doubles with each
message."""

_APART = "ranks that never call torch.distributed.init_process_group run independently"
SETTLE_S = 2.0
"""Seconds for a stall to spread to every rank that it blocks, in addition to one interval between checks,
since agents check at different moments."""
SHOWN_FRAMES = 3


# Start


def on_worker_started(event: WorkerStarted, rank: int, state: State, now: float) -> Step:
    """Record that a worker is running."""
    return state.with_worker(rank, phase=WorkerPhase.RUNNING, pid=event.pid, cpus=event.cpus), ()


def on_worker_unstarted(event: WorkerUnstarted, rank: int, state: State, now: float) -> Step:
    """End the job because a worker can't be started: the job file must be wrong.

    If the job has run before and needs fewer nodes, the node must be wrong. Continue without it.
    """
    state = state.with_worker(rank, phase=WorkerPhase.UNSTARTED)
    node = state.nodes[event.node]
    if isinstance(node, Up) and node.unfit:
        return state, ()  # it is already left out
    # As in a shell: 127 if the program doesn't exist, 126 if it can't be run.
    status = 127 if event.errno == errno.ENOENT else 126
    advice = unstarted_advice(state.spec, event.node, event.stage, event.errno)
    text = f"{state.named(rank)} could not be started: {event.text}{advice}"
    cause = Cause(text, status, now, rank, event.node)
    enough = state.attempt and len(state.members) > state.spec.fewest
    if enough and isinstance(node, Up) and state.phase is not Phase.STOPPING:
        return checking.leave_out(state, [event.node], cause)
    return state, (JobOver(cause),)


def unstarted_advice(spec: JobSpec, node: int, stage: str, code: int) -> str:
    """Return advice on which key of the job file to check. It is appended to the agent's error.

    `stage` and `code` are `stage` and `errno` of `WorkerUnstarted`.
    """
    if not spec.places:  # no job file: the command line of torchrun
        return ""
    if stage == "workdir":
        return f" ({_workdir_key(spec, node)})"
    program = spec.program_of(spec.pool[node])
    kind, word = program.kind, program.words[0]
    looked_for = stage == "script" or (stage == "exec" and kind == "command")
    if code != errno.ENOENT or not looked_for or not program.placed:
        return ""
    if word.startswith(("/", "~")):
        return f" (set by {kind if spec.pool[node].script is None else f'{spec.pool[node].path}.script'})"
    return f"; a relative {kind} is looked for in the node's workdir ({_workdir_key(spec, node)})"


def _workdir_key(spec: JobSpec, node: int) -> str:
    if spec.pool[node].workdir is not None:
        return f"set by {spec.pool[node].path}.workdir"
    file = spec.invocation.file
    # `run --on` pipes the job to the host, in the job file's directory, which may not be the caller's.
    default = "the job file's directory" if file else f"the current directory, {spec.program.workdir}"
    return "set by workdir" if "workdir" in spec.places else f"by default {default}"


# Join


def watch(state: State, now: float) -> State:
    """Return `state` with the timers for joining, which are set when an attempt starts."""
    limit_s, explicit = state.planned.join_s, state.spec.names_join_limit
    state = state.unwatched()
    if limit_s is None:
        return state
    state = state.with_timer(Timer.JOIN_MESSAGE, now + MESSAGE_S)
    return state.with_timer(Timer.JOIN, now + limit_s) if explicit else state


def on_ranks_joined(event: RanksJoined, state: State, now: float) -> Step:
    """Record ranks that joined the rendezvous, and report when all have joined."""
    already_complete = state.workers.counts.joined == len(state.workers)
    for local_rank in event.local_ranks:
        rank = state.rank_of(event.node, local_rank)
        if rank is not None:
            state = state.with_worker(rank, joined=True, torch=event.torch)
    if already_complete or state.workers.counts.joined < len(state.workers):
        return _with_limit(state, now), ()
    took_s = now - (state.started_at or now)
    text = f"{_all_words(state)} joined the rendezvous at {_where(state)} in {took_s:.1f} s"
    shown, versions = [ShowMessage("info", text)], torch_versions(state)
    if len(versions) > 1:
        text = f"the nodes have different versions of torch: {'; '.join(versions)}"
        text += "; install the same version on all of them"
        shown.append(ShowMessage("warning", text))
    return state.without_timers(Timer.JOIN, Timer.JOIN_MESSAGE), tuple(shown)


def torch_versions(state: State) -> list[str]:
    """Return the versions of torch that the ranks have loaded, each with its nodes: `2.13.0 on gpu-a`."""
    versions: dict[str, list[str]] = {}
    for part in state.planned.nodes:
        for version in sorted({state.workers[rank].torch for rank in part.ranks} - {""}):
            versions.setdefault(version, []).append(part.label)
    return [f"{version} on {listed(nodes)}" for version, nodes in versions.items()]


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
    """Return `state` with a time limit for joining once a rank is waiting for others."""
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
    alone = len(state.workers) == 1  # a single rank doesn't wait for others
    text = f"{missing_words(state, missing)}; {_APART}{_if_intended(state)}"
    return state, (ShowMessage("info", text),) if first and not alone else ()


def _if_intended(state: State) -> str:
    """Return advice for ranks that don't use the rendezvous. torchrun has no such key."""
    instead = "replace timeouts.join with" if state.spec.names_join_limit else "set"
    return f"; if that is intended, {instead} rendezvous: none" if state.spec.places else ""


def join_overdue(state: State, now: float) -> Step:
    """End the job, naming the ranks that have not joined."""
    state = state.without_timers(Timer.JOIN_MESSAGE)
    limit = span_words(state.planned.join_s or 0.0)
    missing = missing_ranks(state)
    text = f"{missing_words(state, missing)}; gave up after {limit}{state.spec.key_words('timeouts.join')}"
    if not _uses_rendezvous(state):
        text += f"; {_APART}{_if_intended(state)}"
    elif missing[0].trying:  # otherwise, others may just be waiting for rank 0
        text += root_cause.network_advice(state)
    return state, (JobOver(Cause(text, Exit.TIMEOUT, now)),)


def missing_ranks(state: State) -> list[RankState]:
    """Return the ranks that have not joined the rendezvous."""
    return [worker for worker in state.workers if not worker.joined]


def missing_words(state: State, missing: list[RankState]) -> str:
    """Describe the missing ranks: `6/8 ranks joined; waiting for rank 5 (gpu-b, pid 812: …) …`."""
    names = listed([state.described(worker.rank) for worker in missing])
    count = len(state.workers)
    text = f"{count - len(missing)}/{counted(count, state.unit)} joined; waiting for {names}"
    first = missing[0]
    if first.rank == 0 and not first.trying and _uses_rendezvous(state):
        return f"{text}; the others are waiting for rank 0"
    none_joined, trying = not state.workers.counts.joined, any(worker.trying for worker in state.workers)
    return f"{text}; the rendezvous is at {_where(state)}" if none_joined and trying else text


def _where(state: State) -> str:
    return f"{state.planned.master_addr}:{state.port}"


# Stall


def on_ranks_stalled(event: RanksStalled, state: State, now: float) -> Step:
    """Record stalled ranks. They are reported once the stall has spread, and again if it spreads further."""
    part = state.plan.part_of(event.node) if state.plan else None
    if part is None:
        return state, ()
    before, stopped = {worker.rank for worker in _stalled(state)}, dict(event.stopped)
    for rank in part.ranks:
        if not state.workers[rank].going:
            continue  # a rank killed by its dump stays stalled, with its stack
        local_rank = rank - part.first_rank
        stalled = local_rank in event.local_ranks
        stack = state.workers[rank].stack if stalled else ()
        pid = stopped.get(local_rank) if stalled else None
        state = state.with_worker(rank, stalled=stalled, stack=stack, stopped_pid=pid)
    after = {worker.rank for worker in _stalled(state)}
    if not after and _dumping(state):
        return stall_act_due(state.without_timers(Timer.STALL_ACT), now)
    if not after:
        message = (ShowMessage("info", "stalled ranks resumed"),) if state.stall_told else ()
        state = state.without_timers(Timer.STALL_MESSAGE, Timer.STALL_ACT)
        return state._replace(stall_told=False), message
    if after <= before or state.due_at(Timer.STALL_MESSAGE) is not None:
        return state, ()
    settle_s = SETTLE_S + min(STALL_LOOK_MAX_S, state.stall_s / STALL_LOOKS)
    return state.with_timer(Timer.STALL_MESSAGE, now + settle_s), ()


def _stalled(state: State) -> list[RankState]:
    # A process may stall before its program has started: suspended, or on a file system that doesn't answer.
    return [worker for worker in state.workers if worker.stalled and worker.going]


def stall_message_due(state: State, now: float) -> Step:
    """Report which ranks are stalled and which are not, and request the stacks of the stalled ones."""
    acts, again = state.spec.limits.on_stall != "warn", state.stall_told
    if not _stalled(state):
        return state, ()  # they have finished
    names = listed([_named(state, worker) for worker in _stalled(state)])
    what = f"no output, CPU or GPU use for {span_words(state.stall_s)}"
    text = f"{'now ' if again else ''}stalled: {names}: {what}; {_others_words(state)}"
    # Request only stacks that aren't known yet. The stack of a rank stopped by a signal is meaningless.
    ranks = [w.rank for w in _stalled(state)[: root_cause.MAX_DUMPS] if not (w.stack or w.stopped_pid)]
    evidence = root_cause.capture(state, ranks, acts)
    state = state._replace(stall_told=True)
    if acts and not again:
        state = state.with_timer(Timer.STALL_ACT, now + DUMP_S)
    for rank in ranks if acts else ():
        state = state.with_worker(rank, dumping_until=now + 2 * DUMP_S)
    return state, (ShowMessage("warning", text), *evidence)


def _named(state: State, worker: RankState) -> str:
    pid = worker.stopped_pid
    why = f": {stopped_words(pid)}" if pid else ""
    return state.named(worker.rank, f"{f'pid {worker.pid}' if worker.pid else 'not started yet'}{why}")


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
    if event.stopped:
        state = state.with_worker(rank, stack=frames, stopped_pid=event.stopped)
        return state, (ShowMessage("info", f"{state.called(rank)} is {stopped_words(event.stopped)}"),)
    if not frames:
        return _no_stack(state, rank, py_spy_error(event.text))
    state = state.with_worker(rank, stack=frames)
    where = " < ".join(frames[:SHOWN_FRAMES])
    return state, (ShowMessage("info", f"{state.called(rank)} is blocked in: {where}"),)


def _no_stack(state: State, rank: int, why: str) -> Step:
    """Report once why a stack is missing, since the reason is usually the same for all ranks."""
    if why in state.stackless:
        return state, ()
    message = ShowMessage("info", f"no stack for {state.called(rank)}: {why}")
    return state._replace(stackless=state.stackless | {why}), (message,)


def _dumping(state: State) -> bool:
    """Return whether a stack dump's SIGABRT is killing ranks, which explains failures of their peers."""
    died = any(worker.stalled and worker.stopped for worker in state.workers)
    return died and state.due_at(Timer.STALL_ACT) is not None


def _dump_came(state: State, rank: int, words: str, now: float) -> Step:
    """Record the stack from the output of a rank killed by its dump. Act once all dumps have arrived."""
    thread = words.rpartition("Current thread ")[2].partition("\n\n")[0]  # the one that received SIGABRT
    state = state.with_worker(rank, stalled=True, stack=python_frames(thread))
    if any(not worker.stopped_pid for worker in _stalled(state)):
        return state, ()
    return stall_act_due(state.without_timers(Timer.STALL_ACT), now)


def stall_act_due(state: State, now: float) -> Step:
    """Stop or restart the job, according to `on_stall`, unless the stalled ranks have finished."""
    if not any(worker.stalled for worker in state.workers):
        return state._replace(stall_told=False), ()
    cause = root_cause.stall_cause(state, now)
    return state, (AttemptFailed(cause) if state.spec.limits.on_stall == "restart" else JobOver(cause),)


# Exit


def on_worker_exited(event: WorkerExited, rank: int, state: State, now: float) -> Step:
    """Record the exit of a worker.

    It may be due to a stack dump, it may be a failure, or it may complete the job.
    """
    if isinstance(state.workers[rank].phase, Exited):
        return state, ()
    running, worker = state.phase is Phase.RUNNING, state.workers[rank]
    # Killed by the SIGABRT that makes Python print its stacks. The rank may have resumed in the meantime.
    dumped = running and event.at <= worker.dumping_until and event.status == -signal.SIGABRT
    late = not running and event.at >= state.ended_at
    stopped = dumped or event.asked or (late and event.status <= 0)
    exited = Exited(event.status, event.at, stopped, event.error_record, event.oom_kills, event.shm)
    state = state.with_worker(rank, phase=exited, stalled=worker.stalled and event.status != 0)
    if dumped:
        return _dump_came(state, rank, event.words, now)
    if event.status != 0:
        return _rank_failed(state, rank, event, now)
    if not (running and state.succeeded) or state.asked:
        return state, ()
    text = f"{state.called(rank)} finished; stopping the others (success: {state.spec.success})"
    return state, (*((ShowMessage("info", text),) if state.workers.counts.alive else ()), JobOver())


def on_output_lost(event: OutputLost, rank: int, state: State, now: float) -> Step:
    """Report how much output a node was unable to keep."""
    stream = "stderr" if event.stream else "stdout"
    lost = f"{event.size} bytes of {state.called(rank)}'s {stream} were lost"
    why = "the rank printed faster than its node could send, and the node buffers at most 1 GiB, in TMPDIR"
    advice = "print less or, if the disk with TMPDIR is full, free up space there"
    return state, (ShowMessage("warning", f"{lost}: {why}; {advice}"),)


def _rank_failed(state: State, rank: int, event: WorkerExited, now: float) -> Step:
    """End the attempt after a nonzero exit, once the root cause is clear.

    If the rank merely lost a peer, wait for a better cause until Timer.VERDICT expires.
    """
    words = words_of(event.status, event.words, event.error_record, event.went_on)
    if words.of_ranks and rank not in words.of_ranks:
        words = words._replace(peer_gone=True)  # it has only heard of the failure
    if words.peer_gone:
        state = root_cause.with_exit(
            state, rank, peer_gone=True, timed_out=words.timed_out, on_gpu=words.on_gpu
        )
    if words.stack:
        state = state.with_worker(rank, stack=words.stack)
    if state.phase is not Phase.RUNNING:
        return root_cause.with_earlier_cause(state, rank, event, words), ()
    if words.peer_gone and _dumping(state):
        return state, ()  # the lost peer was killed by its stack dump
    cause = root_cause.exit_cause(state, rank, event, words)
    if not cause.peer_gone:
        return state, (AttemptFailed(cause),)
    if state.suspect is not None:
        # A rank that timed out explains more than one that lost its connection to it.
        explains_more = words.timed_out and root_cause.lost_connection(state, state.suspect)
        return (state._replace(suspect=cause) if explains_more else state), ()
    evidence = root_cause.capture(state)
    state = state.unwatched()._replace(suspect=cause).with_timer(Timer.VERDICT, now + root_cause.VERDICT_S)
    return state, tuple(evidence)
