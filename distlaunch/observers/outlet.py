"""Writes from a thread to keep a slow terminal, pipe or disk from slowing the job."""

import math
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Piece = TypeVar("Piece")
CAPACITY = 8 << 20
"""Maximum bytes waiting for a slow reader or disk."""
LOOK_S = 0.1
"""Seconds between two checks of whether to keep waiting for a stuck reader or disk."""


class Backlog(Generic[Piece]):
    """A queue and the thread that empties it by calling `write`. Hold `changed` to use the queue.

    The first piece starts the thread.
    """

    def __init__(self, name: str, write: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._write = write
        self._ending = False
        self.changed = threading.Condition()
        self.queue: deque[Piece] = deque()
        self.waiting = 0

    def add(self, piece: Piece, size: int) -> None:
        """Queue a piece of `size` bytes."""
        if not self.queue:  # else the thread is writing
            self.changed.notify_all()
        self.queue.append(piece)
        self.waiting += size
        if not self._thread.ident:
            try:
                self._thread.start()
            except RuntimeError:  # no more threads can be started
                self._write()  # slow, but not lost

    def written(self, size: int) -> None:
        """Note that `write` is done with `size` bytes."""
        self.waiting -= size
        self.changed.notify_all()

    def moves(self, within_s: float) -> bool:
        """Wait up to `within_s` seconds for progress; return whether there was any.

        The seconds are counted in steps: if this process is suspended meanwhile, only one of them has passed.
        """
        before = self.waiting
        steps = math.ceil(within_s / LOOK_S)
        return any(self.changed.wait_for(lambda: self.waiting != before, LOOK_S) for _ in range(steps))

    def drain(self, look_s: float, patient: Callable[[float], bool]) -> bool:
        """Wait while `patient(seconds without progress)` is true. Return whether everything is written."""
        with self.changed:
            quiet_s = 0.0
            while self.waiting:
                quiet_s = 0.0 if self.moves(look_s) else quiet_s + look_s
                if not patient(quiet_s):
                    return False
        return True

    def end(self) -> bool:
        """Make the thread exit once all is written; wait if nothing is left. Return whether it exited."""
        with self.changed:
            self._ending = True
            self.changed.notify_all()
        if self._thread.ident and not self.waiting:
            self._thread.join()
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.queue or self._ending)
                if not self.queue:
                    return
            self._write()


class Outlet:
    """The writer of a terminal or a pipe.

    `on_broken` is called in the thread when writing has failed permanently. `waits` returns whether to wait
    for a reader that is too far behind.
    """

    def __init__(
        self, fd: int, on_broken: Callable[[OSError], None], waits: Callable[[], bool] = lambda: False
    ) -> None:
        self._fd, self._on_broken, self._waits = fd, on_broken, waits
        self._backlog = Backlog[bytes](f"outlet-{fd}", self._write_all)
        self._unsent = memoryview(b"")
        self.dropped_lines = 0
        self.broken = False

    def write(self, data: bytes, ours: bool = False) -> None:
        """Queue whole lines. Drop them if the reader is too far behind; messages (`ours`) are always kept."""
        with self._backlog.changed:
            if self.broken or not (ours or self._has_room(len(data))):
                self.dropped_lines += data.count(b"\n")
            else:
                self._backlog.add(data, len(data))

    @property
    def waiting(self) -> int:
        """Return the number of bytes that are not written yet."""
        return self._backlog.waiting

    def _has_room(self, size: int) -> bool:
        """Return whether there is room to queue data. While `waits` returns true, wait for the reader."""
        while self._backlog.waiting + size > CAPACITY:
            if self.broken or not self._waits():
                return False
            if not self._backlog.waiting:
                return True  # longer than the capacity, but nothing else is queued
            self._backlog.moves(LOOK_S)
        return True

    def settle(self) -> None:
        """Wait a moment for everything to be written."""
        self._backlog.drain(LOOK_S, lambda silent_s: False)

    def close(self, patient: Callable[[float], bool]) -> None:
        """Write the queue while `patient(seconds without progress)` is true; drop the rest."""
        with self._backlog.changed:
            if not self._backlog.drain(LOOK_S, patient):
                left = b"".join((self._unsent, *self._backlog.queue))
                self.dropped_lines += left.count(b"\n") + (not left.endswith(b"\n"))
        self._backlog.end()

    def _write_all(self) -> None:
        """Write everything queued so far. Called by the thread of the backlog."""
        with self._backlog.changed:
            self._unsent = memoryview(b"".join(self._backlog.queue))
            self._backlog.queue.clear()
        while self._unsent:
            try:
                self._sent(os.write(self._fd, self._unsent[: 1 << 16]))
            except BlockingIOError:
                select.select([], [self._fd], [])  # another process with this terminal made it non-blocking
            except OSError as error:
                with self._backlog.changed:
                    self.broken = True
                    self._backlog.queue.clear()  # queued during the write
                    self._sent(self._backlog.waiting)
                self._on_broken(error)

    def _sent(self, size: int) -> None:
        with self._backlog.changed:
            self._unsent = self._unsent[size:]
            self._backlog.written(size)
