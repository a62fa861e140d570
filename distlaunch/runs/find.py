"""Finds runs by ID, a unique prefix, a job's name or a directory, or the latest here; lists them for `ps`."""

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from distlaunch.errors import UsageError, reason
from distlaunch.observers.console import escape
from distlaunch.observers.run_folder import EVENTS, job_part
from distlaunch.runs.folder import Run, run_in
from distlaunch.runs.index import index_path, listed
from distlaunch.supervisor.status import RunState
from distlaunch.wording import listed as listed_words

LOGS = "runs"
"""Where job files keep their run directories if they don't say."""
JOB_FILES = (".yaml", ".yml")
CUT = "…"
"""Stands in an id for its middle, where that was too long to be shown."""
MAX_NAMED = 8
"""Runs that are named where a word means several."""
HEADINGS = ("RUN", "STATE", "RANKS", "RESTARTS", "AGE", "LAST", "WHERE")
LEAST_ID, LEAST_WHERE = 20, 10
"""Characters that are left where lines are too long, unless the terminal is narrower still."""
_ID = re.compile(r"(?P<job>.+)-(?P<when>\d{8}-\d{6})-(?P<chance>[0-9a-f]{8})")
_LIST = "`distlaunch ps -a` lists all known runs"


def find(word: str | None, alone: bool = False) -> Run:
    """The run that a word means; None is one below this folder. Of several, the latest that goes on, or has.

    With `alone`, only one of them may go on. Raises `UsageError`.
    """
    unique = False
    if word is None:
        runs, which = _below_here(), "below this folder"
        nothing = f"no runs below the current folder; name one ({_LIST})"
    elif os.path.isdir(word) or (os.sep in word and not word.endswith(JOB_FILES)):
        if found := run_in(os.path.abspath(word)):
            return found
        runs, which = dict(scanned([word])), f"in {word}"
        nothing = f"{word}: not a run directory, and it contains no runs"
    else:
        known = folders()
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


def _ambiguous(word: str | None, runs: Iterable[str]) -> str:
    latest = sorted(runs, key=when, reverse=True)
    shown = [f"  {run}" for run in latest[:MAX_NAMED]]
    more = [f"  and {len(latest) - MAX_NAMED} more"] if len(latest) > MAX_NAMED else []
    return "\n".join([f"{word!r} is ambiguous: it matches {len(latest)} runs:", *shown, *more])


def folders() -> dict[str, str]:
    """Each known run's folder, by its id: those listed, and those in this folder."""
    found = {run: entry.folder for run, entry in listed().items()}
    return {**found, **dict(scanned([os.curdir]))}


def _below_here() -> dict[str, str]:
    here = os.path.join(os.getcwd(), "")
    return {run: path for run, path in folders().items() if os.path.abspath(path).startswith(here)}


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


def listing(places: Sequence[str], ended: bool, most: int | None) -> list[Run]:
    """The runs in `places`, or all that are known, the latest first; those that have `ended` if asked.

    A place that is no folder names runs, which are listed even if they have ended. Raises `UsageError`.
    """
    asked = {run: path for place in places for run, path in _asked(place).items()}
    known = {**dict(scanned(places)), **asked} if places else folders()
    over = set() if ended else {run for run, entry in listed().items() if entry.over} - asked.keys()
    found: list[Run] = []
    for name in sorted(known.keys() - over, key=lambda name: (when(name), name), reverse=True):
        if len(found) == most:
            break
        run = run_in(known[name])
        if run and (ended or name in asked or not run.status.state.over):
            found.append(run)
    found += [] if most == len(found) else _queued(places, found, ended)
    return sorted(found, key=lambda run: run.status.began, reverse=True)[:most]


def _queued(places: Sequence[str], shown: Sequence[Run], ended: bool) -> list[Run]:
    """Those that wait in a queue, or have ended there without a run."""
    if not os.path.exists(index_path()):
        return []
    from distlaunch.runs.submissions import waiting

    inside = {os.path.abspath(each) for place in places for each in (place, os.path.join(place, LOGS))}
    return [run for each, run in waiting(shown, ended) if not places or each.folder in inside]


def _asked(place: str) -> dict[str, str]:
    """The runs that it names if it is no folder."""
    found = named(place) if place and not os.path.isdir(place) else {}
    if not found:
        check_folder(place)
    return found


def table(found: Sequence[Run], width: int | None = None) -> str:
    """For people: columns as wide as they need to be, lines cut where they would not fit into `width`."""
    now = time.time()
    rows = [HEADINGS, *(_row(run, now) for run in found)]
    if width is not None:
        rows = _fitted(rows, width)
    widths = _widths(rows)[:-1]
    lines = [[*map(str.ljust, row, widths), row[-1]] for row in rows]
    return "".join("  ".join(cells)[:width].rstrip() + "\n" for cells in lines)


def _widths(rows: Sequence[tuple[str, ...]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _fitted(rows: Sequence[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """Rows with less of WHERE, and if that does not do, with ids without their middle."""
    ids, *others, where = _widths(rows)
    room = width - sum(others) - 2 * len(rows[0][:-1])
    id_room = max(LEAST_ID, min(ids, room - min(where, LEAST_WHERE)))
    return [(_without_middle(row[0], id_room), *row[1:-1], _cut(row[-1], room - id_room)) for row in rows]


def _without_middle(text: str, room: int) -> str:
    if len(text) <= room:
        return text
    end = (room - 1) // 2
    return text[: room - 1 - end] + CUT + text[-end:]


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(0, room - 1)] + CUT


def document(run: Run) -> dict[str, Any]:
    """For machines; times are seconds."""
    status, now = run.status, time.time()
    return {
        "run": run.id,
        "job": status.job,
        "state": status.state.value,
        "ranks": status.ranks,
        "nodes": status.nodes,
        "restarts": status.restarts,
        "exit_status": status.exit_status,
        "why": status.why or None,
        "began": status.began,
        "age": round(now - status.began, 1),
        "since": status.since,
        "silent": None if (silent := _silent_s(run, now)) is None else round(silent, 1),
        "where": status.where,
        "controller": {"host": status.controller.host, "pid": status.controller.pid},
        "folder": run.folder,
    }


def _row(run: Run, now: float) -> tuple[str, ...]:
    status, silent = run.status, _silent_s(run, now)
    ended = f" ({status.exit_status})" if status.exit_status else ""
    return (
        escape(run.id),
        status.state.value + ended,
        str(status.ranks or "-"),
        str(status.restarts),
        age_words(now - status.began),
        "-" if silent is None else age_words(silent),
        escape(status.where),
    )


def _silent_s(run: Run, now: float) -> float | None:
    """Seconds since a rank printed something, while ranks run."""
    if run.status.state is not RunState.RUNNING:
        return None
    return max(0.0, now - max(run.heard or 0.0, run.status.since))


def age_words(seconds: float) -> str:
    """A length of time in at most five characters: `41s`, `12m`, `3h07`, `5d`."""
    whole = int(seconds)
    if whole < 120:
        return f"{whole}s"
    if whole < 7200:
        return f"{whole // 60}m"
    if whole < 172800:
        return f"{whole // 3600}h{whole // 60 % 60:02}"
    return f"{whole // 86400}d"
