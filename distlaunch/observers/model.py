"""The state of a run as `view` and `report` show it, built from an observer's events."""

import contextlib
import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from distlaunch.agent.frozen import Frozen
from distlaunch.job.spec import JobSpec
from distlaunch.observers.console import Lines, latest
from distlaunch.observers.observer import Observer, Printed
from distlaunch.observers.recording import USE
from distlaunch.observers.run_directory import fd_of, json_of
from distlaunch.signals import search
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import Exited, RankState, Use, WorkerPhase
from distlaunch.supervisor.state import State
from distlaunch.supervisor.summary import Summary
from distlaunch.wording import counted, status_words

LINES_KEPT, OF_A_RANK = 2000, 300
VALUES_KEPT = 240
SILENT_S, SILENT_TIMES = 10.0, 5.0
"""A rank is silent if it has printed nothing for this many seconds and this many times the median."""
GPU_IDLE_SHARE, GPU_BUSY = 0.5, 20
"""A rank is slow if its GPU use is below this share of the median and the median is above this percentage."""
FAR_OFF, FAR_SHARE = 6.0, 0.25
"""A value is different if its distance from the median exceeds this many median deviations, and this share of
the median."""


class LogLine(Frozen):
    """A line of a rank: its time, rank and stream."""

    at: float
    rank: int
    stream: int
    text: str


class Row(Frozen):
    """The current state of a rank. `age_s` is the time since its last line; None = it has printed nothing.

    `marks` contains the reasons why the rank is conspicuous, worst first.
    """

    rank: int
    node: str
    doing: str
    use: Use | None
    age_s: float | None
    value: float | None
    marks: tuple[str, ...]


class RunModel(Observer):
    """A run that began at `began`, with its ranks and messages; `clock` returns the current time.

    Both times are in seconds since the epoch. `Observer` describes when each method is called.
    """

    wants_use = True

    def __init__(self, began: float, clock: Callable[[], float] = time.time) -> None:
        self.began_at, self._clock = began, clock
        self._watch: re.Pattern[str] | None = None
        self._lines = Lines()
        self.uses: dict[int, Use] = {}
        self.state: State | None = None
        self.heard: dict[int, float] = {}
        """The time at which each rank last printed."""
        self.lines: deque[LogLine] = deque(maxlen=LINES_KEPT)
        self.of_rank: dict[int, deque[LogLine]] = {}
        self.values: dict[int, float] = {}
        """The watched number that each rank printed last."""
        self.trend: deque[tuple[float, float]] = deque(maxlen=VALUES_KEPT)
        """The watched numbers of the lowest rank that prints them, with their times."""
        self.history: list[tuple[float, ShowMessage]] = []
        """Messages and attempts, with their times in seconds since the run began."""
        self.summary: Summary | None = None
        self.moment = clock

    # Input, as an observer

    def began(self, spec: JobSpec, chance: float, at: float) -> None:
        """Compile the pattern of the watched number."""
        with contextlib.suppress(re.error):  # a recorded job may be damaged
            self._watch = re.compile(spec.logs.watch) if spec.logs.watch else None

    def happened(self, event: Event, state: State, at: float) -> None:
        """Keep the state."""
        self.state = state

    def started(self, state: State, at: float) -> None:
        """Forget the lines and use of the previous attempt."""
        for of_ranks in (self.heard, self.uses, self.values, self.of_rank, self._lines.held):
            of_ranks.clear()
        self.history.append((at, ShowMessage("info", f"attempt {state.attempt}: {shape(state)}")))

    def message(self, message: ShowMessage, at: float) -> None:
        """Add the message to the history."""
        self.history.append((at, message))

    def used(self, uses: Mapping[int, Use], at: float) -> None:
        """Keep the latest use of each rank."""
        self.uses.update(uses)

    def printed(self, output: Printed) -> None:
        """Assemble lines, and look for the watched number."""
        stream, now = (output.rank, output.stream), self.moment()
        self.heard[output.rank] = now
        if (whole := self._lines.whole(stream, output.data)) is not None:
            for line in whole.split(b"\n"):
                self._add(LogLine(now, *stream, latest(line).decode(errors="replace")))

    def ended(self, summary: Summary) -> None:
        """Keep the summary."""
        self.summary, self.state = summary, summary.state

    def _add(self, line: LogLine) -> None:
        """Keep a line, and the watched number if the line contains it."""
        self.lines.append(line)
        self.of_rank.setdefault(line.rank, deque(maxlen=OF_A_RANK)).append(line)
        try:
            found = search(self._watch, line.text) if self._watch else None
        except TimeoutError as error:
            self._watch = found = None
            self.message(ShowMessage("warning", f"not plotting logs.watch: {error}"), line.at - self.began_at)
        if not found:
            return
        try:
            value = float(found[1] if found.re.groups else found[0])
        except (TypeError, ValueError):
            return
        self.values[line.rank] = value
        if line.rank == min(self.values):  # one rank's trend is enough: most print the same
            self.trend.append((line.at, value))

    # Output

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the run began or, once it has ended, its duration."""
        return self.summary.seconds if self.summary else self._clock() - self.began_at

    def rows(self) -> list[Row]:
        """Return a row for each rank, conspicuous ranks first, and otherwise in rank order."""
        if self.state is None or self.state.plan is None:
            return []
        now, plan, rows = self._clock(), self.state.plan, []
        ages = {rank: max(0.0, now - at) for rank, at in self.heard.items()}
        measure = _Measure(ages, self.uses, self.values)
        for worker in self.state.workers:
            rank, node = worker.rank, plan.node_of(worker.rank).label
            known = (self.uses.get(rank), ages.get(rank), self.values.get(rank))
            rows.append(Row(rank, node, doing(worker), *known, measure.marks(worker)))
        return sorted(rows, key=lambda row: (not row.marks, row.rank))

    def rate(self) -> float | None:
        """Return the recent change of the watched number per second; None if no new values arrive."""
        if len(self.trend) < 2:
            return None
        recent = [*self.trend][-20:]
        (first_at, first), (last_at, last) = recent[0], recent[-1]
        span_s = last_at - first_at
        fresh = self._clock() - last_at <= max(SILENT_S, SILENT_TIMES * span_s / (len(recent) - 1))
        return (last - first) / span_s if span_s > 0 and fresh else None


class _Measure:
    """Medians of all ranks, to find conspicuous ones."""

    def __init__(self, ages: dict[int, float], uses: dict[int, Use], values: dict[int, float]) -> None:
        self._ages, self.uses, self._values = ages, uses, values
        self._silent_age = max(SILENT_S, SILENT_TIMES * _middle(list(ages.values())))
        usual_gpu = _middle([use.gpu for use in uses.values() if use.gpu is not None])
        self._slow_gpu = GPU_IDLE_SHARE * usual_gpu if usual_gpu > GPU_BUSY else 0.0
        self._middle = _middle(list(values.values()))
        self._spread = _middle([abs(value - self._middle) for value in values.values()])

    def marks(self, worker: RankState) -> tuple[str, ...]:
        """Return the reasons why a rank is conspicuous."""
        age, use = self._ages.get(worker.rank), self.uses.get(worker.rank)
        gpu = use.gpu if use else None
        phase, failed = worker.phase, isinstance(worker.phase, Exited) and worker.status != 0
        found = {
            "failed": failed and not worker.stopped,
            "stopped": failed and worker.stopped,
            "not started": phase is WorkerPhase.UNSTARTED,
            "lost with its node": phase is WorkerPhase.VANISHED,
            "stalled": worker.running and worker.stalled,
            "silent": worker.running and age is not None and age > self._silent_age,
            "slow": worker.running and gpu is not None and gpu < self._slow_gpu,
            "different": worker.running and self._differs(worker.rank),
        }
        return tuple(word for word, holds in found.items() if holds)

    def _differs(self, rank: int) -> bool:
        value = self._values.get(rank)
        if value is None or len(self._values) < 3:
            return False
        near = max(FAR_OFF * self._spread, FAR_SHARE * abs(self._middle))
        return not abs(value - self._middle) <= near  # true for NaN, too


def doing(worker: RankState) -> str:
    """Describe in a few words what a worker is doing, or how it ended."""
    if isinstance(worker.phase, Exited):
        if worker.phase.stopped:
            return "stopped"
        return "finished" if worker.phase.status == 0 else status_words(worker.phase.status)
    if worker.stalled:
        return "stalled"
    if worker.running and not worker.joined and worker.trying:
        return "joining"
    return worker.phase.value


def _middle(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else 0.0


def shape(state: State) -> str:
    """Describe the size of a run: its ranks and nodes."""
    return state.plan.size_words if state.plan else counted(len(state.nodes), "node")


def uses_in(directory: str) -> Mapping[int, Use]:
    """Return the ranks' resource use as last recorded in a run directory.

    `Recorder` writes a row for each rank: its number, then the fields of `Use`.
    """
    try:
        with open(fd_of(directory, USE), "rb") as file:
            rows = json_of(file.read())["ranks"]
            known = all(isinstance(value, int | float | None) for row in rows for value in row)
            return {rank: Use(*use) for rank, *use in rows} if known else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
