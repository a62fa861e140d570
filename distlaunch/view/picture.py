"""What a screen shows of a run, kept up to date by what an observer sees. No terminal here."""

import math
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from distlaunch.agent.frozen import Frozen
from distlaunch.job.spec import JobSpec
from distlaunch.observers.console import MAX_LINE, latest
from distlaunch.observers.observer import Observer, Printed
from distlaunch.supervisor.actions import Notice
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import Exited, Use, Worker, WorkerPhase
from distlaunch.supervisor.state import State
from distlaunch.supervisor.summary import Summary
from distlaunch.wording import counted, status_words

LINES_KEPT, OF_A_RANK = 2000, 300
VALUES_KEPT = 240
SILENT_S, SILENT_TIMES = 10.0, 5.0
"""A rank is silent that has printed nothing for so long, and so many times as long as most."""
GPU_IDLE_SHARE, GPU_BUSY = 0.5, 20
"""A rank is slow whose GPU does less than that share of what most do, where most do something."""
FAR_OFF, FAR_SHARE = 6.0, 0.25
"""A number is different that is so many times as far from the middle as most, and by such a share of it."""


class Said(Frozen):
    """A line of a rank: when it came, from which stream."""

    at: float
    rank: int
    stream: int
    text: str


class Told(Frozen):
    """A notice, or another generation: seconds since the run began."""

    at: float
    level: str
    text: str


class Row(Frozen):
    """A rank as it is now. `age_s` is the time since its last line, None = it has said nothing yet.

    `marks` say why it stands out, the worst first.
    """

    rank: int
    node: str
    doing: str
    use: Use | None
    age_s: float | None
    value: float | None
    marks: tuple[str, ...]


class Picture(Observer):
    """A run that `began` then, as much as a screen needs of it; `clock` tells the present.

    Both are in seconds since the epoch.
    """

    wants_use = True

    def __init__(self, began: float, clock: Callable[[], float] = time.time) -> None:
        self._began, self._clock = began, clock
        self._watch: re.Pattern[str] | None = None
        self._partial: dict[tuple[int, int], bytes] = {}
        self._last: dict[int, float] = {}
        self._uses: dict[int, Use] = {}
        self.state: State | None = None
        self.at = 0.0
        self.lines: deque[Said] = deque(maxlen=LINES_KEPT)
        self.of_rank: dict[int, deque[Said]] = {}
        self.values: dict[int, float] = {}
        self.trend: deque[tuple[float, float]] = deque(maxlen=VALUES_KEPT)
        self.told_all: list[Told] = []
        self.summary: Summary | None = None
        self.moment: Callable[[], float] = clock
        """When that came which is being told."""

    # What an observer sees

    def began(self, spec: JobSpec, chance: float, at: float) -> None:
        """Learn which number to look for."""
        self._watch = re.compile(spec.logs.watch) if spec.logs.watch else None

    def happened(self, event: Event, state: State, at: float) -> None:
        """The state is all that counts."""
        self.state, self.at = state, at

    def started(self, state: State, at: float) -> None:
        """What ranks of an earlier generation have said and used is history."""
        for of_ranks in (self._last, self._uses, self.values, self.of_rank, self._partial):
            of_ranks.clear()
        self.told_all.append(Told(at, "info", f"generation {state.generation}: {_shape(state)}"))

    def told(self, notice: Notice, at: float) -> None:
        """Keep it for the history."""
        self.told_all.append(Told(at, notice.level, notice.text))

    def used(self, uses: Mapping[int, Use], at: float) -> None:
        """Keep the latest."""
        self._uses.update(uses)

    def printed(self, output: Printed) -> None:
        """Put lines together, and look for the number."""
        key, now = (output.rank, output.stream), self.moment()
        whole, newline, rest = (self._partial.pop(key, b"") + output.data).rpartition(b"\n")
        self._last[output.rank] = now
        if rest:
            self._partial[key] = rest[-MAX_LINE:]
        for line in whole.split(b"\n") if newline else ():
            self._say(Said(now, *key, _shown(line)))

    def ended(self, summary: Summary) -> None:
        """It is over."""
        self.summary, self.state = summary, summary.state

    def _say(self, said: Said) -> None:
        self.lines.append(said)
        self.of_rank.setdefault(said.rank, deque(maxlen=OF_A_RANK)).append(said)
        found = self._watch.search(said.text) if self._watch else None
        if found:
            self._note_value(said, found)

    def _note_value(self, said: Said, found: re.Match[str]) -> None:
        try:
            value = float(found[1] if found.re.groups else found[0])
        except (TypeError, ValueError):
            return
        self.values[said.rank] = value
        if said.rank == min(self.values):  # one rank tells the trend; most print the same
            self.trend.append((said.at, value))

    # What a screen shows

    @property
    def elapsed_s(self) -> float:
        """Since the run began, or until it ended."""
        return self.summary.seconds if self.summary else self._clock() - self._began

    def rows(self) -> list[Row]:
        """Every rank: those that stand out first, then by rank."""
        if self.state is None or self.state.plan is None:
            return []
        now, state, plan = self._clock(), self.state, self.state.plan
        ages = {rank: max(0.0, now - at) for rank, at in self._last.items()}
        measure = _Measure(ages, self._uses, self.values)
        rows = [
            Row(
                worker.rank,
                plan.node_of(worker.rank).label,
                doing(worker),
                self._uses.get(worker.rank),
                ages.get(worker.rank),
                self.values.get(worker.rank),
                measure.marks(worker),
            )
            for worker in state.workers
        ]
        return sorted(rows, key=lambda row: (not row.marks, row.rank))

    def rate(self) -> float | None:
        """By how much the number has changed a second, lately."""
        if len(self.trend) < 2:
            return None
        (first_at, first), (last_at, last) = self.trend[max(0, len(self.trend) - 20)], self.trend[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else None


class _Measure:
    """What most ranks do, against which one stands out."""

    def __init__(
        self, ages: Mapping[int, float], uses: Mapping[int, Use], values: Mapping[int, float]
    ) -> None:
        self._ages, self._uses, self._values = ages, uses, values
        self._usual_age = _middle(list(ages.values()))
        self._usual_gpu = _middle([use.gpu for use in uses.values() if use.gpu is not None])
        self._middle = _middle(list(values.values()))
        self._spread = _middle([abs(value - self._middle) for value in values.values()])

    def marks(self, worker: Worker) -> tuple[str, ...]:
        """Why this one does."""
        return tuple(word for word in (self._of_phase(worker), *self._of_numbers(worker)) if word)

    def _of_phase(self, worker: Worker) -> str:
        if isinstance(worker.phase, Exited) and worker.phase.status:
            return "stopped" if worker.phase.stopped else "failed"
        if worker.phase in (WorkerPhase.UNSTARTED, WorkerPhase.VANISHED):
            return str(worker.phase.value)
        return "stalled" if worker.stall else ""

    def _of_numbers(self, worker: Worker) -> Sequence[str]:
        if not worker.running:
            return ()
        age, use = self._ages.get(worker.rank), self._uses.get(worker.rank)
        silent = age is not None and age > max(SILENT_S, SILENT_TIMES * self._usual_age)
        slow = (
            use is not None
            and use.gpu is not None
            and self._usual_gpu > GPU_BUSY
            and use.gpu < GPU_IDLE_SHARE * self._usual_gpu
        )
        return ("silent" if silent else "", "slow" if slow else "", self._different(worker.rank))

    def _different(self, rank: int) -> str:
        value = self._values.get(rank)
        if value is None or len(self._values) < 3:
            return ""
        near = max(FAR_OFF * self._spread, FAR_SHARE * abs(self._middle))
        return "" if abs(value - self._middle) <= near else "different"  # as NaN is


def doing(worker: Worker) -> str:
    """What a rank does, in a word or a few."""
    if isinstance(worker.phase, Exited):
        if worker.phase.stopped:
            return "stopped"
        return "finished" if worker.phase.status == 0 else status_words(worker.phase.status)
    if worker.stall:
        return "stalled"
    if worker.running and not worker.meeting.joined and worker.meeting.trying:
        return "joining"
    return worker.phase.value


def _middle(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else 0.0


def _shape(state: State) -> str:
    return f"{state.counted(len(state.workers))} on {counted(len(state.members), 'node')}"


def _shown(line: bytes) -> str:
    return latest(line).decode(errors="replace")
