"""Writes from a thread: a slow terminal, pipe or disk never slows the job."""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Piece = TypeVar("Piece")
CAPACITY = 8 << 20
"""Bytes that may wait for a slow reader, or disk."""
LOOK_S = 0.1
"""How often we check, at the end, whether to keep waiting for a reader that takes nothing."""


class Backlog(Generic[Piece]):
    """A queue, used with `changed` held, and a thread, started by the first piece, that `write`s it empty."""

    def __init__(self, name: str, write: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._write = write
        self._ending = False
        self.changed = threading.Condition()
        self.queue: deque[Piece] = deque()
        self.waiting = 0

    def add(self, piece: Piece, size: int) -> None:
        """Have a piece of `size` bytes written."""
        if not self.queue:  # else the thread is at work
            self.changed.notify_all()
        self.queue.append(piece)
        self.waiting += size
        if not self._thread.ident:
            try:
                self._thread.start()
            except RuntimeError:  # no room for a thread
                self._write()  # rather slow than lost

    def written(self, size: int) -> None:
        """Note that `write` has dealt with `size` bytes."""
        self.waiting -= size
        self.changed.notify_all()

    def moves(self, within_s: float) -> bool:
        """Wait until something is written; whether it was within that time."""
        before = self.waiting
        return self.changed.wait_for(lambda: self.waiting != before, within_s)

    def drain(self, look_s: float, patient: Callable[[float], bool]) -> bool:
        """Wait until all is written, while `patient(seconds without progress)` is true; whether all is."""
        with self.changed:
            since = time.monotonic()
            while self.waiting:
                since = time.monotonic() if self.moves(look_s) else since
                if not patient(time.monotonic() - since):
                    return False
        return True

    def end(self) -> bool:
        """Let the thread end when all is written, and wait for it if all is; whether it has ended."""
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

    `on_broken` is called, from its thread, when writing has failed for good. `waits` says whether to wait for
    a reader that is too far behind.
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
        """Queue whole lines; drop them when the reader is too far behind, except for `ours`: they are few."""
        with self._backlog.changed:
            if self.broken or not (ours or self._has_room(len(data))):
                self.dropped_lines += data.count(b"\n")
            else:
                self._backlog.add(data, len(data))

    def _has_room(self, size: int) -> bool:
        while self._backlog.waiting + size > CAPACITY:
            if self.broken or not self._waits():
                return False
            if not self._backlog.waiting:
                return True  # it is long, but all there is
            self._backlog.moves(LOOK_S)
        return True

    def settle(self) -> None:
        """Wait a moment until what was written is there."""
        self._backlog.drain(LOOK_S, lambda silent_s: False)

    def close(self, patient: Callable[[float], bool]) -> None:
        """Write out what is queued while `patient`, told for how long nothing was taken; drop the rest."""
        with self._backlog.changed:
            if not self._backlog.drain(LOOK_S, patient):
                left = b"".join((self._unsent, *self._backlog.queue))
                self.dropped_lines += left.count(b"\n") + (not left.endswith(b"\n"))
        self._backlog.end()

    def _write_all(self) -> None:
        with self._backlog.changed:
            self._unsent = memoryview(b"".join(self._backlog.queue))
            self._backlog.queue.clear()
        while self._unsent:
            try:
                self._sent(os.write(self._fd, self._unsent[: 1 << 16]))
            except BlockingIOError:
                select.select([], [self._fd], [])  # whoever shares the terminal made it non-blocking
            except OSError as error:
                with self._backlog.changed:
                    self.broken = True
                    self._backlog.queue.clear()  # what came while that was written
                    self._sent(self._backlog.waiting)
                self._on_broken(error)

    def _sent(self, size: int) -> None:
        with self._backlog.changed:
            self._unsent = self._unsent[size:]
            self._backlog.written(size)
