"""Replays a run from its events.jsonl, state by state, with its output, and follows its progress.

`scripts/replay` prints the states.
"""

import functools
import json
import os
import time
import typing
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from heapq import merge
from io import FileIO
from itertools import zip_longest
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

from distlaunch.agent.wire import MAX_OUTPUT
from distlaunch.errors import DistlaunchError, reason
from distlaunch.job.spec import JobSpec
from distlaunch.observers.observer import Attempts, Observer, Printed
from distlaunch.observers.run_directory import (
    EVENTS,
    INDEX_RECORD,
    MAX_S,
    OUTPUT_INDEX,
    Entry,
    fd_of,
    index_entries,
)
from distlaunch.supervisor.actions import Action, ShowMessage
from distlaunch.supervisor.codec import BEGAN, MESSAGE, VERSION
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.state import State
from distlaunch.supervisor.step import HANDLERS, begin, step
from distlaunch.transports import load
from distlaunch.transports.transport import Transport

MAX_OPEN = 100
"""Maximum output files kept open at once."""
PIECE = 1 << 20
"""Bytes read at once."""
_KINDS: Mapping[Any, type] = {kind.__name__: kind for kind in HANDLERS}
Wanted = Callable[[Entry], bool]
_Piece = dict[str, Any] | Entry
"""A line of events.jsonl, or an entry of the output index."""


class HistoryError(DistlaunchError):
    """Input that isn't a run's history, or has an unsupported version."""


class Moment(NamedTuple):
    """A step of a run; `event` is None for the first step."""

    at: float
    event: Event | None
    state: State
    actions: tuple[Action, ...]


class Replay:
    """The replay of a run through `step`, one line of its events.jsonl at a time, for `observers`."""

    def __init__(self, *observers: Observer) -> None:
        self.state: State | None = None
        """The state after the last line; None before the first."""
        self.observers, self.attempts = observers, Attempts()
        self._count = 0

    def take(self, line: Mapping[str, Any]) -> Moment | None:
        """Process the next line, and pass it on. Return its step, or None for a line with a message.

        Raises `HistoryError` with the line number.
        """
        self._count += 1
        kind = _KINDS.get(line.get("event"))
        if self.state is None and line.get("event") != BEGAN:
            what = "line 1: the beginning of the run is missing"
            raise HistoryError(f"{what}; read the logs in the run directory")
        if self.state is None and line.get("version") != VERSION:
            by = f"version {line['distlaunch']}" if "distlaunch" in line else "another version"
            what = f"line 1: recorded by {by} of distlaunch, in a format that this version can't read"
            raise HistoryError(f"{what}; use that version, or read the logs in the run directory")
        if self.state and kind is None and line.get("event") != MESSAGE:
            raise HistoryError(f"line {self._count}: unknown event: {line.get('event')!r}")
        try:
            moment = self._step(line, kind)
        except Exception as error:  # of any kind, because the line may be damaged or altered
            what = f"{line['event']}: {type(error).__name__}: {error}"
            raise HistoryError(f"line {self._count}: {what}") from error
        began = moment and self.attempts.note(moment.state)
        for each in self.observers:
            if moment is None:
                each.message(ShowMessage(line["level"], line["text"]), line["t"])
            elif moment.event is None:
                each.began(moment.state.spec, moment.state.chance, moment.at)
            else:
                each.happened(moment.event, moment.state, moment.at)
            if moment and began:
                each.started(moment.state, moment.at)
        return moment

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


def replay(lines: Iterable[Mapping[str, Any]], *observers: Observer) -> Iterator[Moment]:
    """Replay all lines of a run for `observers`. Yields at least the first step. Raises `HistoryError`."""
    run = Replay(*observers)
    for line in lines:
        if moment := run.take(line):
            yield moment
    if run.state is None:
        raise HistoryError("contains no complete line")


def retold(lines: Iterable[Mapping[str, Any]], moments: Iterable[Moment]) -> str:
    """Describe the first message that differs from the recorded one; "" if none does."""
    recorded = [line["text"] for line in lines if line.get("event") == MESSAGE and not line.get("remark")]
    retold = [
        action.text for moment in moments for action in moment.actions if isinstance(action, ShowMessage)
    ]
    for then, now in zip_longest(recorded, retold):
        if then != now:
            return f"recorded: {then or 'nothing more'}\nreplayed: {now or 'nothing more'}"
    return ""


# The files


def lines_in(place: Path) -> list[dict[str, Any]]:
    """Read an events.jsonl, given by its path or its run directory. Raises `HistoryError`."""
    directory, name = (place, EVENTS) if place.is_dir() else (place.parent, place.name)
    try:
        with open(fd_of(str(directory), name), errors="replace") as file:
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
        hints = fields_of(kind)
        return kind(**{name: typed(hints[name], inner) for name, inner in value.items()})
    if kind is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


@functools.cache
def fields_of(kind: type) -> Mapping[str, Any]:
    """Return the types of a class's fields by name."""
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


# Another process's run


class _Tail:
    """A growing file, which may not exist yet; `rest` is the incomplete end of the bytes read so far."""

    def __init__(self, directory: str, name: str) -> None:
        self._place = (directory, name)
        self._file: FileIO | None = None
        self.rest = b""

    def fresh(self) -> bytes:
        """Read some new bytes. Return the `rest` followed by these, or b"" if there are no new bytes.

        The caller then sets `rest`.
        """
        try:
            self._file = self._file or FileIO(fd_of(*self._place))
            data = self._file.read(PIECE)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise DistlaunchError(f"{'/'.join(self._place)}: {reason(error)}") from None
        return self.rest + data if data else b""

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


class Playback:
    """The events and output of a run, passed to an observer in order. Must be closed.

    `wanted` selects pieces of output; others are not read.
    """

    def __init__(self, directory: str, observer: Observer, wanted: Wanted = lambda entry: True) -> None:
        self._directory, self._observer, self._wanted = directory, observer, wanted
        self._lines = _Tail(directory, EVENTS)
        self._entries = _Tail(directory, OUTPUT_INDEX)
        self._held_lines: list[dict[str, Any]] = []
        self._held_entries: list[Entry] = []
        self._early = deque[Entry]()
        """Entries of attempts that start at a later time, because the clock was set back."""
        self._replay = Replay(observer)
        self._open: dict[str, int] = {}
        self._begun = set[str]()
        self._moment = 0.0
        observer.moment = lambda: self._moment

    @property
    def state(self) -> State | None:
        """Return the state after the last event passed on; None before the first."""
        return self._replay.state

    @property
    def held_bytes(self) -> int:
        """Return the size of the output of attempts whose start has not been read."""
        return sum(entry.size for entry in self._early)

    def catch_up(self) -> None:
        """Pass on all new events and output. Wake the observer if it is due. Raises `HistoryError`."""
        while self._turn():
            pass
        if self._observer.wake_at is not None and self._observer.wake_at <= time.monotonic():
            self._observer.woken()

    def _turn(self) -> bool:
        """Pass on what can be read now. Return whether there may be more."""
        try:
            lines, entries = self._come()
            both: list[Iterable[_Piece]] = [lines, entries]
            for piece in merge(*both, key=_time):
                if not isinstance(piece, Entry):
                    self._replay.take(piece)
                    while self._early and self._tell_output(self._early[0]):
                        self._early.popleft()
                elif not self._tell_output(piece):
                    self._early.append(piece)
        except HistoryError as error:
            raise HistoryError(f"{self._directory}/{EVENTS}: {error}") from None
        return bool(lines or entries or self._held_lines or self._held_entries)

    def _come(self) -> tuple[list[dict[str, Any]], list[Entry]]:
        """Return lines and entries that no unread data can precede. Hold back the others.

        A line is held back until earlier output has been read, and an entry until earlier events have.
        """
        lines, held = [*self._held_lines, *self._fresh_lines()], self._held_entries
        fresh = self._fresh_entries()
        read_until = _time(lines[-1]) if lines else 0.0
        known = bisect_right(fresh, read_until, key=_time)
        ready = bisect_right(lines, _time(fresh[-1]), key=_time) if fresh else len(lines)
        self._held_lines, self._held_entries = lines[ready:], fresh[known:]
        return lines[:ready], held + fresh[:known]

    def _fresh_lines(self) -> list[dict[str, Any]]:
        """Parse new complete lines."""
        lines: list[dict[str, Any]] = []
        while data := self._lines.fresh():
            *whole, self._lines.rest = data.split(b"\n")
            try:
                lines += map(line_of, whole)
            except (ValueError, RecursionError) as error:
                raise HistoryError(f"a line is damaged: {error}") from None
        return lines

    def _fresh_entries(self) -> list[Entry]:
        data = self._entries.fresh()
        if data:
            self._entries.rest = data[len(data) // INDEX_RECORD.size * INDEX_RECORD.size :]
        return index_entries(data)

    def skip(self) -> None:
        """Catch up without passing anything on. Raises `HistoryError`."""
        wanted, self._wanted = self._wanted, lambda entry: False
        self._replay.observers = ()
        while self._turn():
            pass
        self._wanted, self._replay.observers = wanted, (self._observer,)
        if self.state:
            self._observer.began(self.state.spec, self.state.chance, self.state.began_at)

    def close(self) -> None:
        """Close all files."""
        self._lines.close()
        self._entries.close()
        while self._open:
            os.close(self._open.popitem()[1])

    def _tell_output(self, entry: Entry) -> bool:
        """Pass on output. Return whether its attempt is known."""
        rank, stream, attempt = entry.rank, entry.stream, self._replay.attempts.of(entry.attempt)
        goes_to = attempt and attempt.destinations.get((rank, stream))
        if goes_to and goes_to.file and self._wanted(entry):
            self._moment = entry.time
            data = self._line_before(goes_to.file, entry.offset)
            data += self._read(goes_to.file, entry.offset, entry.size)
            self._observer.printed(Printed(rank, stream, data, entry.attempt, goes_to))
        return attempt is not None

    def _line_before(self, name: str, offset: int) -> bytes:
        """Return the beginning of the line at the offset of a file's first selected piece, b"" for others."""
        if name in self._begun:
            return b""
        self._begun.add(name)
        start = max(0, offset - MAX_OUTPUT)
        return self._read(name, start, offset - start).rpartition(b"\n")[2]

    def _read(self, name: str, offset: int, size: int) -> bytes:
        """Read a piece of a file, which stays open; b"" if the file or the piece is missing."""
        if name not in self._open:
            if len(self._open) >= MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                self._open[name] = fd_of(self._directory, name)
            except OSError:
                return b""  # the file was removed
        try:
            return os.pread(self._open[name], min(size, MAX_OUTPUT), offset) if offset < 1 << 63 else b""
        except OSError as error:
            raise DistlaunchError(f"{self._directory}/{name}: {reason(error)}") from None


def _time(piece: _Piece) -> float:
    return piece.time if isinstance(piece, Entry) else piece.get("time") or 0.0
