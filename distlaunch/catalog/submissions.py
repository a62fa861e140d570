"""Jobs in a scheduler's queue: listed beside the runs, which they become."""

import os
import re
import time

from distlaunch.agent.frozen import Frozen
from distlaunch.batch.script import output_path
from distlaunch.catalog.find import JOB_FILES, LOGS
from distlaunch.catalog.folder import Run, run_in
from distlaunch.catalog.index import listed, listed_submissions, note_submission
from distlaunch.catalog.starts import Starts
from distlaunch.state.status import Controller, RunState, Status

CLOCKS_S = 3600.0
"""How far the clocks of two hosts may differ; a run from before was of another job with the same id."""


class Submission(Frozen):
    """A job in Slurm's queue: its id there, its name, the folder of its runs, when it was submitted.

    `at` is in seconds since the epoch. `end` is what Slurm called its end, "" as long as none was seen.
    """

    id: str
    job: str
    folder: str
    at: float
    end: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"Slurm job {self.id}"

    @property
    def output(self) -> str:
        """What its script prints."""
        return output_path(self.folder, self.id)


def note(submission: Submission) -> None:
    """List it."""
    note_submission({"queued": submission.id, **submission._replace(end="")._asdict()})


def note_end(submission: Submission, end: str) -> None:
    """List how it ended, so that Slurm is not asked again, which forgets it."""
    note_submission({"queued": submission.id, "end": end})


def submissions() -> dict[str, Submission]:
    """All that are known, by their ids: those that `submit` made, and of which runs tell."""
    found = {}
    for run in listed().values():
        if run.queued and run.queued not in found:
            found[run.queued] = Submission(run.queued, "", os.path.dirname(run.folder), 0.0)
    fields = Submission._fields
    for queued, line in listed_submissions().items():
        if line.keys() >= {"id", "job", "folder", "at"}:
            found[queued] = Submission(**{name: line[name] for name in fields if name in line})
        elif queued in found:
            found[queued] = found[queued]._replace(end=str(line.get("end", "")))
    return found


def submission(word: str | None) -> Submission | None:
    """The one that a word means: an id of Slurm's, or a job that waits; None = one of this folder."""
    known = submissions()
    if word is not None and re.fullmatch(r"[0-9]+", word):
        return known.get(word) or _beside_its_runs(word)
    waiting = [each for each in known.values() if not each.end and each.at and _is_meant(each, word)]
    newest = max(waiting, key=lambda each: each.at, default=None)
    return newest if newest and latest_run(newest) is None else None


def submission_of(run: Run) -> Submission | None:
    """The one whose latest run that is."""
    entry = listed().get(run.id)
    found = submissions().get(entry.queued) if entry and entry.queued else None
    latest = latest_run(found) if found else None
    return found if latest and latest.id == run.id else None


def _is_meant(each: Submission, word: str | None) -> bool:
    if word is None:
        return each.folder.startswith(os.path.join(os.getcwd(), ""))
    stem, suffix = os.path.splitext(os.path.basename(word))
    return each.job in (word, stem if suffix in JOB_FILES else word)


def _beside_its_runs(job: str) -> Submission | None:
    """One that is not listed, as where a home is not shared: its starts tell of it."""
    for folder in (os.path.abspath(LOGS), os.getcwd()):
        if os.path.exists(Starts(folder, job).path):
            return Submission(job, "", folder, 0.0)
    return None


def latest_run(each: Submission) -> Run | None:
    """What it has become last, if it has been started."""
    begun = Starts(each.folder, each.id).begun()
    run = run_in(os.path.join(each.folder, begun[-1].run)) if begun else None
    return run if run and run.status.began > each.at - CLOCKS_S else None


def as_run(each: Submission, state: RunState, why: str) -> Run:
    """A submission without a run, for a list of runs."""
    at = each.at or time.time()
    ended = state.over
    status = Status(
        each.id,
        each.job,
        state,
        at,
        at,
        Controller("", 0),
        where="" if ended else f"Slurm: {why}",
        why=f"Slurm: {why}; see {each.output}" if ended else "",
    )
    return Run("", status, alive=False, heard=None)
