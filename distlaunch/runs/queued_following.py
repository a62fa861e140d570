"""Follows a job through its scheduler's queue: each of its starts is a run."""

import time
from collections.abc import Callable, Iterator

from distlaunch.errors import DistlaunchError
from distlaunch.runs.find import find
from distlaunch.runs.folder import Run
from distlaunch.runs.following import over, pause
from distlaunch.runs.submissions import Submission, latest_run, note_end, submission, submission_of
from distlaunch.schedulers import load
from distlaunch.schedulers.queue import CANCELLED, GONE, Queued
from distlaunch.signals import Interrupts

LOOK_S = 0.25
"""Between two looks at the folder, which cost a scheduler nothing."""
FIRST_GAP_S, LAST_GAP_S, GROWTH = 0.5, 60.0, 1.5
"""Between two questions to a scheduler: at first, at most, and by how much they grow."""


class Patience:
    """When to ask again: ever less often."""

    def __init__(self) -> None:
        self._gap_s, self._next = FIRST_GAP_S, 0.0

    def due(self) -> bool:
        """Whether it is time; the next time is later."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next, self._gap_s = now + self._gap_s, min(self._gap_s * GROWTH, LAST_GAP_S)
        return True


def runs_of(word: str | None, interrupts: Interrupts, tell: Callable[[str], None]) -> Iterator[Run]:
    """Each run that a word means, one after another: of a job in a queue, all that it becomes.

    `tell` gets what it waits for. Ends early when a signal has come. Raises `DistlaunchError`.
    """
    run = None if (queued := submission(word)) else find(word)
    if run:
        yield run
        queued = submission_of(run)
    before = run
    if queued is None or interrupts.any():
        return
    while before := _next(queued, before, interrupts, tell):
        yield before


def run_of(word: str | None) -> Run:
    """The run that a word means, of a job in a queue the latest. Raises `DistlaunchError`."""
    queued = submission(word)
    if queued is None:
        return find(word)
    if run := latest_run(queued):
        return run
    state = state_of(queued)
    told = f"{queued.name} has not started: {state.words}"
    raise DistlaunchError(_without_run(queued, state) if state.over else told)


def state_of(queued: Submission) -> Queued:
    """What its scheduler says of it, or has said at its end. Raises `DistlaunchError`."""
    if queued.end:
        return Queued(queued.end)
    return load(queued.scheduler).look([queued.id]).get(queued.id, GONE)


def _next(
    queued: Submission, before: Run | None, interrupts: Interrupts, tell: Callable[[str], None]
) -> Run | None:
    """The run after `before`, once it has begun; None when there will be none.

    Raises `DistlaunchError` where none was.
    """
    patience, told = Patience(), ""
    while not interrupts.any():
        if run := _newer(queued, before):
            return run
        if patience.due():
            state = state_of(queued)
            if state.over:
                run = _newer(queued, before)
                if not (run or queued.end):
                    note_end(queued, state.state)
                if not (run or before):
                    raise DistlaunchError(_without_run(queued, state))
                return run
            if state.waits and state.words != told:
                told = state.words
                tell(f"{queued.name} is {told}")
        pause(interrupts, LOOK_S)
    return None


def _newer(queued: Submission, before: Run | None) -> Run | None:
    run = latest_run(queued)
    return run if run and (before is None or run.id != before.id) else None


def _without_run(queued: Submission, state: Queued) -> str:
    return f"{queued.name} {state.ending} and started no run; see {queued.output}"


def stop_queued(queued: Submission, at_once: bool, interrupts: Interrupts) -> tuple[Run | None, bool]:
    """Cancel it, and wait until nothing of it is left: its last run, and whether it was still to be ended.

    Leaves earlier when a signal has come. Raises `DistlaunchError`.
    """
    if state_of(queued).over:
        return latest_run(queued), False
    load(queued.scheduler).cancel(queued.id, at_once)
    patience = Patience()
    while not interrupts.any():
        run = latest_run(queued)
        if not (run and run.alive) and patience.due() and (state := state_of(queued)).over:
            note_end(queued, CANCELLED if state == GONE else state.state)
            break
        pause(interrupts, LOOK_S)
    run = latest_run(queued)
    return (over(run) if run else None), True
