"""Writes to the terminal or a pipe from a thread, so that a slow reader never slows the job."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable

CAPACITY = 8 << 20
"""Bytes that may wait for a slow reader; beyond it whole lines are dropped and counted."""
LOOK_S = 0.1
"""How often it is asked, at the end, whether a reader that takes nothing is waited for."""


class Outlet:
    """One descriptor's writer. `on_broken` is called, from its thread, when writing has failed for good."""

    def __init__(self, fd: int, on_broken: Callable[[OSError], None]) -> None:
        self._fd = fd
        self._on_broken = on_broken
        self._queue: deque[bytes] = deque()
        self._waiting = 0
        self._unsent = memoryview(b"")
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self.dropped_lines = 0
        self.broken = False

    def write(self, data: bytes, ours: bool = False) -> None:
        """Queue whole lines, or drop them when the reader is too far behind, but for `ours`: they are few."""
        with self._changed:
            if self.broken or (self._waiting + len(data) > CAPACITY and not ours):
                self.dropped_lines += data.count(b"\n")
                return
            self._queue.append(data)
            self._waiting += len(data)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name=f"outlet-{self._fd}")
            self._thread.start()

    def close(self, patient: Callable[[float], bool]) -> None:
        """Write out what is queued while `patient`, which is told how long the reader has taken nothing.

        What is then left is counted as dropped.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            since = time.monotonic()
            while self._waiting and not self.broken:
                before = self._waiting
                self._changed.wait(LOOK_S)
                since = since if self._waiting == before else time.monotonic()
                if not patient(time.monotonic() - since):
                    left = b"".join((self._unsent, *self._queue))
                    self.dropped_lines += left.count(b"\n") + (not left.endswith(b"\n"))
                    return
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                self._unsent = memoryview(b"".join(self._queue))
                self._queue.clear()
            self._write_all()

    def _write_all(self) -> None:
        while self._unsent:
            try:
                sent = os.write(self._fd, self._unsent[: 1 << 16])
            except BlockingIOError:
                _wait_writable(self._fd)  # whoever shares the terminal made it non-blocking
                continue
            except OSError as error:
                self._break(error)
                return
            with self._changed:
                self._unsent = self._unsent[sent:]
                self._waiting -= sent
                self._changed.notify_all()

    def _break(self, error: OSError) -> None:
        with self._changed:
            self.broken = True
            self._queue.clear()  # what came while that was written
            self._waiting = 0
            self._changed.notify_all()
        self._on_broken(error)


def _wait_writable(fd: int) -> None:
    import select

    select.select([], [fd], [])
