"""An agent's private directory on its node, for error records and flight recorder dumps of workers.

Error records are written by torch's @record.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator

from distlaunch.agent import procfs
from distlaunch.agent.wire import MAX_OUTPUT

SPARE_PLACES = ("/tmp", "/var/tmp")
"""Directories to try if TMPDIR isn't writable."""
MEMORY = "/dev/shm"
"""The last directory to try, because its files use the workers' memory."""


PREFIX = "distlaunch-agent-"
_NEW = ".new"
"""Suffix of a directory that is being created."""
MAX_ERROR_RECORD = 1 << 18
MAX_FLIGHT = 32 << 20
"""Maximum bytes to read from a worker's error record, and from its flight recorder dump."""


class NoPlaceError(Exception):
    """The directory can't be created anywhere. The text lists the attempts."""


def places(tmpdir: str | None = None) -> list[str]:
    """Return the directories to try, best first: the TMPDIR of the job or node, then others on disk."""
    wanted = [tmpdir or os.environ.get("TMPDIR") or SPARE_PLACES[0], *SPARE_PLACES]
    return list(dict.fromkeys(map(os.path.abspath, wanted)))


def no_place(refused: dict[str, str]) -> str:
    """Return an error message that lists the unusable places, each with the reason."""
    tried = "; ".join(["%s: %s" % each for each in refused.items()])
    return "can't create a directory for error records in %s; set TMPDIR (env.TMPDIR in a job file)" % tried


class Directory:
    """An agent's directory, with mode 0700. Its name is random and never changes. `make` picks its parent.

    The object is constructed before the agent is forked. Before the agent creates the directory, it sends the
    path to the guardian through a pipe. If the agent is killed, the guardian can then delete the directory.
    Through another pipe, it tells the guardian how long it may take to exit.
    """

    def __init__(self) -> None:
        self._name = _prefix() + os.urandom(8).hex()
        self._paths_read, self._paths_write = os.pipe()
        self._limits_read, self._limits_write = os.pipe()
        for pipe in (self._paths_read, self._limits_read):
            os.set_blocking(pipe, False)
        self._limit_s = 0.0
        self._announced: set[str] = set()
        self.path = ""  # until `make` has created it
        self.places = places()

    @property
    def inner(self) -> str:
        """Return the subdirectory for the workers' temporary files."""
        return os.path.join(self.path, "inner")

    def make(self, tmpdir: str | None = None) -> None:
        """Create the directory in the first writable place, unless it exists. Raises `NoPlaceError`.

        Called before each attempt. The job may set `tmpdir`.
        """
        self.places = places(tmpdir)
        if self.path and os.path.isdir(self.path):
            return
        refused = {}
        for place in (*self.places, MEMORY):
            path = os.path.join(place, self._name)
            if path not in self._announced:  # otherwise the pipe would fill up eventually
                self._announced.add(path)
                os.write(self._paths_write, os.fsencode("%s\0%s\0" % (path, path + _NEW)))
            try:
                _make(path)
                self.path = path
                return
            except OSError as error:
                remove(path + _NEW)
                refused[place] = str(error.strerror)
        raise NoPlaceError(no_place(refused))

    def limit_agent(self, limit_s: float) -> None:
        """Tell the guardian how long the agent may take to exit once the link has been closed."""
        if limit_s != self._limit_s:  # otherwise the pipe would fill up eventually
            self._limit_s = limit_s
            os.write(self._limits_write, struct.pack("d", limit_s))

    def agents_limit_s(self) -> float:
        """Return the limit that the agent last reported; infinity = none. Called by the guardian, once."""
        try:
            return float(struct.unpack("d", os.read(self._limits_read, 1 << 16)[-8:])[0])
        except BlockingIOError:
            return float("inf")

    def write(self, name: str, text: str) -> None:
        """Write a file into the directory atomically. Errors, such as a full disk, are ignored."""
        path = os.path.join(self.path, name)
        try:
            with open(path + ".new", "w") as file:
                file.write(text)
            os.replace(path + ".new", path)
        except OSError:
            pass

    def flight_prefix(self, attempt: int) -> str:
        """Return the path prefix for flight recorder dumps of an attempt. torch appends the rank."""
        return os.path.join(self.path, "flight-%d-" % attempt)

    def flight_pieces(self, attempt: int) -> Iterator[tuple[int, bytes]]:
        """Yield (rank, bytes) of all dumps of an attempt, in order, at most MAX_OUTPUT bytes at a time."""
        prefix = self.flight_prefix(attempt)
        for name in sorted(procfs.names(self.path)):
            path = os.path.join(self.path, name)
            rank = path[len(prefix) :]
            if path.startswith(prefix) and rank.isdigit() and int(rank) <= 0xFFFF:
                for piece in read_left(path, MAX_FLIGHT):
                    yield int(rank), piece

    def remove(self) -> None:
        """Delete the directory. Called by the agent."""
        if self.path:
            remove(self.path)

    def remove_left(self) -> None:
        """Delete the directory, wherever it was created. Called by the guardian once the agent has exited."""
        try:
            paths = os.read(self._paths_read, 1 << 16)
        except BlockingIOError:
            return
        for path in filter(None, paths.split(b"\0")):
            remove(os.fsdecode(path))


def read_left(path: str, most: int) -> Iterator[bytes]:
    """Yield up to `most` bytes of a file left by a worker; nothing if it isn't a regular file."""
    try:
        # A job may have put anything there. A pipe would block, and a symlink would lead elsewhere.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                for _ in range(most // MAX_OUTPUT):
                    piece = file.read(MAX_OUTPUT)
                    if not piece:
                        return
                    yield piece
    except OSError:
        return


def _make(path: str) -> None:
    """Create a directory, locked until this process exits, and check that a file can be written there.

    It has its name only once it is locked. Otherwise, another agent might take it for abandoned.
    """
    new = path + _NEW
    os.mkdir(new, 0o700)
    lock, probe = _lock(new), os.path.join(new, "probe")
    try:
        with open(probe, "wb", buffering=0) as file:
            file.write(b"\0")
        os.unlink(probe)
        os.rename(new, path)
    except OSError:
        if lock >= 0:
            os.close(lock)
        raise


def _lock(path: str) -> int:
    """Lock a directory of this user, and return its descriptor, or -1 if that isn't possible."""
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if os.fstat(fd).st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    except OSError:
        pass  # not a directory, already locked, or on a file system without locks
    if fd >= 0:
        os.close(fd)
    return -1


def _prefix() -> str:
    """Return the beginning of the names of agents' directories on this host, in these namespaces."""
    here = "%s %s" % (os.uname().nodename, procfs.kernel()[0])
    return "%s%08x-" % (PREFIX, zlib.crc32(here.encode()))


def abandoned() -> Iterator[tuple[str, int]]:
    """Yield the directories of agents that were killed together with their guardians, and lock them.

    The descriptors are for `remove_abandoned`. On a shared disk, other hosts and containers find their own.
    """
    prefix = _prefix()
    for place in (*places(), MEMORY):
        try:
            names = os.listdir(place)
        except OSError:
            continue
        for name in names:
            number = name[len(prefix) :]
            if name.startswith(prefix) and len(number) == 16 and not number.strip("0123456789abcdef"):
                path = os.path.join(place, name)
                fd = _lock(path)
                if fd >= 0:
                    yield path, fd


def remove_abandoned(found: Iterable[tuple[str, int]]) -> None:
    """Delete directories that were `abandoned` before `sweep.kill_orphans` was called.

    The orphans of agents that were killed later keep their directories, by which the next agent knows them.
    """
    for path, fd in found:
        remove(path)
        os.close(fd)


def remove(directory: str) -> None:
    """Delete an agent's directory and everything in it, if it exists."""
    try:
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
    except OSError:
        if os.path.isdir(directory):
            import shutil  # few jobs leave directories

            shutil.rmtree(directory, ignore_errors=True)


def unlinked_file(place: str) -> int:
    """Return the descriptor of a new unlinked file in the directory `place`. Raises OSError."""
    path = os.path.join(place, "distlaunch-%s" % os.urandom(8).hex())
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return fd
