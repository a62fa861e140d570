"""A contest times commands that do the same work, in turn. Only ratios within one run are meaningful."""

import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 300.0
Timed = Callable[[], float]
"""A function that does the work once, and returns the seconds to count."""


@dataclass(frozen=True)
class Bar:
    """A limit for the first competitor of a contest: a multiple of another competitor's time."""

    other: str
    at_most: float
    goal: float | None = None
    ours: str | None = None


@dataclass(frozen=True)
class Contest:
    """Competitors by name, distlaunch first; `missing` lists those that aren't installed.

    `unit` is the unit of the measurements, and `limits` the maximum for the first competitors.
    """

    title: str
    competitors: Mapping[str, Timed]
    bars: Sequence[Bar] = ()
    missing: Sequence[str] = ()
    unit: str = "s"
    limits: Sequence[float] = ()


@dataclass(frozen=True)
class Outcome:
    """The seconds of each competitor, in the order of the rounds."""

    contest: Contest
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Return the median of one competitor, in seconds."""
        return statistics.median(self.seconds[name])

    def ratio(self, bar: Bar) -> float:
        """Return the median of the ratios of all rounds. A machine that slows down slows both competitors."""
        ours = self.seconds[bar.ours or next(iter(self.contest.competitors))]
        return statistics.median(a / b for a, b in zip(ours, self.seconds[bar.other], strict=True))

    def document(self) -> dict[str, Any]:
        """Return the outcome as data for JSON."""
        kept = [bar for bar in self.contest.bars if bar.other in self.seconds]
        return {
            "title": self.contest.title,
            "seconds": {name: list(each) for name, each in self.seconds.items()},
            "median_s": {name: self.median(name) for name in self.seconds},
            "missing": list(self.contest.missing),
            "unit": self.contest.unit,
            "at_most": dict(zip(self.seconds, self.contest.limits, strict=False)),
            "ratios": [
                {
                    "ours": bar.ours or next(iter(self.contest.competitors)),
                    "other": bar.other,
                    "ratio": self.ratio(bar),
                    "at_most": bar.at_most,
                    "goal": bar.goal,
                }
                for bar in kept
            ],
        }


def held(contest: Contest, runs: int, tell: Callable[[str], None]) -> Outcome:
    """Run each competitor once to warm up, then all of them in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contest.competitors}
    for number in range(runs + 1):
        tell(f"{contest.title}: {number}/{runs}")
        for name, once in contest.competitors.items():
            took = once()
            if number:
                seconds[name].append(took)
    return Outcome(contest, seconds)


def command(argv: Sequence[str], **options: Any) -> Timed:
    """Time a command, which must succeed. Its output is discarded unless `options` redirect it."""

    def once() -> float:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        began = time.perf_counter()
        process = subprocess.Popen(argv, **{**streams, **options})
        watchdog = threading.Timer(LIMIT_S, process.kill)  # wait() with a timeout checks only every 50 ms
        watchdog.start()
        status = process.wait()
        took = time.perf_counter() - began
        watchdog.cancel()
        if status:
            raise SystemExit(f"{argv[0]} … ended with {status}: {' '.join(argv)}")
        return took

    return once


def shell(line: str) -> Timed:
    """Time a line of shell code, as `command` does."""
    return command(["/bin/sh", "-c", line])
