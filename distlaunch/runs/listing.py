"""The runs that `ps` lists, as a table and as JSON."""

import os
import time
from collections import ChainMap
from collections.abc import Sequence
from typing import Any

from distlaunch.observers.console import escape
from distlaunch.observers.run_list import index_path, listed
from distlaunch.runs.run import LOGS, Run, afar, check_place, folders, named, run_in, scanned, when
from distlaunch.runs.submissions import submission, waiting
from distlaunch.supervisor.status import RunState, document_of
from distlaunch.wording import age_words, aligned, cut

HEADINGS = ("RUN", "STATE", "RANKS", "RESTARTS", "AGE", "LAST", "WHERE")
LEAST_ID, LEAST_WHERE = 20, 10
"""Minimum characters of an ID and of WHERE in shortened lines, if the terminal is wide enough."""


def listing(places: Sequence[str], ended: bool, most: int | None) -> list[Run]:
    """Return the runs in `places`, or all known runs, the latest first. With `ended`, include ended runs.

    A place that isn't a directory refers to runs. The latest of them is listed even if it has ended. Raises
    `UsageError`.
    """
    named_here = list(filter(None, map(_named_by, places)))
    known = dict(ChainMap(*named_here, dict(scanned(places)))) if places else folders()
    latest = {max(found, key=when) for found in named_here}
    over = set() if ended else {run for run, entry in listed().items() if entry.over} - latest
    found: list[Run] = []
    for name in sorted(known.keys() - over, key=lambda name: (when(name), name), reverse=True):
        if len(found) == most:
            break
        run = run_in(known[name])
        if run and (ended or name in latest or not run.status.state.over):
            found.append(run)
    found += [] if most == 0 else _queued(places, found, ended)  # which may be later than the runs
    found += [] if places else afar(known)
    return sorted(found, key=lambda run: run.status.began, reverse=True)[:most]


def _queued(places: Sequence[str], shown: Sequence[Run], ended: bool) -> list[Run]:
    """Return the jobs that are waiting in a queue, or that left it without a run."""
    if not os.path.exists(index_path()):
        return []
    inside = {os.path.abspath(each) for place in places for each in (place, os.path.join(place, LOGS))}
    jobs = [submission(place) for place in places]
    return [
        run
        for each, run in waiting(shown, ended or any(jobs))
        if each in jobs or ((ended or not run.status.state.over) and (not places or each.folder in inside))
    ]


def _named_by(place: str) -> dict[str, str]:
    """Return the runs that `place` refers to, if it isn't a directory."""
    found = named(place) if place and not os.path.isdir(place) else {}
    if not found and not submission(place):
        check_place(place)
    return found


def table(found: Sequence[Run], width: int | None = None) -> str:
    """Return a table of runs, with lines cut to `width`."""
    now = time.time()
    rows = [HEADINGS, *(_row(run, now) for run in found)]
    lines = aligned(rows if width is None else _fitted(rows, width), 2)
    return "".join(line[:width].rstrip() + "\n" for line in lines)


def _fitted(rows: Sequence[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """Shorten WHERE and, if that isn't enough, cut the middle of IDs."""
    ids, *others, where = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = width - sum(others) - 2 * len(rows[0][:-1])
    id_room = max(LEAST_ID, min(ids, room - min(where, LEAST_WHERE)))
    end = (id_room - 1) // 2
    return [(cut(row[0], id_room, end), *row[1:-1], cut(row[-1], room - id_room)) for row in rows]


def document(run: Run) -> dict[str, Any]:
    """Return a run as JSON. Times are in seconds."""
    known, now, silent_s = document_of(run.status), time.time(), _silent_s(run, time.time())
    del known["version"], known["controller"]["boot"]
    return {
        **known,
        "why": run.status.why or None,
        "age": round(now - run.status.began, 1),
        "silent": None if silent_s is None else round(silent_s, 1),
        "folder": run.folder,
    }


def _row(run: Run, now: float) -> tuple[str, ...]:
    """Return the cells of a run, under HEADINGS."""
    status, silent = run.status, _silent_s(run, now)
    ended = f" ({status.exit_status})" if status.exit_status else ""
    return (
        escape(run.id),
        status.state.value + ended,
        str(status.ranks or "-"),
        str(status.restarts),
        age_words(now - status.began),
        "-" if silent is None else age_words(silent),
        escape(f"{status.trouble}; {status.where}" if status.trouble else status.where),
    )


def _silent_s(run: Run, now: float) -> float | None:
    """Return the seconds since a rank last printed, if ranks are running."""
    if run.status.state is not RunState.RUNNING:
        return None
    return max(0.0, now - max(run.heard or 0.0, run.status.since))
