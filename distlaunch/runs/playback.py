"""Replays another process's run to an observer from the run directory: its past, and then its progress."""

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from heapq import merge
from io import FileIO
from typing import Any

from distlaunch.agent.wire import MAX_OUTPUT
from distlaunch.errors import DistlaunchError, reason
from distlaunch.observers.observer import Attempts, Observer, Printed
from distlaunch.observers.run_directory import EVENTS, INDEX_RECORD, OUTPUT_INDEX, Entry, fd_of, index_entries
from distlaunch.runs.replay import HistoryError, Moment, Replay, line_of
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.state import State

MAX_OPEN = 100
"""Maximum output files kept open at once."""
PIECE = 1 << 20
"""Bytes read at once."""
Wanted = Callable[[Entry], bool]
_Piece = dict[str, Any] | Entry
"""A line of events.jsonl, or an entry of the output index."""


class _Tail:
    """A growing file, which may not exist yet; `rest` is the incomplete end of the bytes read so far."""

    def __init__(self, folder: str, name: str) -> None:
        self._place = (folder, name)
        self._file: FileIO | None = None
        self.rest = b""

    def fresh(self) -> bytes:
        """Read some new bytes, and return the `rest` followed by them; nothing if there are none.

        The caller then sets `rest`.
        """
        if self._file is None:
            try:
                self._file = FileIO(fd_of(*self._place))
            except FileNotFoundError:
                return b""
            except OSError as error:
                raise DistlaunchError(f"{'/'.join(self._place)}: {reason(error)}") from None
        data = self._file.read(PIECE)
        return self.rest + data if data else b""

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


class Narrator:
    """Replays the lines of an events.jsonl, and passes each step on to observers."""

    def __init__(self, *observers: Observer) -> None:
        self.observers, self._replay = observers, Replay()
        self.attempts = Attempts()

    @property
    def state(self) -> State | None:
        """Return the state after the last event passed on; None before the first."""
        return self._replay.state

    def tell(self, line: Mapping[str, Any]) -> Moment | None:
        """Pass on the next line. Return its step, or None for a line with a message.

        Raises `HistoryError` with the line number.
        """
        moment = self._replay.take(line)
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


class Playback:
    """The events and output of a run, passed to an observer in their order. Must be closed.

    `wanted` selects pieces of output; others are not read.
    """

    def __init__(self, folder: str, observer: Observer, wanted: Wanted = lambda entry: True) -> None:
        self._folder, self._observer, self._wanted = folder, observer, wanted
        self._lines = _Tail(folder, EVENTS)
        self._entries = _Tail(folder, OUTPUT_INDEX)
        self._held_lines: list[dict[str, Any]] = []
        self._held_entries: list[Entry] = []
        self._narrator = Narrator(observer)
        self._open: dict[str, int] = {}
        self._moment = 0.0
        observer.moment = lambda: self._moment

    @property
    def state(self) -> State | None:
        """Return the state after the last event passed on; None before the first."""
        return self._narrator.state

    def catch_up(self) -> None:
        """Pass on all new events and output. Wake the observer if that is due. Raises `HistoryError`."""
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
                if isinstance(piece, Entry):
                    self._tell_output(piece)
                else:
                    self._narrator.tell(piece)
        except HistoryError as error:
            raise HistoryError(f"{self._folder}/{EVENTS}: {error}") from None
        return bool(lines or entries or self._held_lines or self._held_entries)

    def _come(self) -> tuple[list[dict[str, Any]], list[Entry]]:
        """Return lines and entries that no unread data can precede. Hold back the others.

        A line waits until the output before it has been read, an entry until the events before it have.
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
        whole = len(data) // INDEX_RECORD.size * INDEX_RECORD.size
        if data:
            self._entries.rest = data[whole:]
        return index_entries(data[:whole])

    def skip(self) -> None:
        """Catch up without passing anything on. Raises `HistoryError`."""
        observer, self._observer = self._observer, Observer()
        wanted, self._wanted = self._wanted, lambda entry: False
        self._narrator.observers = ()
        self.catch_up()
        self._observer, self._wanted, self._narrator.observers = observer, wanted, (observer,)
        if self.state:
            observer.began(self.state.spec, self.state.chance, self.state.began_at)

    def close(self) -> None:
        """Close all files."""
        self._lines.close()
        self._entries.close()
        while self._open:
            os.close(self._open.popitem()[1])

    def _tell_output(self, entry: Entry) -> None:
        rank, stream, attempt = entry.rank, entry.stream, self._narrator.attempts.of(entry.attempt)
        goes_to = attempt and attempt.destinations.get((rank, stream))
        if goes_to and goes_to.file and self._wanted(entry):
            self._moment = entry.time
            data = self._read(goes_to.file, entry.offset, entry.size)
            self._observer.printed(Printed(rank, stream, data, entry.attempt, goes_to))

    def _read(self, name: str, offset: int, size: int) -> bytes:
        """Read a piece of a file, which stays open; b"" if the file or the piece is missing."""
        if name not in self._open:
            if len(self._open) >= MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                self._open[name] = fd_of(self._folder, name)
            except OSError:
                return b""  # it was removed
        return os.pread(self._open[name], min(size, MAX_OUTPUT), offset) if offset < 1 << 63 else b""


def _time(piece: _Piece) -> float:
    return piece.time if isinstance(piece, Entry) else piece.get("time") or 0.0
