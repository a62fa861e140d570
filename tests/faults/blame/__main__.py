"""When a distributed job fails, does the launcher name the rank that really failed first?

    python -m tests.faults.blame --runs 20

A line tells of each run as it ends, and a table of all. Over hosts it needs root.

Right of distlaunch: rank and exit status in --json, the rank in the summary, and the script's error there.
Right of torchrun: the rank of its root cause. Over hosts each node has its own; the earliest counts, by
whole seconds as torchrun prints them, and a tie in which the culprit takes part is half right. Where a rank
leaves early, it is right to tell that it had ended with exit status 0. Seconds: from the first failure to
the end of distlaunch's command, median and most.
"""

import argparse
import contextlib
import itertools
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.hosts import bed_of
from tests.faults.blame.cases import CASES
from tests.faults.blame.launchers import LAUNCHERS, Outcome
from tests.faults.figures import markdown

PLACES = ("here", "hosts")
HOSTS = 3
Column = tuple[str, str]
"""A launcher and a place."""


def table(outcomes: Mapping[str, Mapping[Column, Sequence[Outcome]]], columns: Sequence[Column]) -> str:
    """For people: a line for each script, then the sums."""
    head = ["script", "culprit", *(f"{launcher} {place}" for launcher, place in columns), "seconds"]
    rows = [
        _row(script, f"{CASES[script].rank} of {CASES[script].ranks}", [found[each] for each in columns])
        for script, found in outcomes.items()
    ]
    sums = [[outcome for found in outcomes.values() for outcome in found[column]] for column in columns]
    return markdown(head, [*rows, _row("all", "", sums)])


def _row(name: str, culprit: str, cells: Sequence[Sequence[Outcome]]) -> list[str]:
    times = [each.down_s for cell in cells for each in cell if each.down_s is not None]
    seconds = f"{statistics.median(times):.2f}, {max(times):.2f}" if times else ""
    return [name, culprit, *map(_score, cells), seconds]


def _score(outcomes: Sequence[Outcome]) -> str:
    hung = sum(outcome.ended.hung > 0 for outcome in outcomes)
    right = sum(outcome.opinion.right for outcome in outcomes)
    return f"{right:g}/{len(outcomes)}" + (f", {hung} hung" if hung else "")


def main() -> int:
    """Run a series from the command line; the table goes to stdout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--where", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="SCRIPT")
    given = parser.parse_args()
    columns = list(itertools.product(given.launchers, given.where))
    outcomes: dict[str, dict[Column, list[Outcome]]] = {
        script: {column: [] for column in columns} for script in given.only
    }
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bed = stack.enter_context(bed_of(HOSTS, directory / "bed")) if "hosts" in given.where else None
        for _, script, (launcher, place) in itertools.product(range(given.runs), given.only, columns):
            with tempfile.TemporaryDirectory() as own:
                on = bed if place == "hosts" else None
                outcome = LAUNCHERS[launcher](CASES[script], Path(own), on)
            outcomes[script][launcher, place].append(outcome)
            told = "; ".join(outcome.opinion.wrong) or "right"
            took = f"{outcome.ended.took_s:.1f} s, {outcome.ended.left} processes left"
            print(f"{script}, {launcher} {place}, {took}: {told}", file=sys.stderr, flush=True)
    print(table(outcomes, columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
