"""What `ps` shows: a line for each run."""

import os
import time
from collections.abc import Sequence
from typing import Any

from distlaunch.catalog.find import folders, scanned, when
from distlaunch.catalog.folder import Run, run_in
from distlaunch.catalog.index import listed
from distlaunch.errors import UsageError, reason
from distlaunch.observers.console import escape
from distlaunch.state.status import RunState

HEADINGS = ("RUN", "STATE", "RANKS", "RESTARTS", "AGE", "LAST", "WHERE")


def runs(places: Sequence[str], ended: bool, most: int | None) -> list[Run]:
    """The runs in `places`, or all that are known, the latest first; those that have `ended` if asked.

    Raises `UsageError` for a place that can't be read.
    """
    for place in places:
        _check_readable(place)
    known = dict(scanned(places)) if places else folders()
    over = set() if ended else {run for run, entry in listed().items() if entry.over}
    found: list[Run] = []
    for name in sorted(known.keys() - over, key=lambda name: (when(name), name), reverse=True):
        if len(found) == most:
            break
        run = run_in(known[name])
        if run and (ended or not run.status.state.over):
            found.append(run)
    return sorted(found, key=lambda run: run.status.began, reverse=True)


def _check_readable(place: str) -> None:
    try:
        os.scandir(place).close()
    except OSError as error:
        raise UsageError(f"{place}: {reason(error)}") from None


def table(found: Sequence[Run]) -> str:
    """For people: columns as wide as they need to be."""
    now = time.time()
    rows = [HEADINGS, *(_row(run, now) for run in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS) - 1)]
    lines = [[*map(str.ljust, row, widths), row[-1]] for row in rows]
    return "".join("  ".join(cells).rstrip() + "\n" for cells in lines)


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
