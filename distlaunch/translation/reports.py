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


def _numbers(values: list[int], name: str) -> tuple[int, ...]:
    return tuple(number(value, name) for value in values)


def _mappings(values: list[Any], name: str) -> tuple[Mapping[str, Any], ...]:
    if not all(isinstance(value, dict) for value in values):
        raise ProtocolError(f"{name} is not a list of objects")
    return tuple({key[:MAX_WORDS]: _short(inner) for key, inner in value.items()} for value in values)


def _items(values: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((key[:MAX_WORDS], _short(value)) for key, value in values.items())


def _cut(text: str | None, most: int = MAX_TEXT) -> Any:
    return text if text is None else text[:most]


def event_of(node: int, report: Any, clock: Clock) -> Event | None:
    """The event that a report stands for, or None for one that is only a sign of life.

    What it holds is of the right types, but not trusted: texts are cut. Raises `ProtocolError`.
    """
    make = _EVENTS.get(type(report))
    if make is None:
        raise ProtocolError(f"unexpected message: {type(report).__name__}")
    return make(node, report, clock)


def uses_of(report: messages.Usage) -> dict[int, Use]:
    """What each worker uses, by its local rank. Raises `ProtocolError`."""
    return dict(map(_use, report.ranks))


def _use(row: Any) -> tuple[int, Use]:
    match row:
        case [int(rank), int() | float() as cpu, int(memory), int() | None as gpu, int() | None as there]:
            shares = (value if value is None else number(value, "gpu", 0) for value in (gpu, there))
            return number(rank, "ranks"), Use(seconds(cpu, "cpu"), number(memory, "memory", 0), *shares)
    raise ProtocolError("usage: ranks is not a list of ranks and what they use")


def _hello(node: int, report: messages.Hello, clock: Clock) -> Event:
    if report.protocol != PROTOCOL:
        raise ProtocolError(f"the agent speaks protocol {report.protocol}, not {PROTOCOL}")
    gpus = number(report.gpus, "gpus", 0, MAX_GPUS)
    procs = report.procs if report.procs is None else number(report.procs, "procs", 1)
    return events.AgentUp(
        node, Facts(_cut(report.python), gpus, procs, _cut(report.logs)), _cut(report.hostname)
    )


def _signal(value: int) -> int:
    """The number of a signal that has a name. Raises `ProtocolError`."""
    if value not in {*signal.Signals}:
        raise ProtocolError(f"signal is out of range: {value}")
    return value


def _route(node: int, report: messages.RouteFound, clock: Clock) -> Event:
    asked, address, interface = _cut(report.asked), _cut(report.address), _cut(report.interface)
    interfaces, named = _items(report.interfaces), _items(report.named)
    return events.RouteFound(node, asked, address, interface, _cut(report.source), interfaces, named)


def _exited(node: int, report: messages.WorkerExited, clock: Clock) -> Event:
    return events.WorkerExited(
        node,
        number(report.local_rank, "local_rank"),
        number(report.status, "status", -MAX_SIGNAL, 255),
        clock(seconds(report.t, "t")),
        _error_record(report.error_record),
        number(report.oom_kills, "oom_kills"),
        _numbers(report.shm, "shm"),
        _cut(report.words, MAX_LAST_WORDS),
    )


def _error_record(record: Any) -> Mapping[str, str] | None:
    """{message, callstack}, as far as they are texts; long lines are cut, since all of it is shown."""
    if not isinstance(record, dict):
        return None
    texts = {name: record.get(name) for name in ("message", "callstack")}
    return {name: _cut_lines(text) for name, text in texts.items() if isinstance(text, str)}


def _cut_lines(text: str) -> str:
    return "\n".join(line[:MAX_TEXT] for line in text.splitlines())


def _short(value: Any) -> Any:
    return value[:MAX_WORDS] if isinstance(value, str) else value if isinstance(value, int) else None


def _seen(row: Any) -> tuple[int, bool, str]:
    match row:
        case [int(rank), bool(trying), str(words)] if not isinstance(rank, bool):
            return number(rank, "ranks"), trying, words[:MAX_WORDS]
    raise ProtocolError("lagging: ranks is not a list of ranks and what they do")


def _stopped(row: list[int]) -> tuple[int, int]:
    match row:
        case [rank, pid]:
            return number(rank, "stopped"), number(pid, "stopped", 1)
    raise ProtocolError("stopped is not a list of ranks and pids")


def _unstarted(node: int, report: messages.WorkerUnstarted, clock: Clock) -> Event:
    rank, code = number(report.local_rank, "local_rank"), number(report.errno, "errno")
    return events.WorkerUnstarted(node, rank, _cut(report.stage), code, _cut(report.text))


_EVENTS: Mapping[type, Callable[[int, Any, Clock], Event | None]] = {
    messages.Hello: _hello,
    messages.Pong: lambda node, it, clock: None,
    messages.AgentLeaving: lambda node, it, clock: events.AgentLeaving(
        node, number(it.signal, "signal"), it.orphaned, _cut(it.damage)
    ),
    messages.Interrupted: lambda node, it, clock: events.Interrupted(_signal(it.signal), node),
    messages.Noticed: lambda node, it, clock: events.Noticed(node, number(it.signal, "signal")),
    messages.PortHeld: lambda node, it, clock: events.PortHeld(node, number(it.port, "port")),
    messages.PortRefused: lambda node, it, clock: events.PortRefused(
        node, _cut(it.error), _mappings(it.owners, "owners")
    ),
    messages.PortUsurped: lambda node, it, clock: events.PortUsurped(node, _mappings(it.owners, "owners")),
    messages.Reaped: lambda node, it, clock: events.Reaped(node, number(it.processes, "processes")),
    messages.OrphansKilled: lambda node, it, clock: events.OrphansKilled(
        node, number(it.processes, "processes")
    ),
    messages.RouteFound: _route,
    messages.RouteFailed: lambda node, it, clock: events.RouteFailed(node, _cut(it.asked), _cut(it.error)),
    messages.WorkerStarted: lambda node, it, clock: events.WorkerStarted(
        node, number(it.local_rank, "local_rank"), number(it.pid, "pid"), _cut(it.cpus)
    ),
    messages.WorkerUnstarted: _unstarted,
    messages.WorkerExited: _exited,
    messages.RanksJoined: lambda node, it, clock: events.RanksJoined(
        node, _numbers(it.local_ranks, "local_ranks")
    ),
    messages.RanksLag: lambda node, it, clock: events.RanksLag(node, tuple(map(_seen, it.ranks))),
    messages.RanksStalled: lambda node, it, clock: events.RanksStalled(
        node, _numbers(it.local_ranks, "local_ranks"), tuple(map(_stopped, it.stopped))
    ),
    messages.StackDumped: lambda node, it, clock: events.StackDumped(
        node, number(it.local_rank, "local_rank"), _cut(it.text, MAX_STACK)
    ),
    messages.OutputLost: lambda node, it, clock: events.OutputLost(
        node, number(it.local_rank, "local_rank"), number(it.stream, "stream"), number(it.bytes, "bytes")
    ),
    messages.Swept: lambda node, it, clock: events.Swept(
        node, number(it.generation, "generation"), number(it.leftovers, "leftovers")
    ),
    messages.Stuck: lambda node, it, clock: events.Stuck(node, _mappings(it.processes, "processes")),
}
