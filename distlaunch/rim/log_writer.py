"""Appends to files from a thread, so that a disk that stalls holds up nobody."""

import os
import threading
from collections import deque

MAX_OPEN = 200
"""Log files kept open at once: two per rank would pass the usual limit of 1024 descriptors."""
CAPACITY = 8 << 20
"""Bytes that may wait for the disk."""
PATIENCE_S = 0.3
"""A full queue is waited for so long; while the disk takes nothing, what comes is counted as lost at once."""
FLUSH_S = 5.0


class LogWriter:
    """Appends to files below `folder`, created with mode 0600; a folder named in a path is made, 0700."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}
        self._made: set[str] = set()
        self._queue: deque[tuple[str, bytes]] = deque()
        self._waiting = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = self._stalled = False
        self.lost_bytes = 0

    def append(self, name: str, data: bytes) -> None:
        """Have `data` appended to the file; what can't be written is counted in `lost_bytes`."""
        with self._changed:
            if not self._has_room(len(data)):
                self.lost_bytes += len(data)
                return
            self._queue.append((name, data))
            self._waiting += len(data)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="log-writer")
            self._thread.start()

    def _has_room(self, size: int) -> bool:
        """Whether there is room; a disk that is only slow is waited for, which holds its source back."""
        full = self._waiting and self._waiting + size > CAPACITY
        while full and not self._stalled:
            before = self._waiting
            self._changed.wait(PATIENCE_S)
            self._stalled = self._waiting == before
            full = self._waiting and self._waiting + size > CAPACITY
        return not full

    def close(self) -> None:
        """Write out what waits, for as long as the disk takes something, and close the files."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if not self.flush():
            self.lost_bytes += self._waiting  # the thread, which can't be ended, keeps the files
        elif self._thread:
            self._thread.join()

    def flush(self) -> bool:
        """Wait until all is written, for as long as the disk takes something; whether it is."""
        with self._changed:
            while self._waiting:
                before = self._waiting
                if not self._changed.wait(FLUSH_S) and self._waiting == before:
                    return False
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    break
                name, data = self._queue.popleft()
            lost = self._write(name, data)
            with self._changed:
                self._waiting -= len(data)
                self.lost_bytes += lost
                self._stalled = False
                self._changed.notify_all()
        while self._open:
            os.close(self._open.popitem()[1])

    def _write(self, name: str, data: bytes) -> int:
        """Append; the number of bytes that could not be written."""
        try:
            fd = self._descriptor(name)
            while data:
                data = data[os.write(fd, data) :]
        except OSError:
            return len(data)
        return 0

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) >= MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            path = os.path.join(self._folder, name)
            if os.path.dirname(name):
                os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            # What is there already, but for our own, was put there by somebody else.
            fresh = 0 if name in self._made else os.O_CREAT | os.O_EXCL
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._open[name] = os.open(path, flags | fresh, 0o600)
            self._made.add(name)
        return self._open[name]
