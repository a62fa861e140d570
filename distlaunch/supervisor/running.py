"""The workers' life: who has started, and who has ended."""

import errno

from distlaunch.state import workers
from distlaunch.state.actions import Notice
from distlaunch.state.events import OutputLost, WorkerExited, WorkerStarted, WorkerUnstarted
from distlaunch.state.findings import DumpCame, JobOver, Step, WorkerFailed, WorkerFinished
from distlaunch.state.job import Cause, Phase, State
from distlaunch.state.workers import Exited
from distlaunch.supervisor import stalling


def on_worker_started(event: WorkerStarted, state: State, now: float) -> Step:
    """A worker runs."""
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None:
        return state, ()
    return state.with_worker(rank, phase=workers.WorkerPhase.RUNNING, pid=event.pid, cpus=event.cpus), ()


def on_worker_unstarted(event: WorkerUnstarted, state: State, now: float) -> Step:
    """A worker can't be started: a mistake in the job, so end."""
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None:
        return state, ()
    from distlaunch.plan.unstarted import unstarted_advice  # of a mistake

    state = state.with_worker(rank, phase=workers.WorkerPhase.UNSTARTED)
    # As in a shell: 127 for what does not exist, 126 for what can't be run.
    status = 127 if event.errno == errno.ENOENT else 126
    advice = unstarted_advice(state.spec, event.node, event.stage, event.errno)
    text = f"{state.named(rank)} could not be started: {event.text}{advice}"
    return state, (JobOver(Cause(text, status, now, rank, event.node)),)


def on_worker_exited(event: WorkerExited, state: State, now: float) -> Step:
    """A worker has ended."""
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None or isinstance(state.worker(rank).phase, Exited):
        return state, ()
    running = state.phase is Phase.RUNNING
    dumped = stalling.died_of_its_dump(state, rank, event.status)
    told = dumped or not running
    exited = Exited(event.status, event.at, told, event.error_record, event.oom_kills, event.shm)
    state = state.with_worker(rank, phase=exited)
    if dumped:
        return state, (DumpCame(rank, event.words),)
    if event.status != 0:
        return state, (WorkerFailed(rank, event),)
    return state, (WorkerFinished(),) if running else ()


def on_output_lost(event: OutputLost, state: State, now: float) -> Step:
    """A node could not keep some output: say how much."""
    rank = state.rank_of(event.node, event.local_rank)
    if rank is None:
        return state, ()
    stream = "stderr" if event.stream else "stdout"
    lost = f"{event.size} bytes of {state.called(rank)}'s {stream} were lost"
    return state, (Notice("warning", f"{lost}: its node had no room to buffer them"),)
