"""Replays a run from its events.jsonl, state by state. `scripts/replay` prints the states."""

import functools
import json
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

from distlaunch.errors import DistlaunchError, reason
from distlaunch.job.spec import JobSpec
from distlaunch.observers.run_directory import EVENTS, MAX_S, fd_of
from distlaunch.supervisor.actions import Action, ShowMessage
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.history import BEGAN, MESSAGE, VERSION
from distlaunch.supervisor.state import State
from distlaunch.supervisor.step import HANDLERS, begin, step
from distlaunch.transports import load
from distlaunch.transports.transport import Transport

NO_START = f"line 1: not the start of a history of version {VERSION}"
_KINDS: Mapping[Any, type] = {kind.__name__: kind for kind in HANDLERS}


class HistoryError(DistlaunchError):
    """The input is not a run's history, or has an unsupported version."""


class Moment(NamedTuple):
    """A step of a run; `event` is None for its beginning."""

    at: float
    event: Event | None
    state: State
    actions: tuple[Action, ...]


class Replay:
    """The replay of a run through `step`, one line of its events.jsonl at a time."""

    def __init__(self) -> None:
        self.state: State | None = None
        """The state after the last line; None before the first."""
        self._count = 0

    def take(self, line: Mapping[str, Any]) -> Moment | None:
        """Process the next line. Return its step, or None for a line with a message.

        Raises `HistoryError` with the line number.
        """
        self._count += 1
        kind = _KINDS.get(line.get("event"))
        if self.state is None and (line.get("event") != BEGAN or line.get("version") != VERSION):
            raise HistoryError(NO_START)
        if self.state and kind is None and line.get("event") != MESSAGE:
            raise HistoryError(f"line {self._count}: unknown event: {line.get('event')!r}")
        try:
            return self._step(line, kind)
        except Exception as error:  # of any kind: the line may be damaged, or altered
            what = f"{line['event']}: {type(error).__name__}: {error}"
            raise HistoryError(f"line {self._count}: {what}") from error

    def _step(self, line: Mapping[str, Any], kind: type | None) -> Moment | None:
        """Process a line. `kind` is the type of its event, or None for a message and for the first line."""
        at, event = line["t"], None
        if self.state is None:
            self.state, actions = begin(typed(JobSpec, line["spec"]), at, typed(float, line["chance"]))
        elif kind is None:
            typed(ShowMessage, {"level": line["level"], "text": line["text"]})
            return None
        else:
            fields = {name: value for name, value in line.items() if name not in ("event", "t", "time")}
            event = typed(kind, fields)
            self.state, actions = step(self.state, event, at)
        return Moment(at, event, self.state, actions)


def replay(lines: Iterable[Mapping[str, Any]]) -> Iterator[Moment]:
    """Replay all lines of a run. Raises `HistoryError`."""
    run = Replay()
    for line in lines:
        if moment := run.take(line):
            yield moment
    if run.state is None:
        raise HistoryError(NO_START)


def lines_in(place: Path) -> list[dict[str, Any]]:
    """Read an events.jsonl, given by its path or the run directory. Raises `HistoryError`."""
    folder, name = (place, EVENTS) if place.is_dir() else (place.parent, place.name)
    try:
        with open(fd_of(str(folder), name), errors="replace") as file:
            return list(loaded(file.read()))
    except OSError as error:
        raise HistoryError(reason(error)) from None


def line_of(text: str | bytes) -> dict[str, Any]:
    """Parse a line of an events.jsonl. Raises ValueError or RecursionError."""
    line = json.loads(text)
    if not isinstance(line, dict) or not isinstance(line.get("event"), str):
        raise ValueError("not an event")
    times = (line.get("t", 0), line.get("time", 0))
    if not all(isinstance(at, float | int) and 0 <= at < MAX_S for at in times):
        raise ValueError("not a time")
    return line


def loaded(text: str) -> Iterator[dict[str, Any]]:
    """Parse the lines of an events.jsonl; the last may be incomplete. Raises `HistoryError`."""
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            if line:
                yield line_of(line)
        except (ValueError, RecursionError):
            if number < len(lines):
                raise HistoryError(f"line {number}: not JSON") from None


def typed(kind: Any, value: Any) -> Any:
    """Convert a JSON value to an object of type `kind`. Raises TypeError or ValueError."""
    kind = load(value["name"]) if kind is Transport else kind
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return _one_of(inner, value)
    if kind is Any:
        return value
    if origin is typing.Literal:
        return inner[inner.index(value)]
    if origin in (tuple, frozenset):
        return _sequence(origin, inner, value)
    if origin is not None:  # a mapping, whose keys are strings in JSON
        return {typed(inner[0], inner[0](key)): typed(inner[1], each) for key, each in value.items()}
    return _plain_typed(kind, value)


def _plain_typed(kind: Any, value: Any) -> Any:
    if issubclass(kind, Enum):
        return kind(value)
    if hasattr(kind, "_fields"):
        hints = _hints(kind)
        return kind(**{name: typed(hints[name], inner) for name, inner in value.items()})
    if kind is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind, localns=vars(typing))  # an agent doesn't import typing


def _sequence(origin: Any, inner: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    if origin is frozenset or inner[-1] is Ellipsis:
        return origin(typed(inner[0], each) for each in value)
    return tuple(typed(each, part) for each, part in zip(inner, value, strict=True))


def _one_of(kinds: Iterable[Any], value: Any) -> Any:
    for kind in kinds:
        try:
            return typed(kind, value)
        except (TypeError, ValueError, AttributeError, KeyError):
            continue
    raise TypeError(f"{value!r} is not allowed here")


def retold(lines: Iterable[Mapping[str, Any]], moments: Iterable[Moment]) -> str:
    """Return the first message that differs from the recorded one; "" if none does."""
    recorded = [line["text"] for line in lines if line.get("event") == MESSAGE and not line.get("remark")]
    retold = [
        action.text for moment in moments for action in moment.actions if isinstance(action, ShowMessage)
    ]
    for then, now in zip_longest(recorded, retold):
        if then != now:
            return f"recorded: {then or 'nothing more'}\nreplayed: {now or 'nothing more'}"
    return ""
