"""Explains a run from its directory: the root cause with its evidence, what followed, and what to do."""

import contextlib
import json
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.messages import RanksJoined, plain
from distlaunch.diagnosis.exits import OTHER_SIZE, headline, py_spy_error, py_spy_frames
from distlaunch.observers.observer import Observer
from distlaunch.observers.recording import EVIDENCE, STACKS_REQUEST, request
from distlaunch.observers.run_directory import CODE, EVENTS, MAX_S, fd_of, file_of, json_of, size_of
from distlaunch.runs.following import lacks_end, summary_of
from distlaunch.runs.replay import HistoryError, lines_in, replay, typed
from distlaunch.runs.run import Run, directories, document_in, heard, run_in, uncollected
from distlaunch.supervisor.connecting import choose_members, returning
from distlaunch.supervisor.events import AgentUp
from distlaunch.supervisor.nodes import Connecting, Retrying, WorkerPhase, may_be_occupied
from distlaunch.supervisor.placing import lacks_code
from distlaunch.supervisor.ranks import missing_ranks, missing_words
from distlaunch.supervisor.root_cause import is_joining, place_of, waits_in
from distlaunch.supervisor.state import Cause, Phase, State
from distlaunch.supervisor.status import RunState
from distlaunch.supervisor.summary import LEFT_OUT, Summary
from distlaunch.wording import counted, cut, listed, rank_list, size_words, span_words

MAX_LINES = 10
MAX_CHARACTERS = 300
MAX_EVIDENCE = 64 << 20
"""Maximum bytes to read of an attempt's evidence."""
STACKS_S = 10.0
"""Seconds to wait for the stacks of the ranks of an active run."""
SHOWN_CHANGES = 3
RAISED = ("exception", "collective")
"""Kinds of failures that are exceptions."""
_OF_CAUSE = {"text": str, "certainty": str, "last_output": tuple[str, ...]}
_ALARMING = re.compile(r"Xid|I/O error|[Hh]ardware [Ee]rror|hung_task|Killed process (?P<pid>\d{1,9})")
"""Lines in the kernel's log that may explain a failure."""
_STATES = {"R": "running", "S": "sleeping", "D": "blocked in the kernel", "T": "suspended", "Z": "ended"}
"""Descriptions of the kernel's letters for process states."""
_UNCOMPARED = re.compile(
    r"invocation\.(?!script)|nodes\.(path|reach\.job)|places\.|logs\.|placeholders|restarts_before"
    r"|allocation\.|rendezvous\.job_id|tree\.(?!digest|commit)|spares\.(?!label)"
)
"""Settings that differ from run to run without changing the job."""
_RUN_IN_PATH = re.compile(r"(?<=/runs/)[^/]+-\d{8}-\d{6}-[0-9a-f]{8}")
"""The run ID in a path of the run's code."""


# Evidence


class WorkerRecord(Frozen):
    """The state of a worker at the time of the record, as in `distlaunch.agent.evidence`."""

    local_rank: int
    pid: int
    state: str
    wchan: str
    syscall: str
    stack: str
    processes: int
    cpu_s: float
    memory: int
    gpu: tuple[Any, ...]
    sockets: tuple[str, ...]


class Record(Frozen):
    """A record from a node: the state of its workers, the answer from NCCL's RAS service (`ras`), or
    the `stacks` of running workers, by local rank."""

    time: float
    node: str
    first_rank: int
    workers: tuple[WorkerRecord, ...] = ()
    memory: Mapping[str, int] = {}
    kernel: tuple[str, ...] = ()
    ras: str = ""
    stacks: tuple[tuple[int, str], ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield the whole record as text."""
        yield f"{self.node} at {clock(self.time)}:"
        for row in self.workers:
            where = f"rank {self.first_rank + row.local_rank} (pid {row.pid})"
            yield f"  {where}: {_STATES.get(row.state, row.state)}, {size_words(row.memory)}"
            yield from (f"    {socket}" for socket in row.sockets)
        if self.memory:
            yield f"  memory events: {listed([f'{name} {count}' for name, count in self.memory.items()])}"
        yield from (f"  kernel: {line}" for line in self.kernel if _ALARMING.search(line))
        yield from (f"  NCCL: {line}" for line in self.ras.splitlines())
        for local_rank, text in self.stacks:
            yield f"  stacks of rank {self.first_rank + local_rank}:"
            yield from (f"    {line}" for line in text.splitlines())

    def signs(self, pids: Collection[int]) -> Iterator[str]:
        """Yield signs that may explain a failure of the ranks with these PIDs, their own Xid errors last."""
        own = [f"pid={pid}," for pid in pids]  # an Xid on the same GPU may be another run's
        for line in sorted(
            self.kernel, key=lambda line: "Xid" not in line or any(mark in line for mark in own)
        ):
            found = _ALARMING.search(line)
            if found and (found["pid"] is None or int(found["pid"]) in pids):
                yield f"kernel log of {self.node}: {line}"
        for row in self.workers:
            if row.state in "DT":
                how = f"{_STATES[row.state]} ({row.wchan})" if row.state == "D" else "suspended by a signal"
                yield f"rank {self.first_rank + row.local_rank} (pid {row.pid} on {self.node}) was {how}"


def _evidence(directory: str, attempt: int, start: int = 0) -> Iterator[Record]:
    """Yield an attempt's records from byte `start` on. Nodes wrote the file, so invalid lines are skipped."""
    rows: list[bytes] = []
    with contextlib.suppress(OSError), open(fd_of(directory, file_of(attempt, EVIDENCE)), "rb") as file:
        file.seek(start)
        rows = file.read(MAX_EVIDENCE).splitlines()
    for row in rows:
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):
            record = typed(Record, json_of(row))
            if 0 <= record.time < MAX_S:
                yield record


def _stacks_now(run: Run, state: State) -> tuple[dict[int, str], list[Record]]:
    """Return the stacks of the running ranks of an active run, or as many as arrive within STACKS_S.

    Also return the records that came with them.
    """
    missing, found = {worker.rank for worker in state.workers if worker.running}, dict[int, str]()
    records: list[Record] = []
    size = size_of(run.directory, file_of(state.attempt, EVIDENCE))
    try:
        request(run.directory, STACKS_REQUEST)
    except OSError:  # no write access, or the run directory was removed
        return {}, records
    until = time.monotonic() + STACKS_S
    while missing - found.keys() and time.monotonic() < until:
        time.sleep(0.1)
        records = [*_evidence(run.directory, state.attempt, size)]
        found = {each.first_rank + rank: text for each in records for rank, text in each.stacks}
    return {rank: found.get(rank, f"no answer within {STACKS_S:g} s") for rank in sorted(missing)}, records


# The explanation

INNER = ("run", "summary")
"""Fields of an explanation that its JSON document contains in another form, or not at all."""


class Explanation(Frozen):
    """The reason why a run ended, or what the run is waiting for.

    `certainty` is how well the root cause is known: fact, likely or unknown. `at` is the time of the failure,
    in seconds since the epoch. `error` contains the lines of the failed rank's error. `then` describes how
    the other ranks ended, and `waiting` describes where ranks were waiting for each other. `uncollected`
    contains the lines of the summary about files that could not be collected. `differs` maps
    settings to their values in `other` (the job's last good run, unless `chosen`) and in this run.
    `incomplete` is the reason why only the summary is used. `evidence` contains the records from all nodes.
    `summary` is the summary of a failed run.
    """

    run: Run
    certainty: str = ""
    cause: str = ""
    rank: int | None = None
    node: str | None = None
    at: float | None = None
    error: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    then: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()
    uncollected: tuple[str, ...] = ()
    other: str = ""
    chosen: bool = False
    differs: Mapping[str, tuple[Any, Any]] = {}
    advice: str = ""
    code: str = ""
    incomplete: str = ""
    evidence: tuple[Record, ...] = ()
    summary: Summary | None = None

    @property
    def lead(self) -> str:
        """Return the words that introduce the cause."""
        leads = {"likely": "likely root cause", "unknown": "root cause unknown"}
        return leads.get(self.certainty, "root cause")

    def document(self) -> dict[str, Any]:
        """Return the explanation as a JSON object."""
        status = self.run.status
        head = {"run": self.run.id, "state": status.state.value, "exit_status": status.exit_status}
        return {**head, **{name: value for name, value in plain(self).items() if name not in INNER}}

    def lines(self) -> list[str]:
        """Return the explanation in at most MAX_LINES lines."""
        when = f" [{clock(self.at)}]" if self.at else ""
        latest = f" (the last 2 of {len(self.restarts)})" if len(self.restarts) > 2 else ""
        parts = [
            [_headline(self.run)],
            [f"{self.lead}: {self.cause}{when}"] if self.cause else [],
            [f"  {line}" for line in self.error],
            [f"evidence: {sign}" for sign in self.signs[-1:]],
            [f"waiting: {line}" for line in self.waiting[:2]],
            [f"then: {'; '.join(self.then)}"] if self.then else [],
            [f"before{latest}: {'; '.join(self.restarts[-2:])}"] if self.restarts else [],
            self.uncollected[:2],
            [self._change_line()] if self.other and self.cause and not self.chosen else [],
            [f"code: {self.code}; `distlaunch checkout` writes it to a directory"] if self.code else [],
            [f"what to do: {self.advice}"] if self.advice else [],
            [f"incomplete: {self.incomplete}"] if self.incomplete else [],
        ]
        return [cut(line.replace("\n", "; "), MAX_CHARACTERS) for line in chain(*parts)][:MAX_LINES]

    def _change_line(self) -> str:
        rows = listed(sorted(self.changes(), key=_is_minor), SHOWN_CHANGES) or "no setting has changed"
        return f"since {self.other}, the last good run: {rows}"

    def changes(self) -> list[str]:
        """Return all differences, one line each."""
        return [f"{name}: {before} → {now}" for name, (before, now) in self.differs.items()]


def _is_minor(change: str) -> bool:
    """Return whether a change is less likely than others to explain a failure."""
    return not change.startswith(("args:", "code:", "env.", "checksum of the script:"))


def explain(
    run: Run, other: Run | None = None, *observers: Observer, with_stacks: bool = False
) -> Explanation:
    """Explain a run, and compare it with `other` or its job's last good run.

    Raises `HistoryError` if the comparison with `other` isn't possible.
    The run's events are also passed on to `observers`. If the run is active, `with_stacks` requests the
    current stacks of its ranks, which takes a second or two.
    """
    try:
        past = _past(run.directory, *observers)
        if not run.alive and lacks_end(past.state, document_in(run.directory)):
            raise HistoryError("lines are missing, as after a full disk")
    except HistoryError as error:
        if other:
            raise HistoryError(f"can't compare {run.id}: {error}") from error
        return _without_events(run)._replace(incomplete=f"{EVENTS}: {error}")
    state, stackless, signs = past.state, tuple[str, ...](), tuple[str, ...]()
    if with_stacks and run.alive and state.phase is Phase.RUNNING:
        stacks, records = _stacks_now(run, state)
        state, stackless = _with_stacks(state, stacks)
        signs = tuple(sign for record in records for sign in record.signs(_pids(state)))
    succeeded = run.status.state is RunState.SUCCEEDED  # why = its controller was killed nevertheless
    cut_off = (
        state.phase is not Phase.DONE and run.status.state.over and run.status.state is not RunState.LOST
    )
    known = _compared(run, past, other)._replace(
        incomplete=f"{EVENTS}: the end is missing, as after a full or slow disk" if cut_off else "",
        uncollected=uncollected(run.directory) or ((run.status.why,) if succeeded and run.status.why else ()),
        evidence=tuple(_evidence(run.directory, state.attempt)),
        signs=signs,
        waiting=(
            *(() if run.status.state.over else awaited(state)),
            *_standing(state),
            *stackless,
            *_activity(run, state),
        ),
        restarts=_restart_words(state),
        code=state.spec.tree.words if state.spec.tree else "",
    )
    if run.status.state is RunState.SUCCEEDED:
        return known
    cause = state.cause
    if cause is None and state.restarts and state.phase is not Phase.RUNNING:  # while it is restarting
        cause = state.restarts[-1].cause
    if cause is None:
        if state.phase is Phase.RUNNING and not missing_ranks(state) and all(map(is_joining, state.workers)):
            known = known._replace(advice=OTHER_SIZE)
        return known._replace(certainty="unknown" if run.status.state.over else "", cause=run.status.why)
    return _explained(known, state, cause, past.epoch)


def _compared(run: Run, past: "_Past", chosen: Run | None) -> Explanation:
    """Compare a run with the `chosen` one, or with the job's last good run if that can be read."""
    other = chosen or _last_good(run)
    if other is None:
        return Explanation(run)
    try:
        differs = _differences(_past(other.directory), past)
    except HistoryError as error:
        if chosen:
            raise HistoryError(f"can't compare {other.id}: {error}") from error
        return Explanation(run)
    if changed := _changed_files(other.directory, run.directory):
        differs["code"] = changed
    return Explanation(run, other=other.id, chosen=bool(chosen), differs=differs)


def _with_stacks(state: State, stacks: Mapping[int, str]) -> tuple[State, tuple[str, ...]]:
    """Return the state with these stacks, as printed by py-spy, and the reasons why some are missing."""
    reasons: dict[str, list[int]] = {}
    for rank, text in stacks.items():
        state = state.with_worker(rank, stack=py_spy_frames(text))
        if not state.workers[rank].stack:
            reasons.setdefault(py_spy_error(text), []).append(rank)
    missing = ((rank_list(ranks, state.unit), reason) for reason, ranks in reasons.items())
    return state, tuple(f"no stack for {ranks}: {reason}" for ranks, reason in missing)


def _without_events(run: Run) -> Explanation:
    """Return what is known of a run whose events can't be read: of an active run, only its state."""
    if not run.status.state.over:
        return Explanation(run)
    return _recorded(run) or Explanation(run, "unknown", run.status.why or "nothing was recorded")


def _recorded(run: Run) -> Explanation | None:
    """Return the root cause in the summary of a run; None if the summary can't be read."""
    document = document_in(run.directory)
    with contextlib.suppress(KeyError, TypeError, ValueError):
        cause, hint = document["cause"], typed(str | None, document["hint"])
        if cause is None:
            return Explanation(run)
        text, certainty, words = (typed(kind, cause[key]) for key, kind in _OF_CAUSE.items())
        shown = [line for line in words if not re.fullmatch(LEFT_OUT, line)]
        error = headline("\n".join(shown), cause["kind"] in RAISED)
        known = Explanation(run, certainty, text, cause["rank"], cause["node"])
        return known._replace(error=tuple(error), advice=hint or "")
    return None


def _explained(known: Explanation, state: State, cause: Cause, epoch: float) -> Explanation:
    """Add the root cause to the explanation, with details from the summary."""
    summary = summary_of(known.run.directory, state) or Summary(state, known.run.directory, {}, 0.0)
    document, pids = summary.cause_document(cause), _pids(state)
    waited = cause.peer_gone and bool(summary.lagging)
    place = None if waited else document["node"]
    # Records with stacks were requested earlier, by a user.
    records = [each for each in known.evidence if place in (None, each.node) and not each.stacks]
    others, certainty = summary.others(), document["certainty"]
    if known.run.status.state.over and state.phase is not Phase.DONE:
        # What ended the controller may be the root cause.
        others = [line for line in others if not line.endswith(f": {WorkerPhase.RUNNING.value}")]
        others, certainty = [*others, known.run.status.why], "likely"
    known = known._replace(
        certainty=certainty,
        cause=cause.text,
        rank=cause.rank,
        node=document["node"],
        at=epoch + cause.at,
        error=tuple(_error(summary, cause)) or _recorded_error(known.run, cause),
        signs=tuple(sign for record in records for sign in record.signs(pids)),
        waiting=(*summary.lagging, *known.waiting),
        then=tuple(others),
        advice=summary.advice,
        summary=summary,
    )
    if not waited:
        return known
    # The rank that ended first was waiting for another.
    return known._replace(
        certainty="likely",
        cause=summary.lagging[0],
        rank=None,
        node=None,
        waiting=known.waiting[1:],
        then=(cause.text, *known.then),
    )


def _error(summary: Summary, cause: Cause) -> list[str]:
    if cause.rank is None or not cause.exit:
        return summary.node_lines()[:2]
    return headline(summary.error_of(cause.rank), cause.kind in RAISED)


def _recorded_error(run: Run, cause: Cause) -> tuple[str, ...]:
    """Return the error from the summary of a run whose output is not in its directory, as with torchrun."""
    known = _recorded(run)
    return known.error if known and known.rank == cause.rank else ()


def _pids(state: State) -> set[int]:
    return {worker.pid for worker in state.workers if worker.pid}


def awaited(state: State) -> Iterator[str]:
    """Describe which nodes the start, or the next attempt, is waiting for, if any."""
    if state.phase is Phase.CONNECTING:
        nodes = [*enumerate(state.nodes)]
        if names := [state.label(index) for index, node in nodes if isinstance(node, Connecting | Retrying)]:
            yield f"no connection yet to {listed(names)}"
    if state.phase is Phase.PREPARING:
        what = "environment" if state.spec.setup else "copy of the code"
        if names := [state.label(index) for index in state.members if lacks_code(state, index)]:
            yield f"no {what} yet on {listed(names)}"
    if state.phase is Phase.RESTARTING:
        busy = [state.label(index) for index, node in enumerate(state.nodes) if may_be_occupied(node)]
        if busy:
            yield f"the next attempt starts once the last one's ranks have ended on {listed(busy)}"
        elif len(choose_members(state)) < len(state.spec.nodes) and (absent := returning(state)):
            yield f"the next attempt waits for nodes; {listed(absent)} may return"


def _standing(state: State) -> Iterator[str]:
    """Describe where the ranks with known stacks are: in a collective, or elsewhere."""
    if state.phase is Phase.RUNNING and state.workers.counts.joining and (missing := missing_ranks(state)):
        yield missing_words(state, missing)
    places, collectives = dict[str, list[int]](), set[str]()
    seen = [worker for worker in state.workers if worker.stack and not worker.succeeded]
    for worker in seen:
        places.setdefault(place_of(worker), []).append(worker.rank)
        collectives |= {waits_in(worker)} - {""}
    stalled = {place_of(worker) for worker in seen if worker.stalled}
    untold = {place for place in stalled if place not in state.cause.text} if state.cause else places
    if len(places) > 1 or untold:
        ordered = sorted(places.items(), key=lambda each: len(each[1]), reverse=True)
        on_gpus = bool(state.plan and state.plan.backend == "nccl")  # any rank may be in a collective
        apart = "not in a collective but in" if collectives and not on_gpus else "in"
        hows = {where: "in" if where in collectives else apart for where in places}
        words = "; ".join(f"{rank_list(ranks, state.unit)} {hows[where]} {where}" for where, ranks in ordered)
        all_known = len(seen) + state.workers.counts.succeeded == len(state.workers)
        nowhere = all_known and not collectives and not on_gpus
        yield f"no {state.unit} is in a collective; {words}" if nowhere else words


def _activity(run: Run, state: State) -> Iterator[str]:
    """Describe when ranks last printed, if the run is active and no rank is known to be stalled."""
    if run.alive and state.phase is Phase.RUNNING and not any(worker.stalled for worker in state.workers):
        output, limit_s = "no output has been recorded", state.spec.limits.stall_s
        if (at := heard(run.directory)) is not None:
            output = f"the last output came {max(0.0, time.time() - at):.0f} s ago"
        idle = f"; no rank has been idle for {span_words(limit_s)} (timeouts.stall)" if limit_s else ""
        yield f"no rank has failed; {output}{idle}"


def _restart_words(state: State) -> tuple[str, ...]:
    words = []
    for number, restart in enumerate(state.restarts):
        raised = restart.cause.raised
        what = f" ({raised.words})" if raised else ""
        words.append(f"attempt {number}: {restart.cause.text}{what}")
    return tuple(words)


# Comparison with another run


def _differences(first: "_Past", second: "_Past") -> dict[str, tuple[Any, Any]]:
    """Return the settings, and the facts about nodes known of both runs, that differ, by name."""
    names = dict.fromkeys([*first.settings, *second.settings])
    pairs = {name: (first.settings.get(name, "unset"), second.settings.get(name, "unset")) for name in names}
    pairs |= {name: (first.facts[name], now) for name, now in second.facts.items() if name in first.facts}
    return {name: _shortened(*pair) for name, pair in pairs.items() if pair[0] != pair[1]}


def _changed_files(before: str, now: str) -> tuple[str, str] | None:
    """Return the difference between the code of two run directories; None = equal, or unknown.

    `launch.snapshot` writes CODE: a row for each file, with its path, kind, size and digest.
    """
    codes = []
    for directory in (before, now):
        damaged = (OSError, ValueError, TypeError, LookupError, RecursionError)
        with contextlib.suppress(*damaged), open(fd_of(directory, CODE), "rb") as file:
            codes.append({str(row[0]): row[1:] for row in json.load(file)})
    if len(codes) < 2 or codes[0] == codes[1]:
        return None
    first, second = codes
    paths = [path for path in sorted({*first, *second}) if first.get(path) != second.get(path)]
    changed = f"{listed(paths, SHOWN_CHANGES)} {'differ' if len(paths) > 1 else 'differs'}"
    return counted(len(first), "file"), f"{counted(len(second), 'file')} ({changed})"


def _shortened(before: Any, now: Any) -> tuple[Any, Any]:
    """Leave out the words that two lists share at the beginning and end."""
    if not (isinstance(before, tuple) or isinstance(now, tuple)):
        return before, now
    before, now = map(_as_list, (before, now))
    same = _common(before, now)
    rest = [words[same:] for words in (before, now)]
    end = _common(*(words[::-1] for words in rest))
    first, second = (" ".join(words[: len(words) - end]) or "nothing" for words in rest)
    return first, second


def _as_list(value: Any) -> tuple[str, ...]:
    if isinstance(value, tuple):
        return value
    return () if value == "unset" else (str(value),)


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


class _Past(Frozen):
    """The final state of a run, its settings, facts about its nodes, and the time at which it began."""

    state: State
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    epoch: float


def _past(directory: str, *observers: Observer) -> _Past:
    """Replay a run, and pass its events on to `observers`. Raises `HistoryError`."""
    lines, facts = lines_in(Path(directory)), dict[str, Any]()
    for moment in replay(lines, *observers):
        if isinstance(moment.event, AgentUp):
            label, known = moment.state.label(moment.event.node), moment.event.facts
            facts |= {f"{label}: Python": known.python, f"{label}: GPUs": known.gpus}
        elif isinstance(moment.event, RanksJoined) and moment.event.torch:
            facts[f"{moment.state.label(moment.event.node)}: torch"] = moment.event.torch
    epoch = float(lines[0].get("time") or 0.0) - float(lines[0].get("t") or 0.0)
    return _Past(moment.state, _settings(lines[0]), facts, epoch)


def _settings(first: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run by key, from the first line of its events."""
    spec = {**first.get("spec", {})}
    spec["membership"] = {**spec.get("membership", {})}
    spares = _of_nodes(spec["membership"].pop("spares", []), "spares")
    pairs = chain(_of_nodes(spec.pop("nodes", []), "nodes"), spares, _flat(spec, ""))
    found = {_key(name): value for name, value in pairs if not _UNCOMPARED.match(name)}
    paths = {key: _RUN_IN_PATH.sub("RUN", value) for key, value in found.items() if isinstance(value, str)}
    return {**found, **paths}


def _of_nodes(nodes: Sequence[Mapping[str, Any]], key: str) -> Iterator[tuple[str, Any]]:
    """Yield each setting of the nodes once: one value if they share it, else the values in order."""
    flat = [dict(_flat(node, key)) for node in nodes]
    for name in dict.fromkeys(chain(*flat)):
        values = [each.get(name, "unset") for each in flat]
        yield name, values[0] if values == values[:1] * len(values) else tuple(map(str, values))


_KEYS = (
    (r"^(nodes|spares)\.label$", r"\1"),
    (r"^membership\.grow$", "elastic.grow"),
    (r"^membership\.", ""),
    (r"^nodes\.(procs|gpus)$", r"\1_per_node"),
    (r"^program\.words$", "program"),
    (r"^sections\.", ""),
    (r"^program\.", ""),
    (r"^limits\.(\w+)_s$", r"timeouts.\1"),
    (r"^limits\.", ""),
    (r"^restarts\.most$", "restarts.max"),
    (r"^restarts\.(\w+)_s$", r"restarts.\1"),
    (r"^(env\..+)\.text$", r"\1"),
    (r"^invocation\.script$", "checksum of the script"),
    (r"^tree\.digest$", "code"),
    (r"^sync\.tree$", "sync"),
    (r"^tree\.", ""),
)
"""Patterns for `JobSpec` fields, and the job file keys that set them, if the names differ."""


def _key(name: str) -> str:
    for pattern, key in _KEYS:
        name = re.sub(pattern, key, name)
    return name


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each value in a JSON document, with lists of strings as tuples."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and not all(isinstance(each, str) for each in value):
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{number}]")
    else:
        yield path, tuple(value) if isinstance(value, list) else value


def _last_good(run: Run) -> Run | None:
    """Return the same job's latest earlier run that succeeded."""
    status, found = run.status, []
    for directory in directories().values():
        seen = run_in(directory)
        if seen and seen.status.state is RunState.SUCCEEDED and seen.status.began < status.began:
            same = (seen.status.job, seen.status.file) == (status.job, status.file)
            if not status.file:  # different scripts may have the same name
                same = same and os.path.dirname(directory) == os.path.dirname(run.directory)
            found += [seen] if same else []
    return max(found, key=lambda each: each.status.began, default=None)


# Words


def _headline(run: Run) -> str:
    status = run.status
    known = status.state.over and status.state is not RunState.LOST
    took = f" after {counted(round(max(0, status.since - status.began)), 'second')}" if known else ""
    ended = f" with exit status {status.exit_status}" if status.exit_status else ""
    lost = f"; output was lost: {status.trouble}" if status.trouble else ""
    return f"{run.id}: {status.state.value}{ended}{took}{lost}"


def clock(at: float) -> str:
    """Return the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(at))
