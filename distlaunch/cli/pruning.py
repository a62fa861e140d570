"""`prune`: what it deletes, and how that is told."""

from collections.abc import Sequence
from typing import Any

from distlaunch.cli.durations import ago_s
from distlaunch.cli.output import print_json, print_text
from distlaunch.cli.stderr import say
from distlaunch.errors import Exit, UsageError
from distlaunch.runs.find import runs_below
from distlaunch.runs.pruning import Pruned, delete, forget_missing, old_runs
from distlaunch.wording import counted

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def prune_runs(places: Sequence[str], older: str | None, dry: bool, as_json: bool) -> int:
    """Delete old runs, or with `dry` only tell; the exit status. Raises `UsageError`."""
    if older is None:
        raise UsageError("prune needs --older DURATION, e.g. --older 30d")
    seconds = ago_s("--older", older, "30d")
    done = [old if dry else delete(old) for old in old_runs(seconds, runs_below(places) if places else None)]
    if not dry:
        forget_missing()
    if as_json:
        print_json([_document(each) for each in done])
    else:
        _tell(done, dry)
    return Exit.FAILED if any(each.error for each in done) else Exit.OK


def _document(pruned: Pruned) -> dict[str, Any]:
    return {
        "run": pruned.run.id,
        "folder": pruned.run.folder,
        "bytes": pruned.size,
        "error": pruned.error or None,
    }


def _tell(done: list[Pruned], dry: bool) -> None:
    for each in done:
        if each.error:
            say(f"can't delete {each.error}")
        else:
            print_text(f"{each.run.folder}  {_size_words(each.size)}\n")
    gone = [each for each in done if not each.error]
    size = _size_words(sum(each.size for each in gone))
    say(f"{'would delete' if dry else 'deleted'} {counted(len(gone), 'run')}, {size}")


def _size_words(size: float) -> str:
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.0f} {_UNITS[-1]}"
