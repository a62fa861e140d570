"""Follows another process's run by its directory until the run ends or a signal arrives. Also stops runs."""

import contextlib
import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from distlaunch.agent.procfs import environment, names
from distlaunch.errors import DistlaunchError
from distlaunch.here import send_signal
from distlaunch.observers.observer import Observer, Printed
from distlaunch.observers.recording import STDERR_BYTES, LastOutput
from distlaunch.observers.run_directory import FRESH_S, STATUS, STOPPED, fd_of, within
from distlaunch.plan.workers import destinations
from distlaunch.runs.replay import Playback, typed
from distlaunch.runs.run import Run, document_in, has_pid_here, living, remembered, run_in, trouble_with
from distlaunch.schedulers.queue import ANOTHER_WISH_S
from distlaunch.signals import Interrupts
from distlaunch.supervisor.state import Phase, State
from distlaunch.supervisor.status import RunState
from distlaunch.supervisor.summary import STDERR, Summary

_OF_SUMMARY = {"seconds": float, "lagging": tuple[str, ...], "collecting": tuple[str, ...]}
LOOK_S = 0.1
"""Seconds between two checks of the directory, which may be on a remote disk without notifications."""
NOTE_S = 1.0
"""Maximum seconds to wait until the disk has taken a note for the controller."""


def attend(
    run: Run, observer: Observer, interrupts: Interrupts, everything: bool = False
) -> tuple[Run, bool]:
    """Notify `observer` of changes to the run until it ends or a signal arrives.

    Return the run, and whether the observer was notified of its end. With `everything`, replay the run's past
    first. Raises `HistoryError`.
    """
    with contextlib.closing(Playback(run.directory, observer)) as playback:
        if not everything:
            playback.skip()
        run = follow(run, interrupts, playback)
        if run.alive or playback.state is None or lacks_end(playback.state, document_in(run.directory)):
            return run, False
        if summary := summary_of(run.directory, playback.state):
            observer.drained(playback.state)
            observer.ended(summary)
        return run, summary is not None


def follow(run: Run, interrupts: Interrupts, playback: Playback | None = None) -> Run:
    """Follow the run until it ends or a signal arrives. Return its state at that time.

    If its controller's process can't be seen here, an active run must seem to be lost for FRESH_S: disks
    hang, and clocks jump.
    """
    was_alive, lost_at = run.alive, math.inf
    while not interrupts.any():
        run = over(run)  # first, so that everything written before the end is read
        if playback:
            playback.catch_up()
        if run.alive:
            lost_at = math.inf
        else:
            lost_at = min(lost_at, time.monotonic())
            is_unsure = run.status.state is RunState.LOST and not has_pid_here(run.status.controller)
            if not (was_alive and is_unsure) or time.monotonic() - lost_at >= FRESH_S:
                break
        pause(interrupts, LOOK_S)
    return run


def over(run: Run) -> Run:
    """Return the run's current state. Without its directory and controller, it is lost unless it was over."""
    if now := run_in(run.directory) or living(run.id, run.status.controller.pid) or remembered(run.id):
        return now
    if run.status.state.over:
        return run._replace(alive=False)
    trouble = trouble_with(run.directory)
    why = f"its {STATUS} can't be read: {trouble}" if trouble else "its run directory was removed or renamed"
    why += "; the run may still be active" if run.host else ""
    return run._replace(alive=False, status=run.status._replace(state=RunState.LOST, why=why))


def pause(interrupts: Interrupts, seconds: float) -> None:
    """Wait for `seconds`, or until a signal arrives."""
    select.select([interrupts.fd], [], [], seconds)


def summary_of(directory: str, state: State) -> Summary | None:
    """Return the controller's summary of a run; None = there is none. `state` is the run's final state."""
    document = document_in(directory)
    try:
        seconds, lagging, collecting = (typed(kind, document[key]) for key, kind in _OF_SUMMARY.items())
    except (KeyError, TypeError):
        return None
    last_output = LastOutput()
    last_output.started(state, 0.0)
    cause = state.cause.rank if state.cause else None
    places = destinations(state.plan, state.attempt) if state.plan else {}
    for (rank, stream), goes_to in places.items():
        if goes_to.file:
            whole = rank == cause and stream == STDERR  # its lines are counted
            for data in output_of(directory, goes_to.file, whole):
                last_output.printed(Printed(rank, stream, data, state.attempt, goes_to))
    return last_output.summary(state, directory, seconds)._replace(lagging=lagging, collecting=collecting)


def lacks_end(state: State, document: Mapping[str, Any]) -> bool:
    """Return whether a summary shows another end than the events, some of which a full disk may lack."""
    cause = document.get("cause")
    rank = cause.get("rank") if isinstance(cause, dict) else None
    known = state.phase is Phase.DONE and rank in (None, state.cause and state.cause.rank)
    if isinstance(workers := document.get("workers"), list):
        ends = [each.get("status") for each in workers if isinstance(each, dict)]
        known = known and ends == [worker.status for worker in state.workers]
    return bool(document) and not known


def output_of(directory: str, name: str, whole: bool = False) -> Iterator[bytes]:
    """Read a rank's `whole` output file, or only as much of its end as summaries use."""
    with contextlib.suppress(OSError), open(fd_of(directory, name), "rb") as file:
        if not whole:
            file.seek(max(0, os.fstat(file.fileno()).st_size - STDERR_BYTES))
        while data := file.read(1 << 20):
            yield data


def interrupt(run: Run, at_once: bool = False) -> bool:
    """Stop the run, or kill its ranks `at_once`. Return False if it is over. Raises `DistlaunchError`."""
    pid = run.status.controller.pid  # while the controller lives, no other process has its PID
    if not run.alive:
        return False
    if run.host:  # where its PID means another process
        raise DistlaunchError(f"{run.id} is controlled on {run.host}: use `distlaunch stop {run.id}` there")
    if not has_pid_here(run.status.controller):
        what = f"{run.id} is controlled outside this container, or in another one"
        raise DistlaunchError(f"{what}: use `distlaunch stop {run.id}` there")
    within(NOTE_S, lambda: _note_stop(run.directory))
    sent = send_signal(pid, signal.SIGINT, lambda: over(run).alive)
    if sent:
        send_signal(pid, signal.SIGCONT, lambda: over(run).alive)  # the controller may be suspended
    if sent and at_once:
        time.sleep(ANOTHER_WISH_S)
        send_signal(pid, signal.SIGINT, lambda: over(run).alive)
    return sent


def _note_stop(directory: str) -> None:
    """Tell the controller that the signal comes from `stop`, if the disk takes that."""
    with contextlib.suppress(OSError):
        os.close(os.open(os.path.join(directory, STOPPED), os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600))


def outlast(run: Run, interrupts: Interrupts, tell: Callable[[int], object]) -> None:
    """Wait until a lost run's ranks on this machine exit after their grace period, or until a signal.

    If there are any, call `tell` once, with the PID of one.
    """
    cookie, told = f"DISTLAUNCH_RUN_ID={run.id}".encode(), False
    for pid in map(int, {*filter(str.isdigit, names("/proc"))} - {str(os.getpid())}):
        while cookie in environment(pid).split(b"\0") and not interrupts.any():
            if not told:
                tell(pid)
            told = True
            pause(interrupts, LOOK_S)
