"""Appends to files from a thread, so that a disk that stalls holds up nobody."""

import os

from distlaunch.observers.backlog import CAPACITY, Backlog

MAX_OPEN = 200
"""Log files kept open at once: two per rank would pass the usual limit of 1024 descriptors."""
PATIENCE_S = 0.3
"""Wait this long for room in a full queue; after that, output is lost until the disk takes some again."""
FLUSH_S = 5.0


class LogWriter:
    """Appends to files below `folder`, created with mode 0600; a folder named in a path is made, 0700."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}
        self._made: set[str] = set()
        self._backlog = Backlog[tuple[str, bytes]]("log-writer", self._write_all)
        self._stalled = False
        self.lost_bytes = 0

    def append(self, name: str, data: bytes) -> None:
        """Have `data` appended to the file; what can't be written is counted in `lost_bytes`."""
        with self._backlog.changed:
            if self._has_room(len(data)):
                self._backlog.add((name, data), len(data))
            else:
                self.lost_bytes += len(data)

    def _has_room(self, size: int) -> bool:
        """Whether there is room; waits for a disk that is only slow, which slows the source down, too."""
        while self._backlog.waiting and self._backlog.waiting + size > CAPACITY:
            if self._stalled:
                return False
            self._stalled = not self._backlog.moves(PATIENCE_S)
        return True

    def close(self) -> None:
        """Write out what waits, for as long as the disk takes something, and close the files."""
        self.flush()
        if self._backlog.end():
            while self._open:
                os.close(self._open.popitem()[1])
        else:
            self.lost_bytes += self._backlog.waiting  # the thread, which can't be stopped, keeps the files

    def flush(self) -> bool:
        """Wait until all is written, for as long as the disk takes something; whether it is."""
        return self._backlog.drain(FLUSH_S, lambda quiet_s: quiet_s < FLUSH_S)

    def _write_all(self) -> None:
        while self._backlog.queue:
            name, data = self._backlog.queue.popleft()  # no lock: nobody else takes
            left, lost = data, 0
            try:
                fd = self._descriptor(name)
                while left:
                    left = left[os.write(fd, left) :]
            except OSError:
                lost = len(left)
            with self._backlog.changed:
                self.lost_bytes += lost
                self._stalled = False
                self._backlog.written(len(data))

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) >= MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            path = os.path.join(self._folder, name)
            if os.path.dirname(name):
                os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            # What is there already, but for our own, was put there by somebody else.
            fresh = 0 if name in self._made else os.O_CREAT | os.O_EXCL
            self._open[name] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | fresh, 0o600)
            self._made.add(name)
        return self._open[name]
