"""Follows a run to its end, or until we are told to leave it alone."""

import select

from distlaunch.runs.folder import Run, run_in
from distlaunch.runs.ending import summary_of
from distlaunch.runs.retelling import Retelling
from distlaunch.observers.observer import Observer
from distlaunch.state.status import RunState
from distlaunch.system.signals import Interrupts

_GONE = "its run folder was removed or renamed; the run itself may still be going"
LOOK_S = 0.1
"""Between two looks into the folder: it may be on another machine's disk, which tells nobody of a change."""


def attend(run: Run, observer: Observer, interrupts: Interrupts, everything: bool = False) -> Run:
    """Tell `observer` of what happens from now on; the run as it is when it is over, or we are to leave.

    With `everything`, of what has happened before, too. Raises `HistoryError`.
    """
    retelling = Retelling(run.folder, observer)
    try:
        if not everything:
            retelling.skip()
        run = follow(run, retelling, interrupts)
        if not run.alive and retelling.state and (summary := summary_of(run.folder, retelling.state)):
            observer.drained(retelling.state)
            observer.ended(summary)
        return run
    finally:
        retelling.close()


def follow(run: Run, retelling: Retelling, interrupts: Interrupts) -> Run:
    """Have all told that comes, until the run is over or a signal comes; the run as it is then."""
    while not interrupts.any():
        run = over(run)  # first: what it wrote before its end is told
        while retelling.turn():
            pass
        retelling.wake()
        if not run.alive:
            break
        pause(interrupts, LOOK_S)
    return run


def wait(run: Run, interrupts: Interrupts) -> Run:
    """The run when it is over, or a signal has come."""
    while run.alive and not interrupts.any():
        pause(interrupts, LOOK_S)
        run = over(run)
    return run


def over(run: Run) -> Run:
    """The run as it is by now; one whose folder was taken away is lost to us, however it ends."""
    if now := run_in(run.folder):
        return now
    status = run.status if run.status.state.over else run.status._replace(state=RunState.LOST, why=_GONE)
    return run._replace(alive=False, status=status)


def pause(interrupts: Interrupts, seconds: float) -> None:
    """Wait so long, or until a signal comes."""
    select.select([interrupts.fd], [], [], seconds)
