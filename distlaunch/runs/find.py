"""Finds runs by ID or a unique prefix, by job name or directory, or the latest run in this directory."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from distlaunch.errors import UsageError, reason
from distlaunch.observers.run_directory import EVENTS, job_part
from distlaunch.observers.run_list import listed, noted_ends, ways
from distlaunch.runs.run_status import Run, living, run_in
from distlaunch.supervisor.status import ControllerProcess, RunState, Status
from distlaunch.wording import CUT
from distlaunch.wording import listed as listed_words

LOGS = "runs"
"""The default directory for run directories."""
JOB_FILES = (".yaml", ".yml")
MAX_NAMED = 8
"""Maximum runs listed in the message about an ambiguous name."""
_T = TypeVar("_T")
_ID = re.compile(r"(?P<job>.+)-(?P<when>\d{8}-\d{6})-(?P<chance>[0-9a-f]{8})")
_LIST = "`distlaunch ps -a` lists all known runs"


def find(word: str | None, alone: bool = False) -> Run:
    """Find the run that a word refers to. For None, find a run below this directory or started from it.

    If several match, prefer the latest active run, or else the latest. With `alone`, at most one match may be
    active. Raises `UsageError`.
    """
    known, unique = folders(), False
    if word is None:
        here = os.path.join(os.getcwd(), "")
        started = {run for run, entry in listed().items() if os.path.join(entry.cwd, "") == here}
        below = {run for run, path in known.items() if os.path.abspath(path).startswith(here)}
        runs = {run: path for run, path in known.items() if run in started | below}
        which = "of this directory"
        nothing = f"no runs below the current directory or started from it; specify one ({_LIST})"
    elif os.path.isdir(word) or (os.sep in word and not word.endswith(JOB_FILES)):
        if os.path.isdir(word) and os.stat(word).st_uid != os.geteuid():
            raise UsageError(f"{word} belongs to another user: only that user can follow or stop its runs")
        if found := run_in(os.path.abspath(word)):
            return found
        runs, which = dict(scanned([word])), f"in {word}"
        nothing = f"{word}: not a run directory, and it contains no runs"
    else:
        runs, which, nothing = _of_name(word, known), f"of {word}", unmatched(word)
        unique = not runs
        runs = runs or _starting_with(word, known)
    going = _going(runs)
    if unique and len(runs) > 1 and len(going) != 1:
        raise UsageError(_ambiguous(word, runs))
    if alone and len(going) > 1:
        ids = listed_words([run.id for run in going])
        raise UsageError(f"{len(going)} runs {which} are running: {ids}; specify one by its ID")
    if alone and word is None and not going and (others := _going(known)):
        ids = listed_words([run.id for run in others])
        raise UsageError(f"no active runs of this directory; active elsewhere: {ids}; specify one by its ID")
    if run := going[0] if going else _latest(runs) or living(word or ""):
        return run
    raise UsageError(nothing)


def unmatched(word: str) -> str:
    """Return the message about a word that doesn't match any run."""
    return f"no run matches {word!r}; {_LIST}"


def named(word: str) -> dict[str, str]:
    """Return the directories of all runs that a word matches, keyed by ID."""
    known = folders()
    return _of_name(word, known) or _starting_with(word, known)


def _starting_with(word: str, known: Mapping[str, _T]) -> dict[str, _T]:
    """Return runs whose ID begins with the word, past the job's name, or matches it around a CUT mark."""
    begin, cut, end = word.partition(CUT)
    found = {run: it for run, it in known.items() if run.startswith(begin) and run.endswith(end)}
    return {run: it for run, it in found.items() if (cut and begin) or begin.startswith(f"{_job_of(run)}-")}


def _of_name(word: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return the run with that ID, the runs of a job given by name or file, or those of a scheduler's job."""
    if word in known:
        return {word: known[word]}
    if word.endswith(JOB_FILES):  # names are no help: most job files have the same
        file = os.path.realpath(word)
        sent = ways(file)  # to a host that shares the list of runs
        same = {run for run, path in known.items() if (it := run_in(path)) and it.status.file == file}
        return {run: path for run, path in known.items() if run in sent or run in same}
    part = job_part(word)
    found = {run: path for run, path in known.items() if _job_of(run) == part}
    if part != word:  # IDs contain only a part of it
        found = {
            run: path for run, path in found.items() if (seen := run_in(path)) and seen.status.job == word
        }
    inside = {run for run, entry in listed().items() if entry.queued and entry.queued.id == word}
    return found or {run: path for run, path in known.items() if run in inside}


def elsewhere(word: str, alone: bool = False) -> tuple[str, Sequence[Any]] | None:
    """Return a run on another host that matches a word, and how to reach that host; `alone` as in `find`.

    Unless its end was noted, this machine can't tell whether the run is active. Raises `UsageError`.
    The second item contains the arguments of `cli.remote.ssh_to`.
    """
    file = os.path.realpath(word) if word.endswith(JOB_FILES) else ""
    there, known = {} if os.path.isdir(word) else ways(file), folders()
    of_job = {run: way for run, way in there.items() if file or (word and _job_of(run) == job_part(word))}
    here = _of_name(word, known) or ({} if of_job else _starting_with(word, known))
    found = {run: way for run, way in (of_job or _starting_with(word, there)).items() if run not in known}
    if not found or word in here:
        return None
    going, runs = [run.id for run in _going(here)], [*found, *here]
    if going and not alone:
        return None
    active = [*(found.keys() - noted_ends()), *going]
    if (len(active) > 1 and alone) or (len(active) != 1 < len(runs) and not of_job):
        raise UsageError(_ambiguous(word, active or runs))
    latest = max(active if alone and active else runs, key=when)
    return (latest, found[latest]["way"]) if latest in found else None


def afar(known: Collection[str]) -> Iterator[Run]:
    """Yield the runs that other hosts control, and that may be active."""
    over = {*known, *noted_ends()}
    for run, (host, *_), at in ((run, each["way"], each["at"]) for run, each in ways().items()):
        if run not in over:
            controller, where = ControllerProcess(host, 0), f"{host}: `distlaunch ps {run}` queries it"
            status = Status(run, _job_of(run), RunState.UNKNOWN, at, at, controller, where=where)
            yield Run("", status, alive=False, heard=None)


def _going(runs: Mapping[str, str]) -> list[Run]:
    """Return the active runs, the latest first."""
    over = {run for run, entry in listed().items() if entry.over}
    found = [run for name, path in runs.items() if name not in over and (run := run_in(path))]
    going = [run for run in found if not run.status.state.over]
    return sorted(going, key=lambda run: run.status.began, reverse=True)


def _latest(runs: Mapping[str, str]) -> Run | None:
    """Return the latest run. IDs have its second; for runs of the same second, look into the directories."""
    for _, names in groupby(sorted(runs, key=when, reverse=True), when):
        if found := [run for run in (run_in(runs[name]) for name in names) if run]:
            return max(found, key=lambda run: run.status.began)
    return None


def _ambiguous(word: str | None, runs: Collection[str]) -> str:
    latest = [f"  {run}" for run in sorted(runs, key=when, reverse=True)]
    more = [f"  and {len(runs) - MAX_NAMED} more"] if len(runs) > MAX_NAMED else []
    return "\n".join([f"{word!r} is ambiguous: it matches {len(runs)} runs:", *latest[:MAX_NAMED], *more])


def folders() -> dict[str, str]:
    """Return the directory of each known run by ID: the listed runs, and those in this directory."""
    found = {run: entry.folder for run, entry in listed().items()}
    return {**found, **dict(scanned([os.curdir]))}


def _job_of(run: str) -> str:
    """Return the job's name in the ID of a run."""
    match = _ID.fullmatch(run)
    return match["job"] if match else run


def when(run: str) -> str:
    """Return the part of an ID to sort by start time."""
    match = _ID.fullmatch(run)
    return match["when"] if match else ""


def check_folder(place: str) -> None:
    """Raise `UsageError` if the directory can't be read."""
    try:
        os.scandir(place).close()
    except OSError as error:
        raise UsageError(f"{place}: {reason(error)}") from None


def scanned(places: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (ID, directory) of runs: the given directories, those in them, and those in their `runs`."""
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
