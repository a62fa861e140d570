"""What queues say of the jobs in them, for a list of runs: each is asked once for all of its jobs."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from distlaunch.batch.queue import CANCELLED, GONE, Queued
from distlaunch.batch.queues import queue_of
from distlaunch.errors import DistlaunchError
from distlaunch.runs.folder import Run
from distlaunch.runs.submissions import Submission, as_run, latest_run, note_end, submissions
from distlaunch.supervisor.status import RunState


def waiting(shown: Sequence[Run], ended: bool) -> Iterator[tuple[Submission, Run]]:
    """Jobs in a queue that are no run, or one that is over, each as a run; those that have `ended` if asked.

    `shown` are the runs that are listed anyway. A scheduler is asked only if there may be one of its jobs.
    """
    known = [each for each in submissions().values() if each.at]
    if ended:
        yield from ((each, _ended(each, each.end)) for each in known if each.end and not _runs(each))
    alive = {run.id for run in shown if run.alive}
    open_ = [each for each in known if not each.end and _latest(each) not in alive]
    for scheduler, of_one in groupby(sorted(open_, key=_scheduler), _scheduler):
        yield from _asked(scheduler, list(of_one), ended)


def _scheduler(each: Submission) -> str:
    return each.scheduler


def _asked(scheduler: str, open_: Sequence[Submission], ended: bool) -> Iterator[tuple[Submission, Run]]:
    try:
        told = queue_of(scheduler).look([each.id for each in open_])
    except DistlaunchError as error:
        yield from ((each, as_run(each, RunState.PENDING, f"unknown, {error}")) for each in open_)
        return
    for each in open_:
        state = told.get(each.id, GONE)
        if not state.over:
            yield each, as_run(each, *_words(state))
            continue
        note_end(each, state.state)
        if ended and not _runs(each):
            yield each, _ended(each, state.state)


def _words(state: Queued) -> tuple[RunState, str]:
    """A job that runs, and has no run yet, is being set up."""
    return (RunState.PENDING if state.waits else RunState.CONNECTING), state.words


def _ended(each: Submission, end: str) -> Run:
    state = RunState.CANCELLED if end == CANCELLED else RunState.FAILED
    return as_run(each, state, Queued(end).ending if end == GONE.state else end)


def _runs(each: Submission) -> bool:
    return latest_run(each) is not None


def _latest(each: Submission) -> str | None:
    run = latest_run(each)
    return run.id if run else None
