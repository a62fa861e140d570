"""`prune`: deletes the directories of old runs."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from shlex import join
from typing import Annotated, Any

import typer
from typer import Argument, Option

from distlaunch.cli.options import Json
from distlaunch.cli.output import print_json, print_text, say
from distlaunch.cli.runs import ago_s
from distlaunch.errors import Exit, UsageError, reason
from distlaunch.observers.run_list import forget, listed, ways
from distlaunch.runs.run import Run, check_directory, directories, heard, run_in, scanned
from distlaunch.runs.submissions import ended_before
from distlaunch.supervisor.status import RunState
from distlaunch.wording import counted, size_words

Places = Annotated[
    list[str] | None,
    Argument(metavar="[DIRECTORY]…", help="Only look in these directories and their `runs` subdirectories."),
]
_OLDER = "Delete runs that ended more than this long ago, e.g. 30d."
Older = Annotated[str | None, Option("--older", metavar="DURATION", help=_OLDER)]
Dry = Annotated[bool, Option("--dry-run", help="List what would be deleted, without deleting it.")]


def prune(places: Places = None, older: Older = None, dry: Dry = False, as_json: Json = False) -> None:
    """Delete the directories of your old runs."""
    if older is None:
        raise UsageError("prune needs --older DURATION, e.g. --older 30d")
    before = time.time() - ago_s("--older", older, "30d")
    done = [_pruned(run, dry) for run in _old_runs(before, places or ())]
    if not dry:
        _forget_missing(before)
    if as_json:
        print_json(done)
    else:
        _tell(done, dry)
    raise typer.Exit(Exit.FAILED if any(each["error"] for each in done) else Exit.OK)


def _old_runs(before: float, places: Sequence[str]) -> Iterator[Run]:
    """Yield the user's runs that ended before a time, in `places` if given. Raises `UsageError`."""
    for place in places:
        check_directory(place)
    damaged = []
    for directory in (dict(scanned(places)) if places else directories()).values():
        with contextlib.suppress(OSError):  # another `prune` may be deleting it
            if os.path.islink(directory) or os.stat(directory).st_uid != os.getuid():
                continue
            if (run := run_in(directory)) is None:
                damaged.append(directory)
            elif _is_over(run) and max(run.status.since, heard(directory) or 0.0) < before:
                yield run
    if damaged := [*filter(os.path.isdir, damaged)]:
        say(f"kept runs with an unreadable status; if they have ended, delete them: rm -r {join(damaged)}")


def _is_over(run: Run) -> bool:
    """Return whether a run has certainly ended. Locks held on other machines may not be visible."""
    recorded = run.status.state.over and run.status.state is not RunState.LOST
    return recorded or not (run.alive or run.host)


def _pruned(run: Run, dry: bool) -> dict[str, Any]:
    """Delete the run, unless `dry`; return the result for JSON."""
    size, error = _size(run.directory), None
    if not dry:
        try:
            for _ in range(10):  # another `prune` may be deleting it, too
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(run.directory)
                    break
            if os.path.isdir(run.directory):
                shutil.rmtree(run.directory)
        except OSError as failed:
            error = f"{run.directory}: {reason(failed)}"
    return {"run": run.id, "directory": run.directory, "bytes": size, "error": error}


def _size(directory: str) -> int:
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _forget_missing(before: float) -> None:
    """Remove runs without a directory from the list; of other hosts' runs and submissions, only old ones."""
    here = os.uname().nodename  # other machines' disks may not be visible here
    with contextlib.suppress(OSError):
        own = [each for each in listed().values() if each.host == here]
        missing = [each.run for each in own if not os.path.isdir(each.directory)]
        sent = (run for run, way in ways().items() if way["at"] < before and run not in listed())
        forget([*missing, *sent, *ended_before(before)])


def _tell(done: Sequence[dict[str, Any]], dry: bool) -> None:
    for each in done:
        if each["error"]:
            say(f"can't delete {each['error']}")
        else:
            print_text(f"{each['directory']}  {size_words(each['bytes'])}\n")
    gone = [each["bytes"] for each in done if not each["error"]]
    say(f"{'would delete' if dry else 'deleted'} {counted(len(gone), 'run')}, {size_words(sum(gone))}")
