"""Writes to the terminal or a pipe from a thread, so that a slow reader never slows the job."""

import os
import select
from collections.abc import Callable

from distlaunch.observers.backlog import CAPACITY, Backlog

LOOK_S = 0.1
"""How often we check, at the end, whether to keep waiting for a reader that takes nothing."""


class Outlet:
    """One descriptor's writer. `on_broken` is called, from its thread, when writing has failed for good.

    `waits` says whether a reader that is too far behind is waited for.
    """

    def __init__(
        self, fd: int, on_broken: Callable[[OSError], None], waits: Callable[[], bool] = lambda: False
    ) -> None:
        self._fd, self._waits = fd, waits
        self._on_broken = on_broken
        self._backlog = Backlog[bytes](f"outlet-{fd}", self._write_all)
        self._unsent = memoryview(b"")
        self.dropped_lines = 0
        self.broken = False

    def write(self, data: bytes, ours: bool = False) -> None:
        """Queue whole lines, or drop them when the reader is too far behind, but for `ours`: they are few."""
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
                self._break(error)

    def _sent(self, size: int) -> None:
        with self._backlog.changed:
            self._unsent = self._unsent[size:]
            self._backlog.written(size)

    def _break(self, error: OSError) -> None:
        with self._backlog.changed:
            self.broken = True
            self._backlog.queue.clear()  # what came while that was written
            self._sent(self._backlog.waiting)
        self._on_broken(error)
