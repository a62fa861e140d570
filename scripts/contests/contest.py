"""A contest: commands that do the same, timed in turn; what counts are ratios within one run."""

import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 300.0
Timed = Callable[[], float]
"""Does the work once; the seconds that count."""


@dataclass(frozen=True)
class Bar:
    """How the first of a contest's competitors is to compare with another: at most so many times its time."""

    other: str
    at_most: float
    goal: float | None = None
    ours: str | None = None


@dataclass(frozen=True)
class Contest:
    """Competitors by name, ours first; `missing` are the names of those that are not installed.

    What is measured is in `unit`s; `limits` are what the first ones are to be at most.
    """

    title: str
    competitors: Mapping[str, Timed]
    bars: Sequence[Bar] = ()
    missing: Sequence[str] = ()
    unit: str = "s"
    limits: Sequence[float] = ()


@dataclass(frozen=True)
class Outcome:
    """Seconds of each competitor, in the order of the rounds."""

    contest: Contest
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Of one competitor, in seconds."""
        return statistics.median(self.seconds[name])

    def ratio(self, bar: Bar) -> float:
        """The median of the ratios of each round: a machine that slows down slows both."""
        ours = self.seconds[bar.ours or next(iter(self.contest.competitors))]
        return statistics.median(a / b for a, b in zip(ours, self.seconds[bar.other], strict=True))

    def document(self) -> dict[str, Any]:
        """For JSON."""
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
    """Each competitor once to warm up, then all in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contest.competitors}
    for number in range(runs + 1):
        tell(f"{contest.title}: {number}/{runs}")
        for name, once in contest.competitors.items():
            took = once()
            if number:
                seconds[name].append(took)
    return Outcome(contest, seconds)


def command(argv: Sequence[str], **options: Any) -> Timed:
    """The wall time of a command, which must succeed; its output goes nowhere, unless `options` say where."""

    def once() -> float:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        began = time.perf_counter()
        process = subprocess.Popen(argv, **{**streams, **options})
        watchdog = threading.Timer(LIMIT_S, process.kill)  # a wait with a limit looks only every 50 ms
        watchdog.start()
        status = process.wait()
        took = time.perf_counter() - began
        watchdog.cancel()
        if status:
            raise SystemExit(f"{argv[0]} … ended with {status}: {' '.join(argv)}")
        return took

    return once


def shell(line: str) -> Timed:
    """As `command`, of a line for sh."""
    return command(["/bin/sh", "-c", line])
