"""When a distributed job fails, does the launcher name the rank that really failed first?

    python -m tests.faults.blame --runs 20 --json blame.json

Each verdict is kept in blame.jsonl as it comes, and what is there is not run again: a series of an hour can
be broken off and gone on with, and a new one wants another FILE. Over hosts it needs root.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.hosts import Bed, bed_of
from tests.faults.blame.cases import CASES
from tests.faults.blame.launchers import LAUNCHERS, Outcome
from tests.faults.figures import FOLDER

PLACES = ("here", "hosts")
HOSTS = 3
Row = Mapping[str, Any]
"""The verdict on one run, as it is kept in JSON."""
COLUMNS = {
    "ours here": ("distlaunch", "here"),
    "ours hosts": ("distlaunch", "hosts"),
    "ours joined": ("distlaunch torchrun", "hosts"),
    "torchrun here": ("torchrun", "here"),
    "torchrun hosts": ("torchrun", "hosts"),
}
NOTES = """\
Right of distlaunch: rank and exit status in --json, the rank in the summary, and the script's error there.
Right of torchrun: the rank of its root cause. Over hosts each node has its own; the earliest counts, by whole
seconds as torchrun prints them, and a tie in which the culprit takes part is half right.
Where a rank leaves early, it is right to tell that it had ended with exit status 0.
Seconds: from the first failure to the end of distlaunch's command, median and most."""


class Turn(NamedTuple):
    """One run of a series."""

    run: int
    script: str
    place: str
    launcher: str


def turns(runs: int, scripts: Sequence[str], places: Sequence[str], launchers: Sequence[str]) -> list[Turn]:
    """All, so ordered that a series which is broken off has as much of each."""
    return [Turn(*each) for each in itertools.product(range(runs), scripts, places, launchers)]


def verdict(turn: Turn, outcome: Outcome) -> dict[str, Any]:
    """What is kept of one run; what was printed, only where it was told wrong."""
    opinion, ended = outcome.opinion, outcome.ended
    return {
        **turn._asdict(),
        **opinion._asdict(),
        "statuses": ended.statuses,
        "hung": ended.hung,
        "left": ended.left,
        "down_s": outcome.down_s,
        "took_s": ended.took_s,
        "stderr": ended.texts if opinion.right < 1 else [],
    }


def series(wanted: Sequence[Turn], kept: Path, bed: Bed | None) -> list[Row]:
    """Run what is not kept yet; the verdicts on all that was wanted."""
    done = {_turn(row): row for row in _rows(kept)}
    for number, turn in enumerate(wanted, 1):
        if turn in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            on = bed if turn.place == "hosts" else None
            outcome = LAUNCHERS[turn.launcher](CASES[turn.script], Path(folder), on)
        done[turn] = row = verdict(turn, outcome)
        with kept.open("a") as file:
            print(json.dumps(row), file=file)
        print(f"{number}/{len(wanted)} {_told(row)}", file=sys.stderr, flush=True)
    return [done[turn] for turn in wanted]


def _rows(kept: Path) -> Iterator[Row]:
    for line in kept.read_text().splitlines() if kept.exists() else ():
        with contextlib.suppress(ValueError):  # the last line of a series that was killed
            yield json.loads(line)


def _turn(row: Mapping[str, Any]) -> Turn:
    return Turn(*(row[field] for field in Turn._fields))


def _told(row: Row) -> str:
    what = "; ".join(row["wrong"]) or "right"
    return f"{row['script']}, {row['launcher']} {row['place']}, {row['took_s']:.1f} s: {what}"


def table(rows: Sequence[Row]) -> str:
    """For people: a line for each script, then the sums, and what was said where it was wrong."""
    names = [name for name in CASES if any(row["script"] == name for row in rows)]
    lines = [
        "| script | culprit | " + " | ".join(COLUMNS) + " | seconds |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for name in names:
        case = CASES[name]
        mine = [row for row in rows if row["script"] == name]
        lines.append(_line(name, f"{case.rank} of {case.ranks}", mine))
    lines.append(_line("all", "", rows))
    return "\n".join([*lines, "", NOTES, "", *_mistakes(rows)])


def _line(name: str, culprit: str, rows: Sequence[Row]) -> str:
    cells = [_score(_of(rows, *column)) for column in COLUMNS.values()]
    return "| " + " | ".join([name, culprit, *cells, _seconds(rows)]) + " |"


def _of(rows: Iterable[Row], launcher: str, place: str) -> list[Row]:
    return [row for row in rows if (row["launcher"], row["place"]) == (launcher, place)]


def _score(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    hung = sum(row["hung"] > 0 for row in rows)
    return f"{sum(row['right'] for row in rows):g}/{len(rows)}" + (f", {hung} hung" if hung else "")


def _seconds(rows: Iterable[Row]) -> str:
    times = [row["down_s"] for row in rows if row["down_s"] is not None]
    return f"{statistics.median(times):.2f}, {max(times):.2f}" if times else ""


def _mistakes(rows: Iterable[Row]) -> list[str]:
    """Each run that was told wrong, by script."""
    wrong = [row for row in rows if row["right"] < 1 or row["left"]]
    return [
        f"run {row['run']} of {_told(row)}; processes left and killed: {row['left']}"
        for row in sorted(wrong, key=lambda row: (row["script"], row["launcher"], row["place"], row["run"]))
    ]


def main() -> int:
    """Run a series from the command line; the table goes to stdout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--where", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="SCRIPT")
    parser.add_argument("--json", type=Path, default=FOLDER / "blame.json", metavar="FILE")
    given = parser.parse_args()
    given.json.parent.mkdir(parents=True, exist_ok=True)
    wanted = turns(given.runs, given.only, given.where, given.launchers)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bed = stack.enter_context(bed_of(HOSTS, folder / "bed")) if "hosts" in given.where else None
        rows = series(wanted, given.json.with_suffix(".jsonl"), bed)
    given.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
