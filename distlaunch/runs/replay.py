"""Lives a run again from its events.jsonl, state by state: what did the supervisor know, and what did it do?

    python -m distlaunch.runs.replay runs/mnist-20260101-120000-0a1b2c3d --from 12.5 --to 14

Exits with 1 if it says anything else to the user than it did then: the policy has changed since.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from typing import Any

from distlaunch.errors import reason
from distlaunch.runs.lives import History, HistoryError, Moment, loaded, read, replay
from distlaunch.state.actions import Notice
from distlaunch.state.job import State
from distlaunch.state.many import Many

WIDTH = 160
"""Characters of a value that are shown."""


def history_in(folder: Path) -> History:
    """The history of the run whose folder, or events.jsonl, that is. Raises OSError, `HistoryError`."""
    path = folder / "events.jsonl" if folder.is_dir() else folder
    return read(loaded(path.read_text(errors="replace")))


def lines(moments: Iterable[Moment], first_s: float, last_s: float) -> Iterator[str]:
    """What happened in that time, how it changed the state, and what was done."""
    before: State | None = None
    for moment in moments:
        if first_s <= moment.at <= last_s:
            yield f"{moment.at:10.3f}  {_short(moment.event or 'began')}"
            yield from (f"{'':14}{change}" for change in _changes("", before, moment.state) if before)
            yield from (f"{'':12}→ {_short(action)}" for action in moment.actions)
        before = moment.state


def _changes(path: str, before: Any, after: Any) -> Iterator[str]:
    """Where two states differ: `workers[3].phase: PLANNED → RUNNING`."""
    if before == after:
        return
    inner = _parts(before, after)
    if inner is None:
        yield f"{path}: {_short(before)} → {_short(after)}"
        return
    for name, one, other in inner:
        yield from _changes(f"{path}{name}".lstrip("."), one, other)


def _parts(before: Any, after: Any) -> list[tuple[str, Any, Any]] | None:
    """What two values of the same form consist of; None where they are to be shown as they are."""
    if type(before) is not type(after) or not isinstance(before, tuple | Many) or len(before) != len(after):
        return None
    names = getattr(before, "_fields", range(len(before)))
    named = [f".{name}" if isinstance(name, str) else f"[{name}]" for name in names]
    return list(zip(named, before, after, strict=True))


def _short(value: Any) -> str:
    text = value.name if isinstance(value, Enum) else value if isinstance(value, str) else repr(value)
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


def retold(history: History, moments: Iterable[Moment]) -> str:
    """The first message that differs from what was said then; "" if none does."""
    told = [action.text for moment in moments for action in moment.actions if isinstance(action, Notice)]
    for then, now in zip_longest(history.told, told):
        if then != now:
            return f"said then: {then or 'nothing more'}\nsays now:  {now or 'nothing more'}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m distlaunch.runs.replay", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a run's folder, or its events.jsonl")
    parser.add_argument("--from", type=float, default=0.0, metavar="S", dest="first", help="seconds")
    parser.add_argument("--to", type=float, default=float("inf"), metavar="S", dest="last", help="seconds")
    asked = parser.parse_args(argv)
    try:
        history = history_in(asked.folder)
    except (OSError, HistoryError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        parser.exit(2, f"{asked.folder}: {why}\n")
    moments = list(replay(history))
    for line in lines(moments, asked.first, asked.last):
        print(line)
    difference = retold(history, moments)
    print(difference, end="\n" if difference else "", file=sys.stderr)
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
