"""The table of a series: what each launcher got right, and how long ours took to end a job."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.faults.blame.cases import CASES

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
Seconds: from the culprit's end to that of distlaunch's command, median and most."""


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
    return "\n".join([*lines, "", NOTES, "", *_told(rows)])


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


def _told(rows: Iterable[Row]) -> list[str]:
    """Each run that was told wrong, by script."""
    wrong = [row for row in rows if row["right"] < 1 or row["left"]]
    return [
        f"{row['script']}, {row['launcher']} {row['place']}, run {row['run']}: {'; '.join(_faults(row))}"
        for row in sorted(wrong, key=lambda row: (row["script"], row["launcher"], row["place"], row["run"]))
    ]


def _faults(row: Row) -> list[str]:
    return [*row["wrong"], *([f"processes left and killed: {row['left']}"] if row["left"] else [])]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """For machines: for each column how many were right of how many, and the seconds; then all verdicts."""
    columns = {name: _of(rows, *column) for name, column in COLUMNS.items()}
    times = [row["down_s"] for row in rows if row["down_s"] is not None]
    return {
        "right": {name: sum(row["right"] for row in mine) for name, mine in columns.items() if mine},
        "runs": {name: len(mine) for name, mine in columns.items() if mine},
        "hung": {name: sum(row["hung"] > 0 for row in mine) for name, mine in columns.items() if mine},
        "left": sum(row["left"] for row in rows),
        "down_s": {"median": statistics.median(times), "max": max(times)} if times else None,
        "verdicts": list(rows),
    }
