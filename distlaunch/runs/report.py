"""Everything known about a run, for a page about the run: the model of `view`, and where the time went."""

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.messages import plain
from distlaunch.agent.wire import ATTEMPTS
from distlaunch.job.spec import JobSpec
from distlaunch.observers.model import Row, RunModel, doing, uses_in
from distlaunch.observers.recording import USES
from distlaunch.observers.run_directory import MAX_S, fd_of, index_of, json_of
from distlaunch.plan.workers import STREAMS, destinations
from distlaunch.runs.following import output_of
from distlaunch.runs.run import Run, document_in
from distlaunch.runs.submissions import submission_of
from distlaunch.runs.timeline import Span, Timeline, ledger, trace
from distlaunch.runs.why import Explanation, explain
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import Exited, Up, Use
from distlaunch.supervisor.ranks import torch_versions
from distlaunch.supervisor.state import Cause, State
from distlaunch.supervisor.step import begin
from distlaunch.supervisor.summary import Summary

VERSION = 1
"""Version of the JSON document. It changes whenever the format changes incompatibly."""
MAX_TAILS, TAIL_LINES = 8, 40
"""Maximum ranks whose last output is shown, and maximum lines of each stream."""
MAX_USES = 64 << 20
"""Maximum bytes to read of the record of resource use."""


class Attempt(Frozen):
    """An attempt: when its workers were started, and when and why it ended. None = not yet."""

    number: int
    started: float | None
    ended: float | None
    nodes: tuple[str, ...]
    cause: str


class End(Frozen):
    """The end of a rank, `after_s` seconds after the first failure. `first` = the rank that failed first."""

    rank: int
    after_s: float
    how: str
    first: bool


class Sample(Frozen):
    """The resource use of nodes, keyed by their labels, at a time in seconds since the run began."""

    at: float
    nodes: Mapping[str, Use]


class Report(RunModel):
    """A run up to the present.

    `volume` contains the number of bytes printed by each rank, and `tails` the last lines of the ranks that
    matter, by stream. `queue_s` is the recorded time in a scheduler's queue.
    """

    explanation: Explanation

    def __init__(self, run: Run, now: float) -> None:
        super().__init__(run.status.began, lambda: run.status.since if run.status.state.over else now)
        self.run = run
        self.timeline: Timeline | None = None
        self.volume: Counter[int] = Counter()
        self.tails: dict[int, dict[str, list[str]]] = {}
        self.samples: list[Sample] = []
        self.queue_s = 0.0
        self.seconds = 0.0

    def began(self, spec: JobSpec, chance: float, at: float) -> None:
        """Begin the timeline."""
        super().began(spec, chance, at)
        self.state, _ = begin(spec, at, chance)
        self.timeline = Timeline(self.state)

    def happened(self, event: Event, state: State, at: float) -> None:
        """Continue the timeline."""
        super().happened(event, state, at)
        assert self.timeline is not None
        self.timeline.take(event, state, at)

    @property
    def spans(self) -> list[Span]:
        """Return the spans of all lanes."""
        return self.timeline.spans(self.seconds) if self.timeline else []

    @property
    def labels(self) -> list[str]:
        """Return the names of the nodes in the pool, in order."""
        return [node.label for node in self.state.spec.pool] if self.state else []

    @property
    def attempts(self) -> list[Attempt]:
        """Return all attempts that were prepared."""
        states = self.timeline.attempts if self.timeline else {}
        return [_attempt(number, state) for number, state in states.items() if state.plan]

    def ripple(self) -> list[End]:
        """Return how the ranks ended after the first failure in the last failed attempt, by rank."""
        for number, state in reversed((self.timeline.attempts if self.timeline else {}).items()):
            cause = _cause_of(number, state)
            if cause and state.plan and not cause.cancelled:
                return self._ends(state, cause)
        return []

    def _ends(self, state: State, cause: Cause) -> list[End]:
        """Return how an attempt's ranks ended. `cause` is why the attempt ended."""
        summary = self.explanation.summary
        if summary is None or summary.state.attempt != state.attempt:
            summary = Summary(state, "", {}, 0.0)  # the output of earlier attempts is not read
        how = {rank: words for words, ranks in summary.ends().items() for rank in ranks}
        at = {each.rank: each.phase.at for each in state.workers if isinstance(each.phase, Exited)}
        failed_at = at.get(cause.rank, cause.at) if cause.exit and cause.rank is not None else cause.at
        return [
            End(rank, ended - failed_at, how.get(rank, doing(state.workers[rank])), rank == cause.rank)
            for rank, ended in at.items()
        ]

    def versions(self) -> list[tuple[str, str]]:
        """Return (name, version) pairs from the environments that the job has built, which are all alike.

        If it has built none, return the versions of torch that the ranks have loaded.
        """
        codes = [node.code for node in (self.state.nodes if self.state else ()) if isinstance(node, Up)]
        built = next(([*code.versions] for code in codes if code and code.versions), [])
        loaded = torch_versions(self.state) if self.state and self.state.plan else ()
        return built or [("torch", words) for words in loaded]

    def document(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        lanes = [span for span in self.spans if len(span.lane) < 2]
        labels = self.labels
        return {
            "version": VERSION,
            "why": self.explanation.document(),
            "seconds": self.seconds,
            "ledger": ledger(self.spans, self.queue_s),
            "spans": [
                {**span._asdict(), "lane": labels[span.lane[0]] if span.lane else None} for span in lanes
            ],
            "attempts": [each._asdict() for each in self.attempts],
            "ripple": [each._asdict() for each in self.ripple()],
            "ranks": [{**plain(row), "printed": self.volume[row.rank]} for row in self.rows()],
            "last_output": self.tails,
            "messages": [{"at": at, "level": each.level, "text": each.text} for at, each in self.history],
        }

    def trace(self) -> Any:
        """Return the spans and messages as a Chrome trace."""
        return trace(self.spans, self.labels, [(at, each.text) for at, each in self.history])


def report_of(run: Run) -> Report:
    """Create the report on a run. Raises `HistoryError`."""
    report = Report(run, time.time())
    report.explanation = explain(run, None, report)
    if report.explanation.incomplete:  # the events before the damage don't show how the run ended
        report.state = report.timeline = None
    submission = submission_of(run)
    if submission and submission.at and report.state and not report.state.spec.restarts_before:
        report.queue_s = max(0.0, report.began_at - submission.at)
    report.seconds = _seconds(report)
    report.used(uses_in(run.directory), 0.0)
    _read_samples(report)
    _read_index(report)
    _read_tails(report)
    return report


def _seconds(report: Report) -> float:
    """Return how long the run has taken, so far or in total."""
    last = report.timeline.at if report.timeline else 0.0
    seconds = document_in(report.run.directory).get("seconds")
    if not report.run.status.state.over:
        seconds = time.time() - report.began_at
    return max(last, seconds if isinstance(seconds, int | float) and seconds < MAX_S else 0.0)


def _read_samples(report: Report) -> None:
    """Read the nodes' resource use over time. Damaged lines are skipped."""
    with suppress(OSError), open(fd_of(report.run.directory, USES), "rb") as file:
        for line in file.read(MAX_USES).splitlines():
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                found = json_of(line)
                nodes = {label: Use(*use) for label, use in found["nodes"].items()}
                if all(isinstance(each, int | float | None) for use in nodes.values() for each in use):
                    report.samples.append(Sample(float(found["time"]) - report.began_at, nodes))


def _read_index(report: Report) -> None:
    """Add up the output of each rank, and record when the rank last printed."""
    attempt = report.state.attempt % ATTEMPTS if report.state else 0
    for entry in index_of(report.run.directory):
        report.volume[entry.rank] += entry.size
        if entry.attempt == attempt:
            report.heard[entry.rank] = entry.time


def _read_tails(report: Report) -> None:
    """Read the last output of the ranks that matter: those that failed or stand out, or else rank 0."""
    state, rank = report.state, report.explanation.rank
    if state is None or state.plan is None:
        return
    marked = [row.rank for row in report.rows() if stands_out(row)]
    ranks = [*dict.fromkeys([*([] if rank is None else [rank]), *marked])][:MAX_TAILS] or [0]
    for (of, stream), goes_to in destinations(state.plan, state.attempt).items():
        if of in ranks and goes_to.file:
            text = b"".join(output_of(report.run.directory, goes_to.file)).decode(errors="replace")
            if lines := text.splitlines()[-TAIL_LINES:]:
                report.tails.setdefault(of, {})[STREAMS[stream]] = lines


def stands_out(row: Row) -> bool:
    """Return whether a rank is conspicuous for any reason other than having been stopped."""
    return bool(row.marks) and row.marks != ("stopped",)


def _cause_of(number: int, state: State) -> Cause | None:
    """Return why an attempt ended. `state` is its last state, which may not yet include the restart."""
    return state.restarts[number].cause if len(state.restarts) > number else state.cause


def _attempt(number: int, state: State) -> Attempt:
    cause = _cause_of(number, state)
    restart = state.restarts[number] if len(state.restarts) > number else None
    ended = restart.at if restart else state.verdict.at if state.verdict else None
    assert state.plan is not None
    nodes = tuple(part.label for part in state.plan.nodes)
    return Attempt(number, state.started_at, ended, nodes, cause.text if cause else "")
