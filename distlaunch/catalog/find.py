"""Finds runs: by id, a unique prefix of one, a job's name, a folder, or the latest here."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import NoReturn

from distlaunch.catalog.folder import Run, run_in
from distlaunch.catalog.index import listed
from distlaunch.errors import UsageError
from distlaunch.observers.run_folder import EVENTS

LOGS = "runs"
"""Where job files keep their run folders if they don't say."""
MAX_NAMED = 8
"""Runs that are named where a word means several."""
_ID = re.compile(r"(?P<job>.+)-(?P<when>\d{8}-\d{6})-(?P<chance>[0-9a-f]{8})")


def find(word: str | None) -> Run:
    """The run that a word means; None is the latest below this folder. Raises `UsageError`."""
    if word is None:
        return _latest_here()
    if os.sep in word or os.path.isdir(word):
        return _of_folder(word)
    known = folders()
    named = [run for run in known if run.startswith(word)]
    if word in known:
        named = [word]
    elif jobs := [run for run in known if job_of(run) == word]:
        return _latest({run: known[run] for run in jobs}) or _unknown(word)
    if len(named) > 1:
        raise UsageError(_ambiguous(word, named))
    return (run_in(known[named[0]]) if named else None) or _unknown(word)


def _unknown(word: str) -> NoReturn:
    raise UsageError(f"no run matches {word!r}; `distlaunch ps -a` lists all known runs")


def folders() -> dict[str, str]:
    """Each known run's folder, by its id: those listed, and those in this folder."""
    found = {run: entry.folder for run, entry in listed().items()}
    return {**found, **dict(scanned([os.curdir]))}


def job_of(run: str) -> str:
    """The job's name in a run's id."""
    match = _ID.fullmatch(run)
    return match["job"] if match else run


def when(run: str) -> str:
    """What sorts ids by when they began."""
    match = _ID.fullmatch(run)
    return match["when"] if match else ""


def _of_folder(word: str) -> Run:
    if found := run_in(os.path.abspath(word)):
        return found
    runs = dict(scanned([word]))
    latest = _latest(runs)
    if latest is None:
        raise UsageError(f"{word}: not a run folder, and it contains no runs")
    return latest


def _latest_here() -> Run:
    here = os.path.join(os.getcwd(), "")
    latest = _latest({run: path for run, path in folders().items() if os.path.abspath(path).startswith(here)})
    if latest is None:
        raise UsageError(
            "no runs below the current folder; name one (`distlaunch ps -a` lists all known runs)"
        )
    return latest


def _latest(runs: Mapping[str, str]) -> Run | None:
    """Ids have the second; of several runs that began in one, their folders tell."""
    for _, names in groupby(sorted(runs, key=when, reverse=True), when):
        if found := [run for run in (run_in(runs[name]) for name in names) if run]:
            return max(found, key=lambda run: run.status.began)
    return None


def scanned(places: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(id, folder) of the run that each place is, and of those in it and in the `runs` there."""
    for place in map(os.path.abspath, places):
        if _is_run(place):
            yield os.path.basename(place), place
        for parent in (place, os.path.join(place, LOGS)):
            yield from _runs_in(parent)


def _runs_in(parent: str) -> Iterator[tuple[str, str]]:
    try:
        names = os.listdir(parent)
    except OSError:
        return
    for name in names:
        folder = os.path.join(parent, name)
        if _is_run(folder):
            yield name, folder


def _is_run(folder: str) -> bool:
    named = _ID.fullmatch(os.path.basename(folder))
    return named is not None and os.path.exists(os.path.join(folder, EVENTS))


def _ambiguous(word: str, named: list[str]) -> str:
    latest = sorted(named, key=when, reverse=True)
    shown = [f"  {run}" for run in latest[:MAX_NAMED]]
    more = [f"  and {len(latest) - MAX_NAMED} more"] if len(latest) > MAX_NAMED else []
    return "\n".join([f"{word!r} is ambiguous: it matches {len(named)} runs:", *shown, *more])
