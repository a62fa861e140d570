"""Tells a run to an observer as if it watched: from its folder, up to now and then as it goes on."""

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

from distlaunch.follow.tails import Entries, Lines
from distlaunch.observers.observer import Generations, Observer, Printed
from distlaunch.observers.run_folder import EVENTS, Entry
from distlaunch.replay.history import NOTICE
from distlaunch.replay.lives import HistoryError, beginning_in, happened_in
from distlaunch.state.actions import Notice
from distlaunch.state.job import State
from distlaunch.supervisor.step import begin, step

MAX_OPEN = 100
"""Files of ranks kept open at once."""
Wanted = Callable[[Entry], bool]


class Retelling:
    """A run's events and output, told in their order; call `close` in the end.

    `wanted` chooses pieces of output; the others are not read.
    """

    def __init__(self, folder: str, observer: Observer, wanted: Wanted = lambda entry: True) -> None:
        self._folder, self._observer, self._wanted = folder, observer, wanted
        self._lines, self._entries = Lines(os.path.join(folder, EVENTS)), Entries(folder)
        self._held_lines: list[dict[str, Any]] = []
        self._held_entries: list[Entry] = []
        self._count = 0
        self._generations = Generations()
        self._open: dict[str, int] = {}
        self.state: State | None = None
        self.moment = 0.0
        """When the output that is being told came, in seconds since the epoch."""

    def turn(self) -> bool:
        """Tell what has come since the last turn; whether anything has. Raises `HistoryError`."""
        try:
            lines, entries = self._come()
            for piece in _merged(lines, entries):
                self._tell(piece)
        except HistoryError as error:
            raise HistoryError(f"{self._folder}/{EVENTS}: {error}") from None
        return bool(lines or entries or self._held_lines or self._held_entries)

    def _come(self) -> tuple[list[dict[str, Any]], list[Entry]]:
        """Lines and entries that nothing still to come belongs before; the others are held back.

        A line waits until the output before it has been read, an entry until the events before it have.
        """
        lines, held = [*self._held_lines, *self._lines.fresh()], self._held_entries
        fresh = self._entries.fresh()
        read_until = _time(lines[-1]) if lines else 0.0
        known = bisect_right(fresh, read_until, key=lambda entry: entry.time)
        ready = bisect_right(lines, fresh[-1].time, key=_time) if fresh else len(lines)
        self._held_lines, self._held_entries = lines[ready:], fresh[known:]
        return lines[:ready], held + fresh[:known]

    def skip(self) -> None:
        """Learn what has happened up to now without telling it. Raises `HistoryError`."""
        observer, self._observer = self._observer, Observer()
        wanted, self._wanted = self._wanted, lambda entry: False
        while self.turn():
            pass
        self._observer, self._wanted = observer, wanted
        if self.state:
            observer.began(self.state.spec, self.state.chance, self.state.began_at)

    def wake(self) -> None:
        """Wake the observer if it is time."""
        if self._observer.wake_at is not None and self._observer.wake_at <= time.monotonic():
            self._observer.woken()

    def close(self) -> None:
        """Let all files go."""
        self._lines.close()
        self._entries.close()
        while self._open:
            os.close(self._open.popitem()[1])

    def _tell(self, piece: dict[str, Any] | Entry) -> None:
        if isinstance(piece, Entry):
            self._tell_output(piece)
        else:
            self._count += 1
            self._tell_line(piece)

    def _tell_line(self, line: dict[str, Any]) -> None:
        if self._count == 1:
            spec = beginning_in(line)
            self.state, _ = begin(spec, line["t"], line["chance"])
            self._observer.began(spec, line["chance"], line["t"])
        elif line.get("event") == NOTICE:
            self._observer.told(Notice(line["level"], line["text"]), line["t"])
        else:
            self._tell_event(line)

    def _tell_event(self, line: dict[str, Any]) -> None:
        assert self.state is not None
        at, event = happened_in(self._count, line)
        self.state, _ = step(self.state, event, at)
        self._observer.happened(event, self.state, at)
        if self._generations.note(self.state):
            self._observer.started(self.state, at)

    def _tell_output(self, entry: Entry) -> None:
        rank, generation, stream = entry.rank, entry.generation, entry.stream
        begun = self._generations.of(generation)
        goes_to = begun and begun.destinations.get((rank, stream))
        if goes_to and goes_to.file and self._wanted(entry):
            self.moment = entry.time
            data = self._read(goes_to.file, entry.offset, entry.size)
            self._observer.printed(Printed(rank, stream, data, generation, goes_to))

    def _read(self, name: str, offset: int, size: int) -> bytes:
        if name not in self._open:
            if len(self._open) >= MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                self._open[name] = os.open(os.path.join(self._folder, name), os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return b""  # it was taken away
        return os.pread(self._open[name], size, offset)


def _time(line: dict[str, Any]) -> float:
    return line.get("time") or 0.0


def _merged(lines: list[dict[str, Any]], entries: list[Entry]) -> Iterator[dict[str, Any] | Entry]:
    """In the order of their times; each list has its own already."""
    at = 0
    for entry in entries:
        while at < len(lines) and _time(lines[at]) <= entry.time:
            yield lines[at]
            at += 1
        yield entry
    yield from lines[at:]
