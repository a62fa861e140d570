"""Conversions of agents' reports to events of the supervisor, and of a run's events to lines of JSON.

An invalid report ends the link. The lines contain all data that `step` needs for a replay.
`distlaunch.runs.replay` reads them.
"""

import signal
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from distlaunch import __version__
from distlaunch.agent import messages
from distlaunch.agent.wire import MAX_OUTPUT, PROTOCOL, ProtocolError
from distlaunch.contract import INTERFACE_VARIABLES
from distlaunch.job.spec import MAX_GPUS, EnvValue, JobSpec
from distlaunch.job.text import REDACTED, is_hidden, is_secret, masked, redacted
from distlaunch.plan.placement import Facts
from distlaunch.supervisor import events
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import Use

MAX_SIGNAL = 127
MAX_WORDS = 200
"""Maximum characters of a name or phrase from a node."""
MAX_TEXT = 4096
"""Maximum characters of a line from a node that is shown to the user."""
MAX_STACK = 1 << 16
MAX_LAST_OUTPUT = 1 << 14
MAX_SECONDS = 1e12
MAX_NUMBER = 1 << 53
OF_FILES = (messages.FileBegins, messages.FilesEnd)
"""Reports about files that a node sends."""


def number(value: int, name: str, least: int = -MAX_NUMBER, most: int = MAX_NUMBER) -> int:
    """Check and return a number that a node sent. Raises `ProtocolError` if it is out of range."""
    if not least <= value <= most:
        raise ProtocolError(f"{name} is out of range: {value}")
    return value


def seconds(value: float, name: str) -> float:
    """Check and return a time in seconds that a node sent. Raises `ProtocolError` if it is out of range."""
    if not 0 <= value <= MAX_SECONDS:
        raise ProtocolError(f"{name} is out of range")
    return float(value)


def event_of(report: Any, clock: Callable[[float], float]) -> Event | None:
    """Convert a report to an event, or to None if it only answers a heartbeat.

    The types in a report were checked earlier, but its values are not trusted. Long strings are truncated,
    and numbers must be in range. `clock` converts monotonic times of the node to those of the controller.
    Raises `ProtocolError`.
    """
    kind = type(report)
    if kind is messages.Pong:
        return None
    if kind is messages.Hello:
        return up_of(report)
    if kind in _ANSWERS:
        raise ProtocolError(f"unexpected message: {kind.__name__}")
    fields = {
        name: _FIELD_CHECKS.get((kind, name), _trusted)(value, name)
        for name, value in report._asdict().items()
    }
    if "at" in fields:
        fields["at"] = clock(fields["at"])
    return kind(**fields)  # type: ignore[no-any-return]


def uses_of(report: messages.Usage) -> dict[int, Use]:
    """Return the resource use of each worker, keyed by local rank. Raises `ProtocolError`.

    The controller passes the result to observers without an event, since no decision depends on it.
    """
    return dict(map(_use, report.ranks))


def _use(row: Any) -> tuple[int, Use]:
    """Convert a row of `Usage.ranks`: local rank, then the fields of `Use`."""
    match row:
        case [int(rank), int() | float() as cpu, int(memory), int() | None as gpu, int() | None as there]:
            shares = (value if value is None else number(value, "gpu", 0) for value in (gpu, there))
            return number(rank, "ranks"), Use(seconds(cpu, "cpu"), number(memory, "memory", 0), *shares)
    raise ProtocolError("usage: ranks is not a list of ranks and what they use")


def up_of(report: messages.Hello) -> events.AgentUp:
    """Return the first report of an agent as an event. Raises `ProtocolError`."""
    if report.protocol != PROTOCOL:
        raise ProtocolError(f"the agent speaks protocol {report.protocol}, not {PROTOCOL}")
    gpus = number(report.gpus, "gpus", 0, MAX_GPUS)
    procs = report.procs if report.procs is None else number(report.procs, "procs", 1)
    texts = (report.python, report.logs, report.hostname, report.role, report.machine)
    python, logs, hostname, *known = (_trusted(text, "") for text in texts)
    return events.AgentUp(report.node, Facts(python, gpus, procs, logs, *known), hostname)


def _trusted(value: Any, name: str) -> Any:
    """Return the value of a field for an event. Refuse numbers out of range, and truncate long strings."""
    match value:
        case bool() | None:
            return value
        case int():
            return number(value, name, 0)
        case str():
            return value[:MAX_TEXT]
        case tuple():
            return tuple(_trusted(inner, name) for inner in value)
    return value


def _status(value: int, name: str) -> int:
    return number(value, name, -MAX_SIGNAL, 255)


def _signal(value: int, name: str) -> int:
    if value not in {*signal.Signals}:
        raise ProtocolError(f"{name} is out of range: {value}")
    return value


def _objects(values: tuple[Any, ...], name: str) -> tuple[Mapping[str, Any], ...]:
    if not all(isinstance(value, dict) for value in values):
        raise ProtocolError(f"{name} is not a list of objects")
    return tuple(_cut(value, 1, MAX_WORDS) for value in values)


def _error_record(record: Any, name: str) -> Mapping[str, str] | None:
    """Return the known texts, if they are strings. Truncate long lines, since all are shown."""
    if not isinstance(record, dict):
        return None
    texts = {name: record.get(name) for name in ("message", "callstack", "timestamp")}
    return {name: _cut_lines(text) for name, text in texts.items() if isinstance(text, str)}


def _cut_lines(text: str) -> str:
    return "\n".join(line[:MAX_TEXT] for line in text.splitlines())


def _facts(value: Any, name: str) -> Mapping[str, Any] | None:
    """Return the facts about a node, with long strings truncated. The rules that use them accept any type."""
    return _cut(value) if isinstance(value, dict) else None


def _cut(value: Any, depth: int = 4, most: int = MAX_TEXT) -> Any:
    if isinstance(value, dict) and depth:
        return {key[:MAX_WORDS]: _cut(inner, depth - 1, most) for key, inner in value.items()}
    return value[:most] if isinstance(value, str) else value if isinstance(value, int) else None


def _seen(rows: tuple[tuple[int, bool, str], ...], name: str) -> tuple[tuple[int, bool, str], ...]:
    """Check the rows of `RanksLag`: local rank, whether the rank is trying to join, and its activity."""
    return tuple((number(rank, name), tries, words[:MAX_WORDS]) for rank, tries, words in rows)


def _stopped(rows: tuple[tuple[int, int], ...], name: str) -> tuple[tuple[int, int], ...]:
    """Check the rows of `RanksStalled`: local rank, and the PID of the process that a signal has stopped."""
    return tuple((number(rank, name), number(pid, name, 1)) for rank, pid in rows)


def _ascending(values: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Return indices, which must be ascending, so that a node can't request unlimited amounts of data."""
    for before, value in zip((-1, *values), values, strict=False):
        number(value, name, before + 1)
    return values


_FIELD_CHECKS: Mapping[tuple[type, str], Callable[[Any, str], Any]] = {
    (messages.Interrupted, "signum"): _signal,
    (messages.PortRefused, "owners"): _objects,
    (messages.PortUsurped, "owners"): _objects,
    (messages.RanksLag, "seen"): _seen,
    (messages.RanksStalled, "stopped"): _stopped,
    (messages.RouteFound, "seen"): _facts,
    (messages.SetupPrinted, "text"): lambda value, name: value[:MAX_OUTPUT],
    (messages.StackDumped, "text"): lambda value, name: _cut_lines(value[:MAX_STACK]),
    (messages.Stuck, "processes"): _objects,
    (messages.TreeLacks, "contents"): _ascending,
    (messages.WorkerExited, "at"): seconds,
    (messages.WorkerExited, "error_record"): _error_record,
    (messages.WorkerExited, "status"): _status,
    (messages.WorkerExited, "went_on"): lambda value, name: tuple(seconds(each, name) for each in value),
    (messages.WorkerExited, "words"): lambda value, name: value[:MAX_LAST_OUTPUT],
}
"""Conversions of fields for which `_trusted` isn't enough."""
_ANSWERS = frozenset({messages.Usage, messages.Evidence, messages.Listening, messages.Dialed, *OF_FILES})
"""Reports that are not events, because no run requests them or because they don't affect decisions."""


# The history of a run


VERSION = 11
"""Version of events.jsonl. It changes whenever the format of a line changes incompatibly."""
BEGAN, MESSAGE = "Began", "Message"
"""Names of the first line and of message lines. Other lines are events, named after their types."""


def beginning(spec: JobSpec, chance: float) -> dict[str, Any]:
    """Return the fields of the first line."""
    plain = _plain(without_secrets(spec), of_spec=True)
    return {"version": VERSION, "distlaunch": __version__, "chance": chance, "spec": plain}


def fields_of(event: Event) -> dict[str, Any]:
    """Return the fields of the line for an event."""
    return _plain(event)  # type: ignore[no-any-return]


def without_secrets(spec: JobSpec) -> JobSpec:
    """Return `spec` without values that may be secrets or that come from the caller's environment."""
    pools = (spec.nodes, spec.membership.spares)
    nodes, spares = (tuple(node._replace(env=_shown_env(node.env)) for node in pool) for pool in pools)
    program = spec.program._replace(env=_shown_env(spec.program.env))
    places = {path: place._replace(typed="") for path, place in spec.places.items()}  # the value of a --set
    membership = spec.membership._replace(spares=spares)
    return spec._replace(nodes=nodes, program=program, membership=membership, places=places)


def _shown_env(env: Mapping[str, EnvValue]) -> dict[str, EnvValue]:
    """Return `env`, with each hidden value replaced by "" and marked as inherited."""
    return {
        name: EnvValue("", inherited=True) if _is_hidden(name, value) else value
        for name, value in env.items()
    }


def _is_hidden(name: str, value: EnvValue) -> bool:
    inherited = value.inherited and name not in INTERFACE_VARIABLES
    return inherited or is_hidden(name, value.text)


def _plain(value: Any, of_spec: bool = False) -> Any:
    """Convert `value` to JSON types. If `of_spec`, leave out fields with default values, and hide secrets."""
    if hasattr(value, "_asdict"):
        defaults = value._field_defaults if of_spec else {}
        fields = value._asdict().items()
        # The name is kept because it distinguishes the kinds of transports.
        value = {k: each for k, each in fields if k not in defaults or defaults[k] != each or k == "name"}
    if isinstance(value, Mapping):
        plain = {str(name): _plain(inner, of_spec) for name, inner in value.items()}
        hidden = {name for name in plain if of_spec and isinstance(plain[name], str) and is_secret(name)}
        return {**plain, **dict.fromkeys(hidden, REDACTED)}
    if isinstance(value, tuple | list | frozenset):
        words = list(value)
        if of_spec and all(type(inner) is str for inner in words):
            words = redacted(words)
        return [_plain(inner, of_spec) for inner in words]
    if isinstance(value, Enum):
        return value.value
    return masked(value) if of_spec and isinstance(value, str) else value
