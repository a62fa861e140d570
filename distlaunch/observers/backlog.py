"""What waits to be written, and the thread that writes it: a slow terminal or disk holds up nobody."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Piece = TypeVar("Piece")
CAPACITY = 8 << 20
"""Bytes that may wait for a slow reader, or disk."""


class Backlog(Generic[Piece]):
    """A queue, used with `changed` held, and a thread, begun by its first piece, that `write`s it empty."""

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
        if not self._thread.ident and not self._started():
            self._write()  # rather slow than lost

    def _started(self) -> bool:
        """Start the thread; whether there is room for one."""
        try:
            self._thread.start()
        except RuntimeError:
            return False
        return True

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
