"""Deletes the folders of runs that ended long ago."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator

from distlaunch.agent.frozen import Frozen
from distlaunch.runs.find import folders
from distlaunch.runs.folder import Run, heard, run_in
from distlaunch.runs.index import forget, listed
from distlaunch.errors import reason
from distlaunch.state.status import RunState


class Pruned(Frozen):
    """A run whose folder, of `size` bytes, is to go, or has gone; or the `error` that kept it."""

    run: Run
    size: int
    error: str = ""


def old_runs(older_s: float, places: dict[str, str] | None = None) -> Iterator[Pruned]:
    """Those of ours that ended before that time."""
    before = time.time() - older_s
    for folder in (folders() if places is None else places).values():
        run = run_in(folder)
        if run and _is_over(run) and _last_change(run) < before and os.stat(folder).st_uid == os.getuid():
            yield Pruned(run, _size(folder))


def delete(old: Pruned) -> Pruned:
    """Delete it; what it says of an error is new."""
    try:
        shutil.rmtree(old.run.folder)
    except OSError as error:
        return old._replace(error=f"{old.run.folder}: {reason(error)}")
    return old


def forget_missing() -> None:
    """Take out of the list what is no longer there."""
    here = os.uname().nodename  # what is on another machine's disk can't be seen from here
    with contextlib.suppress(OSError):
        forget(each.run for each in listed().values() if each.host == here and not os.path.isdir(each.folder))


def _is_over(run: Run) -> bool:
    """Whether that is certain: a lock that another machine holds may not be seen here."""
    told = run.status.state.over and run.status.state is not RunState.LOST
    return told or (not run.alive and run.status.controller.host in ("", os.uname().nodename))


def _last_change(run: Run) -> float:
    return max(run.status.since, heard(run.folder) or 0.0)


def _size(folder: str) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
