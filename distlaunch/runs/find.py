"""Finds runs by ID, a unique prefix, a job's name or a directory, or the latest here."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby

from distlaunch.errors import UsageError, reason
from distlaunch.observers.run_folder import EVENTS, job_part
from distlaunch.runs.folder import Run, run_in
from distlaunch.runs.index import listed
from distlaunch.wording import listed as listed_words

LOGS = "runs"
"""Where job files keep their run directories if they don't say."""
JOB_FILES = (".yaml", ".yml")
CUT = "…"
"""Stands in an id for its middle, where that was too long to be shown."""
MAX_NAMED = 8
"""Runs that are named where a word means several."""
_ID = re.compile(r"(?P<job>.+)-(?P<when>\d{8}-\d{6})-(?P<chance>[0-9a-f]{8})")
_LIST = "`distlaunch ps -a` lists all known runs"


def find(word: str | None, alone: bool = False) -> Run:
    """The run that a word means; None is one below this folder. Of several, the latest that goes on, or has.

    With `alone`, only one of them may go on. Raises `UsageError`.
    """
    known, unique = folders(), False
    if word is None:
        here = os.path.join(os.getcwd(), "")
        runs = {run: path for run, path in known.items() if os.path.abspath(path).startswith(here)}
        which = "below this folder"
        nothing = f"no runs below the current folder; name one ({_LIST})"
    elif os.path.isdir(word) or (os.sep in word and not word.endswith(JOB_FILES)):
        if found := run_in(os.path.abspath(word)):
            return found
        runs, which = dict(scanned([word])), f"in {word}"
        nothing = f"{word}: not a run directory, and it contains no runs"
    else:
        runs, which, nothing = _of_name(word, known), f"of {word}", f"no run matches {word!r}; {_LIST}"
        unique = not runs
        runs = runs or _begun_with(word, known)
    going = _going(runs)
    if unique and len(runs) > 1 and len(going) != 1:
        raise UsageError(_ambiguous(word, runs))
    if alone and len(going) > 1:
        ids = listed_words([run.id for run in going])
        raise UsageError(f"{len(going)} runs {which} are running: {ids}; name one by its id")
    if run := going[0] if going else _latest(runs):
        return run
    raise UsageError(nothing)


def named(word: str) -> dict[str, str]:
    """The folders of all runs that a word names, by their ids."""
    known = folders()
    return _of_name(word, known) or _begun_with(word, known)


def _begun_with(word: str, known: Mapping[str, str]) -> dict[str, str]:
    begin, _, end = word.partition(CUT)
    if not begin:
        return {}  # a shell's variable that is not set means no run
    return {run: path for run, path in known.items() if run.startswith(begin) and run.endswith(end)}


def _of_name(word: str, known: Mapping[str, str]) -> dict[str, str]:
    """The run of that id, the runs of a job by its name or its file, or those inside a scheduler's job."""
    if word in known:
        return {word: known[word]}
    if found := {run: path for run, path in known.items() if _job_of(run) == word}:
        return found
    name = word
    if word.endswith(JOB_FILES) and os.path.isfile(word):
        from distlaunch.job.file import name_in  # few commands need YAML

        name = name_in(word)
    part = job_part(name)
    found = {run: path for run, path in known.items() if _job_of(run) == part}
    if part != name:  # ids only have a part of it
        found = {
            run: path for run, path in found.items() if (seen := run_in(path)) and seen.status.job == name
        }
    inside = {run for run, entry in listed().items() if entry.queued and entry.queued.id == word}
    return found or {run: path for run, path in known.items() if run in inside}


def _going(runs: Mapping[str, str]) -> list[Run]:
    """Those that are not over, the latest first."""
    over = {run for run, entry in listed().items() if entry.over}
    found = [run for name, path in runs.items() if name not in over and (run := run_in(path))]
    going = [run for run in found if not run.status.state.over]
    return sorted(going, key=lambda run: run.status.began, reverse=True)


def _latest(runs: Mapping[str, str]) -> Run | None:
    """Ids have the second; of several runs that began in one, their folders tell."""
    for _, names in groupby(sorted(runs, key=when, reverse=True), when):
        if found := [run for run in (run_in(runs[name]) for name in names) if run]:
            return max(found, key=lambda run: run.status.began)
    return None


def _ambiguous(word: str | None, runs: Collection[str]) -> str:
    latest = [f"  {run}" for run in sorted(runs, key=when, reverse=True)]
    more = [f"  and {len(runs) - MAX_NAMED} more"] if len(runs) > MAX_NAMED else []
    return "\n".join([f"{word!r} is ambiguous: it matches {len(runs)} runs:", *latest[:MAX_NAMED], *more])


def folders() -> dict[str, str]:
    """Each known run's folder, by its id: those listed, and those in this folder."""
    found = {run: entry.folder for run, entry in listed().items()}
    return {**found, **dict(scanned([os.curdir]))}


def _job_of(run: str) -> str:
    """The job's name in a run's id."""
    match = _ID.fullmatch(run)
    return match["job"] if match else run


def when(run: str) -> str:
    """What sorts ids by when they began."""
    match = _ID.fullmatch(run)
    return match["when"] if match else ""


def check_folder(place: str) -> None:
    """Raises `UsageError` if it can't be read."""
    try:
        os.scandir(place).close()
    except OSError as error:
        raise UsageError(f"{place}: {reason(error)}") from None


def scanned(places: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(id, folder) of the run that each place is, and of those in it and in the `runs` there."""
    for place in map(os.path.abspath, places):
        for folder in (place, *_inside(place), *_inside(os.path.join(place, LOGS))):
            name = os.path.basename(folder)
            if _ID.fullmatch(name) and os.path.exists(os.path.join(folder, EVENTS)):
                yield name, folder


def _inside(folder: str) -> list[str]:
    try:
        return [os.path.join(folder, name) for name in os.listdir(folder)]
    except OSError:
        return []
