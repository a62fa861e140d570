"""Turns an agent's reports into events; what does not have the documented form ends the link."""

from collections.abc import Callable, Mapping
from typing import Any

from distlaunch.agent.wire import PROTOCOL, Message, ProtocolError
from distlaunch.plan.layout import Facts
from distlaunch.supervisor import events
from distlaunch.supervisor.events import Event

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


class _Fields:
    """Reads a report's fields, checking their types: the node is not trusted."""

    def __init__(self, message: Message) -> None:
        self._message = message

    def _get(self, name: str, kind: type | tuple[type, ...]) -> Any:
        value = self._message.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ProtocolError(f"a report has no proper {name}: {self._message['op']}")
        return value

    def number(self, name: str) -> int:
        value: int = self._get(name, int)
        if abs(value) > MAX_NUMBER:
            raise ProtocolError(f"{name} is out of range")
        return value

    def number_within(self, name: str, least: int, most: int) -> int:
        value = self.number(name)
        if not least <= value <= most:
            raise ProtocolError(f"{name} is out of range: {value}")
        return value

    def seconds(self, name: str) -> float:
        value = self._get(name, (int, float))
        if not 0 <= value <= MAX_SECONDS:
            raise ProtocolError(f"{name} is out of range")
        return float(value)

    def text(self, name: str, most: int = MAX_TEXT) -> str:
        value: str = self._get(name, str)
        return value[:most]

    def optional_text(self, name: str) -> str | None:
        return None if self._message.get(name) is None else self.text(name)

    def numbers(self, name: str) -> tuple[int, ...]:
        values = self._get(name, list)
        if not all(isinstance(value, int) for value in values):
            raise ProtocolError(f"{name} is not a list of numbers")
        return tuple(values)

    def mappings(self, name: str) -> tuple[Mapping[str, Any], ...]:
        values = self._get(name, list)
        if not all(isinstance(value, dict) for value in values):
            raise ProtocolError(f"{name} is not a list of objects")
        return tuple({key[:MAX_WORDS]: _short(inner) for key, inner in value.items()} for value in values)

    def items(self, name: str, kind: type) -> tuple[tuple[str, Any], ...]:
        values = self._get(name, dict)
        if not all(isinstance(value, kind) for value in values.values()):
            raise ProtocolError(f"{name} is not an object of such values")
        return tuple((key[:MAX_WORDS], _short(value)) for key, value in values.items())

    def rows(self, name: str) -> tuple[Any, ...]:
        return tuple(self._get(name, list))

    def anything(self, name: str) -> Any:
        return self._message.get(name)


def node_time(message: Message) -> float | None:
    """The node's monotonic time in a report, in seconds, if it has one. Raises `ProtocolError`."""
    return _Fields(message).seconds("t") if "t" in message else None


def event_of(node: int, message: Message, clock: Clock) -> Event | None:
    """The event that a report stands for, or None for one that is only a sign of life.

    Raises `ProtocolError` when the report is not as `distlaunch.agent.wire` documents it.
    """
    make = _EVENTS.get(message["op"])
    if make is None:
        raise ProtocolError(f"unknown report {message['op'][:40]!r}")
    return make(node, _Fields(message), clock)


def _hello(node: int, fields: _Fields, clock: Clock) -> Event:
    if fields.number("protocol") != PROTOCOL:
        raise ProtocolError(f"the agent speaks protocol {fields.number('protocol')}, not {PROTOCOL}")
    return events.AgentUp(
        node, Facts(fields.text("python"), fields.number_within("gpus", 0, MAX_GPUS)), fields.text("hostname")
    )


def _route(node: int, fields: _Fields, clock: Clock) -> Event:
    if fields.anything("error"):
        return events.RouteFailed(node, fields.text("error"))
    return events.RouteFound(
        node,
        fields.text("address"),
        fields.optional_text("interface"),
        fields.optional_text("source"),
        fields.items("interfaces", bool),
        fields.items("named", str),
    )


def _exited(node: int, fields: _Fields, clock: Clock) -> Event:
    return events.WorkerExited(
        node,
        fields.number("local_rank"),
        fields.number_within("status", -MAX_SIGNAL, 255),
        clock(fields.seconds("t")),
        _error_record(fields.anything("error_record")),
        fields.number("oom_kills"),
        fields.numbers("shm"),
        fields.text("words", MAX_LAST_WORDS),
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


def _lagging(node: int, fields: _Fields, clock: Clock) -> Event:
    return events.RanksLag(node, tuple(map(_seen, fields.rows("ranks"))))


def _seen(row: Any) -> tuple[int, bool, str]:
    match row:
        case [int(rank), bool(trying), str(words)]:
            return rank, trying, words[:MAX_WORDS]
    raise ProtocolError("a report has no proper ranks: lagging")


def _unstarted(node: int, fields: _Fields, clock: Clock) -> Event:
    return events.WorkerUnstarted(
        node, fields.number("local_rank"), fields.text("stage"), fields.number("errno"), fields.text("text")
    )


_EVENTS: Mapping[str, Callable[[int, _Fields, Clock], Event | None]] = {
    "hello": _hello,
    "pong": lambda node, fields, clock: None,
    "leaving": lambda node, fields, clock: events.AgentLeaving(node, fields.number("signal")),
    "held": lambda node, fields, clock: events.PortHeld(node, fields.number("port")),
    "unheld": lambda node, fields, clock: events.PortRefused(
        node, fields.text("error"), fields.mappings("owners")
    ),
    "usurped": lambda node, fields, clock: events.PortUsurped(node, fields.mappings("owners")),
    "reaped": lambda node, fields, clock: events.Reaped(node, fields.number("processes")),
    "orphans": lambda node, fields, clock: events.OrphansKilled(node, fields.number("processes")),
    "route": _route,
    "started": lambda node, fields, clock: events.WorkerStarted(
        node, fields.number("local_rank"), fields.number("pid"), fields.optional_text("cpus")
    ),
    "unstarted": _unstarted,
    "exited": _exited,
    "joined": lambda node, fields, clock: events.RanksJoined(node, fields.numbers("local_ranks")),
    "lagging": _lagging,
    "stalled": lambda node, fields, clock: events.RanksStalled(node, fields.numbers("local_ranks")),
    "stack": lambda node, fields, clock: events.StackDumped(
        node, fields.number("local_rank"), fields.text("text", MAX_STACK)
    ),
    "dropped": lambda node, fields, clock: events.OutputLost(
        node, fields.number("local_rank"), fields.number("stream"), fields.number("bytes")
    ),
    "swept": lambda node, fields, clock: events.Swept(
        node, fields.number("generation"), fields.number("leftovers")
    ),
    "stuck": lambda node, fields, clock: events.Stuck(node, fields.mappings("processes")),
}
