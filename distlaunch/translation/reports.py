"""Turns an agent's reports into events; one that is invalid ends the link."""

import signal
from collections.abc import Callable, Mapping
from typing import Any

from distlaunch.agent import messages
from distlaunch.agent.wire import PROTOCOL, ProtocolError
from distlaunch.plan.layout import Facts
from distlaunch.state import events
from distlaunch.state.events import Event
from distlaunch.state.workers import Use

Clock = Callable[[float], float]
"""Turns the node's monotonic time into ours."""
MAX_SIGNAL = 127
MAX_GPUS = 4096
MAX_WORDS = 200
"""Characters of a name or a few words from a node."""
MAX_TEXT = 4096
"""Characters of a line from a node: it is shown to people."""
MAX_STACK = 1 << 16
MAX_LAST_WORDS = 1 << 14
MAX_SECONDS = 1e12
MAX_NUMBER = 1 << 53


def number(value: int, name: str, least: int = -MAX_NUMBER, most: int = MAX_NUMBER) -> int:
    """A number from a node. Raises `ProtocolError` when it is out of range."""
    if not least <= value <= most:
        raise ProtocolError(f"{name} is out of range: {value}")
    return value


def seconds(value: float, name: str) -> float:
    """A time from a node. Raises `ProtocolError` when it is none."""
    if not 0 <= value <= MAX_SECONDS:
        raise ProtocolError(f"{name} is out of range")
    return float(value)


def event_of(node: int, report: Any, clock: Clock) -> Event | None:
    """The event that a report stands for, or None for one that is only a sign of life.

    A report becomes the event of the same name, field by field. What it holds is of the right types, but not
    trusted: texts are cut, numbers must be in range. Raises `ProtocolError`.
    """
    kind = type(report)
    if kind is messages.Pong:
        return None
    if kind is messages.Hello:
        return _hello(node, report)
    if kind not in _EVENTS:
        raise ProtocolError(f"unexpected message: {kind.__name__}")
    fields = report._asdict()
    if "t" in fields:
        fields["at"] = clock(seconds(fields.pop("t"), "t"))
    event = _EVENTS[kind]
    rules = ((name, _RULES.get((kind, name), _trusted)) for name in event._fields if name in fields)
    values = {name: rule(fields[name], name) for name, rule in rules}
    return event(node=node, **values)  # type: ignore[no-any-return]


def uses_of(report: messages.Usage) -> dict[int, Use]:
    """What each worker uses, by its local rank. Raises `ProtocolError`."""
    return dict(map(_use, report.ranks))


def _use(row: Any) -> tuple[int, Use]:
    match row:
        case [int(rank), int() | float() as cpu, int(memory), int() | None as gpu, int() | None as there]:
            shares = (value if value is None else number(value, "gpu", 0) for value in (gpu, there))
            return number(rank, "ranks"), Use(seconds(cpu, "cpu"), number(memory, "memory", 0), *shares)
    raise ProtocolError("usage: ranks is not a list of ranks and what they use")


def _hello(node: int, report: messages.Hello) -> Event:
    if report.protocol != PROTOCOL:
        raise ProtocolError(f"the agent speaks protocol {report.protocol}, not {PROTOCOL}")
    gpus = number(report.gpus, "gpus", 0, MAX_GPUS)
    procs = report.procs if report.procs is None else number(report.procs, "procs", 1)
    python, logs, hostname = (_trusted(text, "") for text in (report.python, report.logs, report.hostname))
    return events.AgentUp(node, Facts(python, gpus, procs, logs), hostname)


def _trusted(value: Any, name: str) -> Any:
    """A field of an event: `value`, with what a node may not say refused, or cut off."""
    match value:
        case bool() | None:
            return value
        case int():
            return number(value, name)
        case str():
            return value[:MAX_TEXT]
        case dict():
            return tuple((key[:MAX_WORDS], _short(inner)) for key, inner in value.items())
        case list():
            return tuple(_trusted(inner, name) for inner in value)
    return value


def _status(value: int, name: str) -> int:
    return number(value, name, -MAX_SIGNAL, 255)


def _signal(value: int, name: str) -> int:
    if value not in {*signal.Signals}:
        raise ProtocolError(f"{name} is out of range: {value}")
    return value


def _last_words(value: str, name: str) -> str:
    return value[:MAX_LAST_WORDS]


def _stack(value: str, name: str) -> str:
    return value[:MAX_STACK]


def _objects(values: list[Any], name: str) -> tuple[Mapping[str, Any], ...]:
    if not all(isinstance(value, dict) for value in values):
        raise ProtocolError(f"{name} is not a list of objects")
    return tuple({key[:MAX_WORDS]: _short(inner) for key, inner in value.items()} for value in values)


def _short(value: Any) -> Any:
    return value[:MAX_WORDS] if isinstance(value, str) else value if isinstance(value, int) else None


def _error_record(record: Any, name: str) -> Mapping[str, str] | None:
    """{message, callstack}, as far as they are texts; long lines are cut, since all of it is shown."""
    if not isinstance(record, dict):
        return None
    texts = {name: record.get(name) for name in ("message", "callstack")}
    return {name: _cut_lines(text) for name, text in texts.items() if isinstance(text, str)}


def _cut_lines(text: str) -> str:
    return "\n".join(line[:MAX_TEXT] for line in text.splitlines())


def _seen(rows: list[Any], name: str) -> tuple[tuple[int, bool, str], ...]:
    return tuple(map(_seen_of_one, rows))


def _seen_of_one(row: Any) -> tuple[int, bool, str]:
    match row:
        case [int(rank), bool(trying), str(words)] if not isinstance(rank, bool):
            return number(rank, "ranks"), trying, words[:MAX_WORDS]
    raise ProtocolError("lagging: ranks is not a list of ranks and what they do")


def _stopped(rows: list[list[int]], name: str) -> tuple[tuple[int, int], ...]:
    if not all(len(row) == 2 for row in rows):
        raise ProtocolError("stopped is not a list of ranks and pids")
    return tuple((number(rank, "stopped"), number(pid, "stopped", 1)) for rank, pid in rows)


_RULES: Mapping[tuple[type, str], Callable[[Any, str], Any]] = {
    (messages.Interrupted, "signum"): _signal,
    (messages.PortRefused, "owners"): _objects,
    (messages.PortUsurped, "owners"): _objects,
    (messages.RanksLag, "seen"): _seen,
    (messages.RanksStalled, "stopped"): _stopped,
    (messages.StackDumped, "text"): _stack,
    (messages.Stuck, "processes"): _objects,
    (messages.WorkerExited, "error_record"): _error_record,
    (messages.WorkerExited, "status"): _status,
    (messages.WorkerExited, "words"): _last_words,
}
"""What checks a field that needs more than `_trusted`."""
_EVENTS: Mapping[type, Any] = {
    kind: getattr(events, kind.__name__)
    for kind in messages.REPORTS.values()
    if hasattr(events, kind.__name__)
}
