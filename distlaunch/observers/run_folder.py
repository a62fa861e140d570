"""The run directory: the plan, every event, every rank's output and its order, private to the user.

A thread writes it: a full, broken or stalled disk never stops a job, and what it doesn't take is counted.
"""

import contextlib
import fcntl
import json
import os
import re
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.observers.outlet import CAPACITY, Backlog
from distlaunch.supervisor.status import Status, document_of
from distlaunch.wording import json_text

STATUS, EVENTS, SUMMARY = "status.json", "events.jsonl", "summary.json"
CONTROLLER_LOG = "controller.log"
"""What a controller without a terminal writes to stderr, which only a bug makes it do."""
OUTPUT_INDEX = "output.index"
"""The order and times in which output came; the files beside it have it by rank."""
INDEX_RECORD = struct.Struct("<dQIIIH")
MAX_OPEN = 200
"""Log files kept open at once: two per rank would pass the usual limit of 1024 descriptors."""
AT_ONCE = 1 << 17
"""Bytes of pieces for one file that are written together: a disk that is slow is still seen to move."""
PATIENCE_S = 0.3
"""Wait this long for room in a full queue; after that, output is lost until the disk takes some again."""
FLUSH_S = 5.0
STATUS_BYTES = 4096
"""Its size: it is written over in place, so that a disk that fills up takes the end of a run, too."""


def new_run_id(name: str) -> str:
    """A name for a run that no other run has: the job's, the time, and some chance."""
    return f"{job_part(name) or 'job'}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"


def job_part(name: str) -> str:
    """The part of a job's name that is in the IDs of its runs, which may be ""."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:40]


def file_of(generation: int, name: str) -> str:
    """The path in the run directory of a file of a generation; later ones have folders of their own."""
    return f"generation{generation}/{name}" if generation else name


class Entry(Frozen):
    """An entry of the index: a piece of a rank's stdout (0) or stderr (1) that came at `time`.

    That is in seconds since the epoch. The piece has `size` bytes, from `offset` on in its file.
    """

    time: float
    offset: int
    size: int
    rank: int
    generation: int
    stream: int


def index_entries(data: bytes) -> list[Entry]:
    """The entries of whole records."""
    return [Entry(*fields) for fields in INDEX_RECORD.iter_unpack(data)]


class Piece(Frozen):
    """Bytes to write to the end of a file, `over` its beginning, or as the `whole` file."""

    name: str
    data: bytes
    entry: Entry | None = None
    where: Literal["end", "over", "whole"] = "end"


class LogWriter:
    """Writes files below `path`, created with mode 0600; folders named in a file's path are made, 0700."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._open: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        """Bytes in each file that we have made: nobody else appends to them."""
        self._backlog = Backlog[Piece]("log-writer", self._write_all)
        self._stalled = False
        self.lost_bytes = 0

    def append(self, name: str, data: bytes, entry: Entry | None = None) -> None:
        """Have `data` appended to the file; what can't be written is counted in `lost_bytes`.

        `entry` goes to the index of the output, with the place where `data` was written, and its size there.
        """
        with self._backlog.changed:
            if self._has_room(len(data)):
                self._backlog.add(Piece(name, data, entry), len(data))
            else:
                self.lost_bytes += len(data)

    def put(self, name: str, data: bytes, where: Literal["over", "whole"]) -> None:
        """Have `data`, which is short, written `over` the beginning of a file that is there.

        Or have it be the `whole` file: readers find all of it, or all of what was there before. That is left
        out where the queue is full.
        """
        with self._backlog.changed:
            if where == "over" or self._backlog.waiting + len(data) <= CAPACITY:
                self._backlog.add(Piece(name, data, where=where), len(data))

    def _has_room(self, size: int) -> bool:
        """Whether there is room; waits for a disk that is only slow, which slows the source down, too."""
        while self._backlog.waiting and self._backlog.waiting + size > CAPACITY:
            if self._stalled:
                return False
            self._stalled = not self._backlog.moves(PATIENCE_S)
        return True

    def flush(self) -> bool:
        """Wait until all can be read, for as long as the disk takes something; whether all can."""
        return self._backlog.drain(FLUSH_S, lambda quiet_s: quiet_s < FLUSH_S)

    def close(self) -> None:
        """Write out what waits, for as long as the disk takes something, and close the files."""
        self.flush()
        if self._backlog.end():
            while self._open:
                os.close(self._open.popitem()[1])
        else:
            self.lost_bytes += self._backlog.waiting  # the thread, which can't be stopped, keeps the files

    # In the thread

    def _write_all(self) -> None:
        while self._backlog.queue:
            pieces = self._next()
            lost = 0  # of what is put, nothing: what stood there before is still true of that time
            if pieces[0].where == "end":
                lost = self._append(pieces)
            else:
                self._put(pieces[0])
            with self._backlog.changed:
                self.lost_bytes += lost
                self._stalled = False
                self._backlog.written(sum(len(piece.data) for piece in pieces))

    def _next(self) -> list[Piece]:
        """The next piece, and what is to follow it in the same file: thousands of events are a few writes."""
        queue = self._backlog.queue  # no lock: nobody else takes
        pieces = [queue.popleft()]
        name, data, _, where = pieces[0]
        room = AT_ONCE - len(data)
        while queue and room > 0 and queue[0].name == name and queue[0].where == where == "end":
            room -= len(queue[0].data)
            pieces.append(queue.popleft())
        return pieces

    def _append(self, pieces: Sequence[Piece]) -> int:
        """Append them to their file; the number of bytes that could not be written."""
        name, left = pieces[0].name, b"".join([piece.data for piece in pieces])
        size = len(left)
        with contextlib.suppress(OSError):
            fd = self._descriptor(name)
            while left:
                left = left[os.write(fd, left) :]
        at = self._sizes.get(name, 0)
        end = at + size - len(left)
        if end > at:
            self._sizes[name] = end
        index = bytearray()
        for _, data, entry, _ in pieces:
            kept = min(len(data), end - at)
            if entry and kept:
                index += INDEX_RECORD.pack(*entry._replace(offset=at, size=kept))
            at += kept
        if index:
            self._write_index(index)
        return len(left)

    def _write_index(self, index: bytearray) -> None:
        """Write whole records, or none: the output itself is there."""
        with contextlib.suppress(OSError):
            fd = self._descriptor(OUTPUT_INDEX)
            if torn := os.write(fd, index) % INDEX_RECORD.size:
                os.ftruncate(fd, os.lseek(fd, 0, os.SEEK_CUR) - torn)

    def _put(self, piece: Piece) -> None:
        path = os.path.join(self.path, piece.name)
        place, flags = (path, 0) if piece.where == "over" else (f"{path}.new", os.O_CREAT | os.O_TRUNC)
        with contextlib.suppress(OSError):
            fd = os.open(place, os.O_WRONLY | os.O_NOFOLLOW | flags, 0o600)
            with open(fd, "wb", buffering=0) as file:
                is_whole = file.write(piece.data) == len(piece.data)
            if is_whole and place != path:
                os.replace(place, path)

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) >= MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            path = os.path.join(self.path, name)
            if os.path.dirname(name):
                os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            # What is there already, but for our own, was put there by somebody else.
            fresh = 0 if name in self._sizes else os.O_CREAT | os.O_EXCL
            self._open[name] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | fresh, 0o600)
            self._sizes.setdefault(name, 0)
        return self._open[name]


class RunFolder(LogWriter):
    """The folder `parent`/`run_id`, made with mode 0700."""

    def __init__(self, parent: str, run_id: str) -> None:
        """Create the folder. Raises OSError."""
        super().__init__(os.path.join(parent, run_id))
        _make_folders(parent)
        os.mkdir(self.path, 0o700)
        self.run_id = run_id
        self._claim: int | None = None

    def claim(self, status: Status) -> None:
        """Write the first status, and lock it: until we close it or die, others see that we live."""
        path = os.path.join(self.path, STATUS)
        self._claim = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with contextlib.suppress(OSError):  # a file system may lack either
            fcntl.flock(self._claim, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            os.pwrite(self._claim, status_bytes(status), 0)

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a document to a file of its own."""
        self.append(name, json_text(document, indent=1).encode())

    def record(self, at: float, name: str, fields: Mapping[str, Any]) -> None:
        """Append one event: its name and fields, with seconds since the run began and wall time."""
        document = {"t": at, "time": round(time.time(), 6), "event": name, **fields}
        self.append(EVENTS, json.dumps(document, default=str).encode() + b"\n")

    def close(self) -> None:
        """Write out what waits, close all files, and give up the claim."""
        super().close()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def remove(self) -> None:
        """Delete it with all that is in it."""
        import shutil  # few folders are temporary

        shutil.rmtree(self.path, ignore_errors=True)


def status_bytes(status: Status) -> bytes:
    """Always as long: blanks make it up."""
    text = json.dumps(document_of(status)).encode()
    return text.ljust(STATUS_BYTES - 1) + b"\n"


def _make_folders(path: str) -> None:
    """`path` and what lacks above it; only the user may write there, or others could put links in it."""
    if not os.path.isdir(path):
        _make_folders(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o755)
