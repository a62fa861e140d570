"""Jobs in a scheduler's queue: listed beside the runs, which they become; each queue is asked once."""

import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import product

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import DistlaunchError, UsageError
from distlaunch.runs.find import JOB_FILES, LOGS
from distlaunch.runs.folder import Run, run_in
from distlaunch.runs.index import Starts, Ticket, listed, listed_submissions, note_submission
from distlaunch.schedulers import DEFAULT, TABLE, load, title_of
from distlaunch.schedulers.queue import CANCELLED, GONE, Queued, output_path
from distlaunch.supervisor.status import Controller, RunState, Status
from distlaunch.wording import listed as listed_words

CLOCKS_S = 3600.0
"""How far the clocks of two hosts may differ; a run from before was of another job with the same id."""


_ID = re.compile(r"[0-9]+(\.[A-Za-z0-9_.-]+)?")


class Submission(Frozen):
    """A job in a scheduler's queue: its id there, its name, the folder of its runs, when it was submitted.

    `at` is in seconds since the epoch; 0 for one that was not submitted by us. `end` is what the scheduler
    called its end, "" as long as none was seen.
    """

    id: str
    job: str
    folder: str
    at: float
    end: str = ""
    scheduler: str = DEFAULT

    @property
    def ticket(self) -> Ticket:
        """What its queue knows it by."""
        return Ticket(self.scheduler, self.id)

    @property
    def name(self) -> str:
        """For people."""
        return f"{title_of(self.scheduler)} job {self.id}"

    @property
    def output(self) -> str:
        """What its script prints."""
        return output_path(self.folder, self.id, self.scheduler)

    @property
    def warned(self) -> bool:
        """Whether its ranks are warned before its scheduler ends it; scripts that we submit see to that."""
        return bool(self.at) or load(self.scheduler).warns


def note(submission: Submission) -> None:
    """List it."""
    note_submission(submission.ticket, submission._replace(end="")._asdict())


def note_end(submission: Submission, end: str) -> None:
    """List how it ended, so that its scheduler is not asked again, which forgets it."""
    note_submission(submission.ticket, {"end": end})


def submissions() -> dict[Ticket, Submission]:
    """All that are known: those that `submit` made, and of which runs tell."""
    found = {}
    for run in listed().values():
        if run.queued and run.queued not in found:
            scheduler, job = run.queued
            found[run.queued] = Submission(job, "", os.path.dirname(run.folder), 0.0, scheduler=scheduler)
    fields = Submission._fields
    for queued, line in listed_submissions():
        if line.keys() >= {"id", "job", "folder", "at"}:  # an id may come again: a scheduler set up anew
            found[queued] = Submission(**{name: line[name] for name in fields if name in line})
        elif queued in found:
            found[queued] = found[queued]._replace(end=str(line.get("end", "")))
    return found


def submission(word: str | None) -> Submission | None:
    """The one that a word means: an id in a queue, or a job that waits; None = one of this folder.

    Raises `UsageError` for the beginning of several ids.
    """
    known = submissions().values()
    named = _of_id(word, known) or _beside_its_runs(word) if word and _ID.fullmatch(word) else None
    if named:
        return named
    waiting = [each for each in known if not each.end and each.at and _is_meant(each, word)]
    newest = max(waiting, key=lambda each: each.at, default=None)
    return newest if newest and latest_run(newest) is None else None


def submission_of(run: Run) -> Submission | None:
    """The one whose latest run that is."""
    entry = listed().get(run.id)
    found = submissions().get(entry.queued) if entry and entry.queued else None
    latest = latest_run(found) if found else None
    return found if latest and latest.id == run.id else None


def _of_id(word: str, known: Collection[Submission]) -> Submission | None:
    """The latest of that id, or the only one of that number: some have the server's name behind it."""
    if found := [each for each in known if each.id == word]:
        return max(found, key=lambda each: (not each.end, each.at))
    numbered = [each for each in known if each.id.partition(".")[0] == word]
    if len(numbered) > 1:
        ids = listed_words([each.id for each in numbered])
        raise UsageError(f"{word} is ambiguous: it matches {ids}")
    return numbered[0] if numbered else None


def _is_meant(each: Submission, word: str | None) -> bool:
    if word is None:
        return each.folder.startswith(os.path.join(os.getcwd(), ""))
    stem, suffix = os.path.splitext(os.path.basename(word))
    return each.job in (word, stem if suffix in JOB_FILES else word)


def _beside_its_runs(job: str) -> Submission | None:
    """One that is not listed, as where a home is not shared: its starts tell of it."""
    for folder, scheduler in product((os.path.abspath(LOGS), os.getcwd()), TABLE):
        if os.path.exists(Starts(folder, job, scheduler).path):
            return Submission(job, "", folder, 0.0, scheduler=scheduler)
    return None


def latest_run(each: Submission) -> Run | None:
    """What it has become last, if it has been started."""
    begun = Starts(each.folder, each.id, each.scheduler).begun()
    run = run_in(os.path.join(each.folder, begun[-1].run)) if begun else None
    return run if run and run.status.began > each.at - CLOCKS_S else None


def as_run(each: Submission, state: RunState, why: str) -> Run:
    """A submission without a run, for a list of runs."""
    at = each.at or time.time()
    told = f"{title_of(each.scheduler)}: {why}"
    where, ending = ("", f"{told}; see {each.output}") if state.over else (told, "")
    status = Status(each.id, each.job, state, at, at, Controller("", 0), where=where, why=ending)
    return Run("", status, alive=False, heard=None)


def waiting(shown: Sequence[Run], ended: bool) -> Iterator[tuple[Submission, Run]]:
    """Jobs in a queue that are no run, or one that is over, each as a run; those that have `ended` if asked.

    `shown` are the runs that are listed anyway. A scheduler is asked only if there may be one of its jobs.
    """
    known = [each for each in submissions().values() if each.at]
    if ended:
        yield from ((each, _ended(each, each.end)) for each in known if each.end and not latest_run(each))
    alive = {run.id for run in shown if run.alive}
    latest = {each: latest_run(each) for each in known if not each.end}
    open_ = [each for each, run in latest.items() if not (run and run.id in alive)]
    for scheduler in sorted({each.scheduler for each in open_}):
        yield from _asked(scheduler, [each for each in open_ if each.scheduler == scheduler], ended)


def _asked(scheduler: str, open_: Sequence[Submission], ended: bool) -> Iterator[tuple[Submission, Run]]:
    try:
        told = load(scheduler).look([each.id for each in open_])
    except DistlaunchError as error:
        yield from ((each, as_run(each, RunState.PENDING, f"unknown, {error}")) for each in open_)
        return
    for each in open_:
        state = told.get(each.id, GONE)
        if not state.over:
            # One that runs, and has no run yet, is being set up.
            yield each, as_run(each, RunState.PENDING if state.waits else RunState.CONNECTING, state.words)
            continue
        note_end(each, state.state)
        if ended and not latest_run(each):
            yield each, _ended(each, state.state)


def _ended(each: Submission, end: str) -> Run:
    state = RunState.CANCELLED if end == CANCELLED else RunState.FAILED
    return as_run(each, state, Queued(end).ending if end == GONE.state else end)
