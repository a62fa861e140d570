"""Where a run's time went: the goodput ledger, and spans of the job, each node and each rank."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.messages import SetupPrinted, TreePlaced, TreeRefused
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import Connecting, Leaving, RankState, Reaping, Retrying, Up, may_be_occupied
from distlaunch.supervisor.placing import code_of, lacks_code
from distlaunch.supervisor.state import Phase, State, Why

KINDS: Mapping[str, str] = {
    "queue": "waiting in the queue",
    "connect": "connecting to nodes",
    "code": "copying code",
    "setup": "building environments",
    "start": "starting, until a rank tries to join",
    "rendezvous": "rendezvous",
    "training": "training",
    "failed": "training in attempts that failed",
    "stall": "stalled",
    "stop": "stopping",
    "restart": "restarting: wait and backoff",
}
"""The classes of a run's time, in the order of the ledger."""
IDLE = "idle"
"""A connected, idle node: a spare, or a node that is waiting for others."""
ALL_KINDS = {**KINDS, IDLE: "ready, idle"}
_LEAST = ("stall", "start", "rendezvous", "training", "stop")
"""Kinds of ranks' spans, in order of precedence: a node has the first kind that any of its ranks has."""

Lane = tuple[int, ...]
"""() = the job, (node,) = a node of the pool, (node, rank) = a rank."""


class Span(Frozen):
    """A part of a lane's time, in seconds since the run began."""

    lane: Lane
    kind: str
    began: float
    ended: float
    attempt: int

    @property
    def seconds(self) -> float:
        """Return the span's length in seconds."""
        return self.ended - self.began


class Timeline:
    """The spans of a run, derived from its states. `attempts` contains the last state of each attempt."""

    def __init__(self, first: State) -> None:
        """Begin with the first state of a run, in which nodes are being connected."""
        self.attempts: dict[int, State] = {}
        self.at = 0.0
        """The time of the last event."""
        self._closed: list[Span] = []
        self._open: dict[Lane, Span] = {}
        self._counts: dict[Lane, Counter[str]] = defaultdict(Counter)
        """The number of the job's nodes, or of a node's ranks, in a span of each kind."""
        self._in_setup: set[int] = set()
        self._seen: tuple[Any, ...] = ()
        """The facts on which the kinds of all nodes depended at the last event."""
        self.take(None, first, 0.0)

    def take(self, event: Event | None, state: State, at: float) -> None:
        """Add the next state, and the event that led to it."""
        node = getattr(event, "node", None)
        counts = state.workers.counts
        seen = (state.phase, state.attempt, counts.joined == len(state.workers), counts.joining > 0)
        nodes: Iterable[int] = range(len(state.nodes)) if node is None or seen != self._seen else (node,)
        if isinstance(event, SetupPrinted):
            self._in_setup.add(event.node)
        elif isinstance(event, TreePlaced | TreeRefused):
            self._in_setup.discard(event.node)
        for each in nodes:
            local_rank = getattr(event, "local_rank", None) if seen == self._seen else None
            self._take_node(each, local_rank, state, at)
        self._change((), _of_job(state, self._counts[()]), state, at)
        self._seen, self.at, self.attempts[state.attempt] = seen, at, state

    def _take_node(self, node: int, local_rank: int | None, state: State, at: float) -> None:
        """Update the lanes of a node and its ranks, or only one of its ranks."""
        rank = None if local_rank is None else state.rank_of(node, local_rank)
        part = state.plan.part_of(node) if state.plan else None
        for each in () if part is None else part.ranks if rank is None else (rank,):
            self._change((node, each), _of_rank(state.workers[each], state), state, at)
        self._change((node,), self._of_node(node, state), state, at)

    def _of_node(self, node: int, state: State) -> str:
        """Return the kind of a node's time; "" if the node is away or done."""
        this = state.nodes[node]
        if isinstance(this, Connecting | Retrying | Reaping):
            # Nothing is known about a lost node until it returns.
            return "" if isinstance(this, Retrying) and this.away else "connect"
        if not isinstance(this, Up | Leaving):
            return ""
        if state.phase in (Phase.RESTARTING, Phase.STOPPING):
            return "stop" if may_be_occupied(this) else IDLE
        if code_of(state, node) and lacks_code(state, node):
            return "setup" if node in self._in_setup else "code"
        kinds = self._counts[(node,)]
        return next((kind for kind in _LEAST if kinds[kind]), IDLE)

    def _change(self, lane: Lane, kind: str, state: State, at: float) -> None:
        """Set a lane's kind from now on; "" = nothing."""
        span = self._open.get(lane)
        if (span.kind if span else "") == kind and (span is None or span.attempt == state.attempt):
            return
        began = at
        if span:
            if kind == "stall" and span.kind == "training":  # the stall began before it was detected
                began = max(span.began, at - state.stall_s)
            self._counts[lane[:-1]][span.kind] -= bool(lane)
            self._closed += [span._replace(ended=began)] if began > span.began else []
            del self._open[lane]
        if kind:
            self._counts[lane[:-1]][kind] += bool(lane)
            self._open[lane] = Span(lane, kind, began, began, state.attempt)

    def spans(self, until: float) -> list[Span]:
        """Return all spans, sorted by lane, then by time. Spans that have not ended end at `until`."""
        last = [
            span._replace(ended=until) for span in self._open.values() if span.kind and until > span.began
        ]
        kinds = {attempt: _renamed(state) for attempt, state in self.attempts.items()}
        return [
            span._replace(kind=kinds[span.attempt].get(span.kind, span.kind))
            for span in sorted([*self._closed, *last], key=lambda span: (span.lane, span.began))
        ]


def _of_job(state: State, nodes: Mapping[str, int]) -> str:
    """Return the class of the job's time. `nodes` counts the job's nodes by kind."""
    counts = state.workers.counts
    match state.phase:
        case Phase.CONNECTING:
            return "connect"
        case Phase.PREPARING:
            waits = "restart" if state.restarts else "connect"
            return next((kind for kind in ("code", "setup") if nodes.get(kind)), waits)
        case Phase.RUNNING:
            return "stall" if nodes.get("stall") else _running(state, bool(counts.joining))
        case Phase.RESTARTING:
            return "stop" if nodes.get("stop") else "restart"
    return "stop"


def _of_rank(worker: RankState, state: State) -> str:
    """Return the kind of a rank's time; "" before its start and after its end."""
    if not worker.running:
        return ""
    if state.phase is not Phase.RUNNING:
        return "stop"
    return "stall" if worker.stalled else _running(state, worker.joined or worker.trying)


def _running(state: State, joining: bool) -> str:
    """Return the kind for running ranks. Training begins when the last rank has joined the rendezvous."""
    if state.workers.counts.joined == len(state.workers) or (state.plan and state.plan.join_s is None):
        return "training"
    return "rendezvous" if joining else "start"


def _renamed(state: State) -> dict[str, str]:
    """Return new names for an attempt's kinds, depending on how it ended. `state` is its last state."""
    if len(state.restarts) > state.attempt:
        failed = state.restarts[state.attempt].why is Why.FAILURE
    else:
        cause = state.verdict.cause if state.verdict else None
        failed = cause is not None and not (cause.cancelled or cause.scheduled)
    joined = state.workers.counts.joining > 0
    if failed:
        return {"training": "failed"}
    return {"start": "training"} if state.succeeded and not joined else {}  # there was no rendezvous


def ledger(spans: Sequence[Span], queue_s: float = 0.0) -> dict[str, float]:
    """Return a run's seconds by class, in the order of KINDS. They add up to the run's wall time.

    `queue_s` is the time in a scheduler's queue before the run.
    """
    found = dict.fromkeys(KINDS, 0.0) | {"queue": queue_s}
    for span in spans:
        if not span.lane:
            found[span.kind] += span.seconds
    return {kind: seconds for kind, seconds in found.items() if seconds}


def trace(spans: Iterable[Span], labels: Sequence[str], messages: Iterable[tuple[float, str]]) -> Any:
    """Return the spans as a Chrome trace, with nodes as processes, ranks as threads, and times in µs.

    `labels` are the names of the nodes.
    """
    events = [
        *_named((), "job", "job"),
        *(each for i, label in enumerate(labels) for each in _named((i,), label)),
    ]
    for span in sorted(spans, key=lambda span: len(span.lane)):
        node, thread = _place(span.lane)
        if len(span.lane) == 2:
            events += _named(span.lane, "", f"rank {span.lane[1]}")
        times = {"ts": round(span.began * 1e6), "dur": round(span.seconds * 1e6)}
        about = {"attempt": span.attempt, "what": ALL_KINDS[span.kind]}
        events.append({"ph": "X", "pid": node, "tid": thread, "name": span.kind, **times, "args": about})
    events += [
        {"ph": "i", "s": "g", "pid": 0, "tid": 0, "name": text, "ts": round(at * 1e6)}
        for at, text in messages
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*{str(each): each for each in events}.values()]}


def _place(lane: Lane) -> tuple[int, int]:
    """Return the process and thread numbers that identify a lane in a trace."""
    return (lane[0] + 1 if lane else 0, lane[1] + 1 if len(lane) > 1 else 0)


def _named(lane: Lane, process: str, thread: str = "node") -> Iterator[dict[str, Any]]:
    """Yield the trace events that name a lane's process and thread; "" = not named here."""
    node, number = _place(lane)
    for what, name in (("process_name", process), ("thread_name", thread)):
        if name:
            yield {"ph": "M", "pid": node, "tid": number, "name": what, "args": {"name": name}}
