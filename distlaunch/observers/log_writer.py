"""Appends to files from a thread, so that a disk that stalls holds up nobody."""

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.observers import output_index
from distlaunch.observers.backlog import CAPACITY, Backlog
from distlaunch.observers.output_index import Stamp

MAX_OPEN = 200
"""Log files kept open at once: two per rank would pass the usual limit of 1024 descriptors."""
INDEX_BYTES = 1 << 16
"""Of the index, that are written at the latest."""
AT_ONCE = 1 << 17
"""Of pieces that follow each other in a file: a disk that is slow is still seen to move."""
PATIENCE_S = 0.3
"""Wait this long for room in a full queue; after that, output is lost until the disk takes some again."""
FLUSH_S = 5.0


class Piece(Frozen):
    """What is to be written: to the end of a file, `over` its beginning, or as the `whole` file."""

    name: str
    data: bytes
    stamp: Stamp | None = None
    where: Literal["end", "over", "whole"] = "end"


class LogWriter:
    """Appends to files below `folder`, created with mode 0600; a folder named in a path is made, 0700."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        """Bytes in each file that we have made: of what we append, we need not ask where it came to be."""
        self._backlog = Backlog[Piece]("log-writer", self._write_all)
        self._stalled = False
        self._index = bytearray()
        self._writers = {"end": self._append, "over": self._overwrite, "whole": self._replace}
        self.lost_bytes = 0

    def append(self, name: str, data: bytes, stamp: Stamp | None = None) -> None:
        """Have `data` appended to the file; what can't be written is counted in `lost_bytes`.

        What has a `stamp` gets an entry in the index of the output, as far as it could be written.
        """
        with self._backlog.changed:
            if self._has_room(len(data)):
                self._backlog.add(Piece(name, data, stamp), len(data))
            else:
                self.lost_bytes += len(data)

    def put(self, name: str, data: bytes) -> None:
        """Have `data`, which is short, written over the beginning of a file that is there."""
        with self._backlog.changed:
            self._backlog.add(Piece(name, data, where="over"), len(data))

    def replace(self, name: str, data: bytes) -> None:
        """Have `data` be all that a file has; left out where the queue is full."""
        with self._backlog.changed:
            if self._backlog.waiting + len(data) <= CAPACITY:
                self._backlog.add(Piece(name, data, where="whole"), len(data))

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
            pieces = self._next()
            if self._index and not pieces[0].stamp:
                self._write_index()  # who finds an event finds the output before it
            lost = self._writers[pieces[0].where](pieces)
            if self._index and (not self._backlog.queue or len(self._index) > INDEX_BYTES):
                self._write_index()
            with self._backlog.changed:
                self.lost_bytes += lost
                self._stalled = False
                self._backlog.written(sum(len(piece.data) for piece in pieces))

    def _next(self) -> list[Piece]:
        """The next piece, and what is to follow it in the same file: thousands of events are a few writes."""
        queue = self._backlog.queue  # no lock: nobody else takes
        pieces = [queue.popleft()]
        name, _, stamp, where = pieces[0]
        room = AT_ONCE - len(pieces[0].data)
        while queue and where == "end" and queue[0].where == where and queue[0].name == name:
            room -= len(queue[0].data)
            if room < 0 or (queue[0].stamp is None) is not (stamp is None):
                break
            pieces.append(queue.popleft())
        return pieces

    def _append(self, pieces: Sequence[Piece]) -> int:
        """Append them to their file; the number of bytes that could not be written."""
        name, data, _, _ = pieces[0]
        left = data if len(pieces) == 1 else b"".join([piece.data for piece in pieces])
        try:
            fd = self._descriptor(name)
            while left:
                left = left[os.write(fd, left) :]
        except OSError:
            pass
        at = self._sizes.get(name, 0)
        end = at + sum(len(piece.data) for piece in pieces) - len(left)
        if end > at:
            self._sizes[name] = end
        for piece in pieces:
            size = min(len(piece.data), end - at)
            if piece.stamp and size:
                self._index += piece.stamp.packed(at, size)
            at += size
        return len(left)

    def _write_index(self) -> None:
        """Write whole records, or none: the output itself is there."""
        with suppress(OSError):
            fd = self._descriptor(output_index.NAME)
            written = os.write(fd, self._index)
            if torn := written % output_index.RECORD.size:
                os.ftruncate(fd, os.lseek(fd, 0, os.SEEK_CUR) - torn)
        self._index.clear()

    def _overwrite(self, pieces: Sequence[Piece]) -> int:
        """Nothing is counted as lost: what stood there before is still true of that time."""
        (piece,) = pieces
        with suppress(OSError):
            fd = os.open(os.path.join(self._folder, piece.name), os.O_WRONLY | os.O_NOFOLLOW)
            try:
                os.pwrite(fd, piece.data, 0)
            finally:
                os.close(fd)
        return 0

    def _replace(self, pieces: Sequence[Piece]) -> int:
        (piece,) = pieces
        path = os.path.join(self._folder, piece.name)
        with suppress(OSError):
            fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                complete = os.write(fd, piece.data) == len(piece.data)
            finally:
                os.close(fd)
            if complete:
                os.replace(f"{path}.new", path)
        return 0

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) >= MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            path = os.path.join(self._folder, name)
            if os.path.dirname(name):
                os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            # What is there already, but for our own, was put there by somebody else.
            fresh = 0 if name in self._sizes else os.O_CREAT | os.O_EXCL
            self._open[name] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | fresh, 0o600)
            self._sizes.setdefault(name, 0)
        return self._open[name]
