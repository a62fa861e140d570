"""The run directory, private to the user: the plan, every event, and every rank's output with its order.

A thread writes the directory. A full, broken or stalled disk never stops a job. Lost bytes are counted.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.locks import LOCK_S, lock
from distlaunch.errors import reason
from distlaunch.observers.outlet import CAPACITY, Backlog
from distlaunch.supervisor.status import Status, document_of, status_of

STATUS, EVENTS, SUMMARY = "status.json", "events.jsonl", "summary.json"
STOPPED = "stopped"
"""An empty file that `distlaunch stop` creates before it sends SIGINT."""
COLLECTED, COLLECTING = "collected", "collecting"
"""The directories of the files from the nodes: at the end, and until then, when they may be incomplete."""
CONTROLLER_LOG = "controller.log"
"""The stderr of a controller without a terminal: messages from observers, and tracebacks."""
CODE = "code.json"
"""The manifest of the code that the job copied to its nodes, as in `agent.tree`."""
OUTPUT_INDEX = "output.index"
"""The order in which output arrived, with times. The output itself is in the ranks' files."""
INDEX_RECORD = struct.Struct("<dQIIIH")
"""A record of the output index: the fields of `Entry`."""
MAX_OPEN = 200
OPEN_SHARE = 8
"""Divisor of the limit on descriptors that limits the log files kept open at once. Two files per rank would
exceed the usual limit, 1024, and links need most of a lower one."""
AT_ONCE = MAX_READ = 1 << 17
"""Bytes written to or read from a file at once. The limit is low enough to detect progress of a slow disk."""
PATIENCE_S = 0.3
"""Seconds to wait for space in a full queue. After that, output is lost until the disk makes progress."""
FLUSH_S = 5.0
MAX_S = 1e11
"""Upper limit of times in a run directory, in seconds."""
MAX_NUMBER = 1e30
"""Limit of numbers in most documents in a run directory, which may contain anything."""
STATUS_BYTES = 4096
"""Bytes of status.json. It is overwritten in place, so a run's end can be recorded even on a full disk."""
SAVE_S, FRESH_S = 10.0, 45.0
"""Seconds between writes of status.json during a run, and seconds after a write for which other hosts
consider the run active. They might not see the file's lock: on BeeGFS and many Lustre installations, locks
only apply to one host.
"""
RESERVED_BYTES = 1 << 16
"""Bytes reserved at the start for summary.json, so that it can be written even to a full disk."""


def new_run_id(name: str) -> str:
    """Return a unique ID for a run: the job's name, the time, and random digits."""
    return f"{job_part(name) or 'job'}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"


def job_part(name: str) -> str:
    """Return the part of a job's name used in its run IDs. It may be ""."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:40]


def file_of(attempt: int, name: str) -> str:
    """Return the path of an attempt's file in the run directory. Each restart has its own directory."""
    return f"attempt{attempt}/{name}" if attempt else name


class Entry(Frozen):
    """An entry of the output index: a piece of a rank's stdout (0) or stderr (1).

    The piece arrived at `time`, in seconds since the epoch. It occupies `size` bytes of its file, from
    `offset` on.
    """

    time: float
    offset: int
    size: int
    rank: int
    attempt: int
    stream: int


def index_entries(data: bytes) -> list[Entry]:
    """Return the entries in the complete records of `data`, except those with an impossible time."""
    whole = data[: len(data) // INDEX_RECORD.size * INDEX_RECORD.size]
    return [Entry(*fields) for fields in INDEX_RECORD.iter_unpack(whole) if 0 <= fields[0] < MAX_S]


def index_of(directory: str, backwards: bool = False) -> Iterator[Entry]:
    """Yield the entries of a run's output index in order of arrival, or the last one first."""
    with contextlib.suppress(OSError), open(fd_of(directory, OUTPUT_INDEX), "rb") as file:
        starts = range(0, os.fstat(file.fileno()).st_size, INDEX_RECORD.size << 12)
        for start in reversed(starts) if backwards else starts:
            entries = index_entries(os.pread(file.fileno(), starts.step, start))
            yield from reversed(entries) if backwards else entries


def fd_of(directory: str, name: str, dir_fd: int | None = None) -> int:
    """Open a regular file of this user in a run directory, which may contain anything. Raises OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a named pipe would block
    fd = os.open(os.path.join(directory, name), flags, dir_fd=dir_fd)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file of this user")


def json_of(data: bytes) -> Any:
    """Parse JSON from a run directory. Raises ValueError (also for Infinity) or RecursionError."""
    return json.loads(data, parse_int=_int, parse_float=_float, parse_constant=_float)


def _int(text: str) -> int:
    _float(text)  # checks the size
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not abs(value) < MAX_NUMBER:
        raise ValueError
    return value


def size_of(directory: str, name: str) -> int:
    """Return the size of a file, or 0 if `fd_of` can't open it. Opening it makes NFS update a cached size."""
    with contextlib.suppress(OSError), open(fd_of(directory, name), "rb") as file:
        return os.fstat(file.fileno()).st_size
    return 0


def status_in(directory: str) -> Status | None:
    """Return the last status of a run; None if no status can be read."""
    try:
        with open(fd_of(directory, STATUS), "rb") as file:
            return status_of(json.loads(file.readline()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Piece(Frozen):
    """Bytes to append to a file, to write `over` its start, or to replace the `whole` file with.

    For `read`, the file is read on instead.
    """

    name: str
    data: bytes
    entry: Entry | None = None
    where: Literal["end", "over", "whole", "read"] = "end"


class LogWriter:
    """A writer of files below `path`, created with mode 0600, in directories created with mode 0700.

    If the queue is full, the writer waits up to `patience_s` for the disk, by default PATIENCE_S.
    """

    def __init__(self, path: str) -> None:
        self.path, self.patience_s = path, 0.0
        self._base = path
        self._dir_fd: int | None = None  # that `_base` is relative to
        self._open: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        """Bytes in each file created by this process. No other process appends to these files."""
        self._backlog = Backlog[Piece]("log-writer", self._write_all)
        self._stalled = False
        self._reading, self._read, self._read_bytes = False, b"", 0
        self._writing: list[Piece] = []  # taken from the queue
        self.lost = Counter[int | None]()
        """Bytes that could not be written, by rank; None = other than output."""
        self.trouble = "the disk is too slow"
        """The reason why output could not be written, if any was lost."""

    @property
    def lost_bytes(self) -> int:
        """Return the number of bytes that could not be written."""
        return self.lost.total()

    def append(self, name: str, data: bytes, entry: Entry | None = None) -> None:
        """Queue `data` for the end of a file. Bytes that can't be written are counted in `lost`.

        `entry` is added to the output index, with the offset and size of the part that was written.
        """
        with self._backlog.changed:
            if self._has_room(len(data)):
                self._backlog.add(Piece(name, data, entry), len(data))
            else:
                self._lose(entry, len(data))

    def _lose(self, entry: Entry | None, size: int) -> None:
        self.lost[entry.rank if entry else None] += size

    def put(self, name: str, data: bytes, where: Literal["over", "whole"]) -> None:
        """Queue short `data` to be written `over` the start of an existing file, or as a `whole` file.

        Readers of a `whole` file see all of the old or all of the new content. A `whole` file is skipped if
        the queue is full, unless it is the summary.
        """
        with self._backlog.changed:
            if where == "over" or name == SUMMARY or self._backlog.waiting + len(data) <= CAPACITY:
                self._backlog.add(Piece(name, data, where=where), len(data))

    def read_on(self, name: str) -> bytes:
        """Return what others have appended to a file, as far as it was read, and start to read the rest.

        Returns at once, even if the disk doesn't respond. Only one file can be read.
        """
        if self._reading:
            return b""
        found, self._read, self._reading = self._read, b"", True
        with self._backlog.changed:
            self._backlog.add(Piece(name, b"?", where="read"), 1)
        return found

    def _has_room(self, size: int) -> bool:
        """Slow the source by waiting for room, unless the disk is stalled. Return whether there is room."""
        while self._backlog.waiting and self._backlog.waiting + size > CAPACITY:
            if self._stalled:
                return False
            self._stalled = not self._backlog.moves(self.patience_s or PATIENCE_S)
        return True

    def flush(self) -> bool:
        """Wait while the disk makes progress; return whether everything can be read now."""
        return self._backlog.drain(FLUSH_S, lambda quiet_s: quiet_s < FLUSH_S)

    def removed(self) -> list[str]:
        """Return the files that were written and later removed or replaced. Call this only after a flush."""
        return [name for name in self._sizes if not self._is_there(name)]

    def _is_there(self, name: str) -> bool:
        if name in self._open:
            return os.fstat(self._open[name]).st_nlink > 0
        try:
            os.stat(os.path.join(self._base, name), dir_fd=self._dir_fd)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Write out the queue while the disk makes progress, and close the files."""
        self.flush()
        if self._backlog.end():
            within(FLUSH_S, self._close_files)
        else:
            # The thread can't be stopped, and keeps the files open.
            with self._backlog.changed:
                for piece in (*self._writing, *self._backlog.queue):
                    if piece.where != "read":
                        self._lose(piece.entry, len(piece.data))

    def _close_files(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
        if self._dir_fd is not None:
            os.close(self._dir_fd)
            self._dir_fd = None

    # In the thread

    def _write_all(self) -> None:
        """Write the queue. Called by the thread of the backlog."""
        while self._backlog.queue:
            pieces = self._writing = self._next()
            lost = []  # `put` doesn't lose anything: the file keeps its older content
            if pieces[0].where == "end":
                lost = self._append(pieces)
            elif pieces[0].where == "read":
                self._read += self._rest_of(pieces[0].name)
                self._reading = False
            else:
                self._put(pieces[0])
            with self._backlog.changed:
                for entry, size in lost:
                    self._lose(entry, size)
                self._stalled = False
                self._writing = []
                self._backlog.written(sum(len(piece.data) for piece in pieces))

    def _next(self) -> list[Piece]:
        """Take the next piece and those after it for the same file, to write thousands of events at once."""
        queue = self._backlog.queue  # no lock: no other thread takes pieces
        pieces = [queue.popleft()]
        name, data, _, where = pieces[0]
        room = AT_ONCE - len(data)
        while queue and room > 0 and queue[0].name == name and queue[0].where == where == "end":
            room -= len(queue[0].data)
            pieces.append(queue.popleft())
        return pieces

    def _append(self, pieces: Sequence[Piece]) -> list[tuple[Entry | None, int]]:
        """Append pieces to their file. Return each incomplete piece's entry and its number of bytes lost."""
        name, left = pieces[0].name, b"".join([piece.data for piece in pieces])
        size = len(left)
        try:
            fd = self._descriptor(name)
            while left:
                left = left[os.write(fd, left) :]
        except OSError as error:
            self.trouble = reason(error)
        at = self._sizes.get(name, 0)
        end = at + size - len(left)
        if end > at:
            self._sizes[name] = end
        index, lost = bytearray(), []
        for _, data, entry, _ in pieces:
            kept = min(len(data), end - at)
            if name == EVENTS and 0 < kept < len(data):  # a part of a line can't be read
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor(name), at)
                self._sizes[name], end, kept = at, at, 0
            if kept < len(data):
                lost.append((entry, len(data) - kept))
            if entry and kept:
                index += INDEX_RECORD.pack(*entry._replace(offset=at, size=kept))
            at += kept
        if index:
            self._write_index(index)
        return lost

    def _rest_of(self, name: str) -> bytes:
        with (
            contextlib.suppress(OSError),
            open(fd_of(self._base, name, self._dir_fd), "rb", buffering=0) as file,
        ):
            file.seek(self._read_bytes)
            data = file.read(MAX_READ)
            self._read_bytes += len(data)
            return data
        return b""

    def _write_index(self, index: bytearray) -> None:
        """Write whole records, or none: the output itself is already written."""
        with contextlib.suppress(OSError):
            fd = self._descriptor(OUTPUT_INDEX)
            if torn := os.write(fd, index) % INDEX_RECORD.size:
                os.ftruncate(fd, os.lseek(fd, 0, os.SEEK_CUR) - torn)

    def _put(self, piece: Piece) -> None:
        """Overwrite the start of a file, or replace a whole file, if possible."""
        path, fds = os.path.join(self._base, piece.name), self._dir_fd
        place, flags = (path, 0) if piece.where == "over" else (f"{path}.new", os.O_CREAT)
        with contextlib.suppress(OSError):
            fd = os.open(place, os.O_WRONLY | os.O_NOFOLLOW | flags, 0o600, dir_fd=fds)
            with open(fd, "wb", buffering=0) as file:
                is_whole = file.write(piece.data) == len(piece.data)
                if place != path:  # only now: the old contents may occupy the last space on the disk
                    file.truncate(len(piece.data))
            if is_whole and place != path:
                os.replace(place, path, src_dir_fd=fds, dst_dir_fd=fds)

    def _descriptor(self, name: str) -> int:
        """Create a file, with its parent directories, and return its descriptor. Raises OSError."""
        if name not in self._open:
            limit = os.sysconf("SC_OPEN_MAX")  # -1 = none
            if len(self._open) >= (MAX_OPEN if limit < 0 else min(MAX_OPEN, limit // OPEN_SHARE)):
                os.close(self._open.pop(next(iter(self._open))))
            path, fds = os.path.join(self._base, name), self._dir_fd
            for i, letter in enumerate(name):  # not above the run directory, which may have been removed
                if letter == "/":
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(os.path.join(self._base, name[:i]), 0o700, dir_fd=fds)
            # A file that exists already and wasn't created here was planted.
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
            flags |= 0 if name in self._sizes else os.O_CREAT | os.O_EXCL
            self._open[name] = os.open(path, flags, 0o600, dir_fd=fds)
            self._sizes.setdefault(name, 0)
        return self._open[name]


class RunDirectory(LogWriter):
    """The run directory `parent`/`run_id`, created with mode 0700."""

    def __init__(self, parent: str, run_id: str) -> None:
        """Create the directory. Raises OSError."""
        super().__init__(os.path.join(parent, run_id))
        _make_directories(parent)
        os.mkdir(self.path, 0o700)
        self.run_id = run_id
        # Names relative to the open directory remain valid if it is renamed.
        self._base, self._dir_fd = "", os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self._locked: list[int] = []
        # systemd-tmpfiles deletes old files from /tmp, but nothing below a locked directory.
        lock(self._dir_fd, fcntl.LOCK_EX, LOCK_S)

    def claim(self, status: Status) -> None:
        """Write the first status and lock it, and reserve room for the summary. Raises OSError.

        As long as the status is locked, the controller counts as alive.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        claim = os.open(os.path.join(self.path, STATUS), flags, 0o600)
        self._locked.append(claim)
        lock(claim, fcntl.LOCK_EX, LOCK_S)
        os.write(claim, status_bytes(status))
        with open(os.open(os.path.join(self.path, f"{SUMMARY}.new"), flags, 0o600), "wb") as file:
            file.write(bytes(RESERVED_BYTES))

    def record(self, at: float, name: str, fields: Mapping[str, Any]) -> None:
        """Append an event: its name and fields, with seconds since the run began and wall time."""
        document = {"t": at, "time": round(time.time(), 6), "event": name, **fields}
        self.append(EVENTS, json.dumps(document, default=str).encode() + b"\n")

    def close(self) -> None:
        """Write out the queue, close all files, and release the locks."""
        super().close()
        within(FLUSH_S, self._unlock)

    def _unlock(self) -> None:
        while self._locked:
            os.close(self._locked.pop())

    def remove(self) -> None:
        """Delete the directory."""
        import shutil  # few run directories are temporary

        shutil.rmtree(self.path, ignore_errors=True)


def within(seconds: float, use: Callable[[], None]) -> bool:
    """Use files in a thread for at most `seconds`, since the disk, perhaps on NFS, may be stuck.

    Return whether it isn't. If it is, the files are closed, and locks released, when this process exits.
    """
    thread = threading.Thread(target=use, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads can be started
        use()
    else:
        thread.join(seconds)
    return not thread.is_alive()


def status_bytes(status: Status) -> bytes:
    """Return a status as JSON of constant length, padded with spaces."""
    text = json.dumps(document_of(status)).encode()
    return text.ljust(STATUS_BYTES - 1) + b"\n"


def _make_directories(path: str) -> None:
    """Create missing directories, writable only by the user, so that others can't plant links in them."""
    if len(path) > 4095:  # Linux doesn't accept longer paths
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    if not os.path.isdir(path):
        _make_directories(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o755)
