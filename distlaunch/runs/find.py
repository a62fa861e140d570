"""Finds runs: by id, a unique prefix of one, a job's name, a folder, or the latest here."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import NoReturn

from distlaunch.runs.folder import Run, run_in
from distlaunch.runs.index import listed
from distlaunch.errors import UsageError, reason
from distlaunch.observers.run_folder import EVENTS, job_part
from distlaunch.wording import listed as listed_words

LOGS = "runs"
"""Where job files keep their run folders if they don't say."""
JOB_FILES = (".yaml", ".yml")
CUT = "…"
"""Stands in an id for its middle, where that was too long to be shown."""
MAX_NAMED = 8
"""Runs that are named where a word means several."""
_ID = re.compile(r"(?P<job>.+)-(?P<when>\d{8}-\d{6})-(?P<chance>[0-9a-f]{8})")


def find(word: str | None, alone: bool = False) -> Run:
    """The run that a word means; None is one below this folder. Of several, the latest that goes on, or has.

    With `alone`, only one of them may go on. Raises `UsageError`.
    """
    if word is None:
        return _of_several(_below_here(), "below this folder", alone) or _none_here()
    if os.path.isdir(word) or (os.sep in word and not word.endswith(JOB_FILES)):
        return _of_folder(word, alone)
    known = folders()
    if word in known:
        return run_in(known[word]) or _unknown(word)
    if runs := _of_job(word, known) or _of_ticket(word, known):
        return _of_several(runs, f"of {word}", alone) or _unknown(word)
    begun = _begun_with(word, known)
    if len(begun) > 1:
        going = _going(begun)
        if len(going) == 1:
            return going[0]
        raise UsageError(_ambiguous(word, list(begun)))
    return next(filter(None, map(run_in, begun.values())), None) or _unknown(word)


def named(word: str) -> dict[str, str]:
    """The folders of all runs that a word names: an id, the beginning of some, a job's name, or its file."""
    known = folders()
    if word in known:
        return {word: known[word]}
    return _of_job(word, known) or _begun_with(word, known)


def _begun_with(word: str, known: Mapping[str, str]) -> dict[str, str]:
    begin, _, end = word.partition(CUT)
    if not begin:
        return {}  # a shell's variable that is not set means no run
    return {run: path for run, path in known.items() if run.startswith(begin) and run.endswith(end)}


def _of_job(word: str, known: Mapping[str, str]) -> dict[str, str]:
    """The runs of a job, by its name or its file."""
    if found := {run: path for run, path in known.items() if job_of(run) == word}:
        return found
    name = word
    if word.endswith(JOB_FILES) and os.path.isfile(word):
        from distlaunch.system.job_file import name_in  # few commands need YAML

        name = name_in(word)
    part = job_part(name)
    alike = {run: path for run, path in known.items() if job_of(run) == part}
    return alike if part == name else _called(name, alike)


def _of_ticket(word: str, known: Mapping[str, str]) -> dict[str, str]:
    """The runs inside a scheduler's job of that id."""
    inside = {run for run, entry in listed().items() if entry.queued and entry.queued.id == word}
    return {run: path for run, path in known.items() if run in inside}


def _called(name: str, alike: Mapping[str, str]) -> dict[str, str]:
    """Those whose job has that very name: ids only have a part of it."""
    found = {run: run_in(path) for run, path in alike.items()}
    return {run: alike[run] for run, seen in found.items() if seen and seen.status.job == name}


def _of_several(runs: Mapping[str, str], which: str, alone: bool) -> Run | None:
    going = _going(runs)
    if alone and len(going) > 1:
        ids = listed_words([run.id for run in going])
        raise UsageError(f"{len(going)} runs {which} are running: {ids}; name one by its id")
    return going[0] if going else _latest(runs)


def _going(runs: Mapping[str, str]) -> list[Run]:
    """Those that are not over, the latest first."""
    over = {run for run, entry in listed().items() if entry.over}
    found = [run for name, path in runs.items() if name not in over and (run := run_in(path))]
    going = [run for run in found if not run.status.state.over]
    return sorted(going, key=lambda run: run.status.began, reverse=True)


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


def _of_folder(word: str, alone: bool) -> Run:
    if found := run_in(os.path.abspath(word)):
        return found
    runs = dict(scanned([word]))
    latest = _of_several(runs, f"in {word}", alone)
    if latest is None:
        raise UsageError(f"{word}: not a run folder, and it contains no runs")
    return latest


def _below_here() -> dict[str, str]:
    here = os.path.join(os.getcwd(), "")
    return {run: path for run, path in folders().items() if os.path.abspath(path).startswith(here)}


def _none_here() -> NoReturn:
    raise UsageError("no runs below the current folder; name one (`distlaunch ps -a` lists all known runs)")


def _latest(runs: Mapping[str, str]) -> Run | None:
    """Ids have the second; of several runs that began in one, their folders tell."""
    for _, names in groupby(sorted(runs, key=when, reverse=True), when):
        if found := [run for run in (run_in(runs[name]) for name in names) if run]:
            return max(found, key=lambda run: run.status.began)
    return None


def runs_below(places: Iterable[str]) -> dict[str, str]:
    """The folders of all runs in those folders, by their ids. Raises `UsageError` for what is no folder."""
    for place in places:
        check_folder(place)
    return dict(scanned(places))


def check_folder(place: str) -> None:
    """Raises `UsageError` if it can't be read."""
    try:
        os.scandir(place).close()
    except OSError as error:
        raise UsageError(f"{place}: {reason(error)}") from None


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
