"""The agent's private folder on its node, for what workers leave to be read, and where such things may be.

Those are error records, as torch's @record writes them, and dumps of torch's flight recorder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from distlaunch.agent.wire import MAX_OUTPUT

SPARE_PLACES = ("/tmp", "/var/tmp")
"""Where to look when TMPDIR can't be written."""
MEMORY = "/dev/shm"
"""The last place of all: what is there is the workers' memory."""


MAX_ERROR_RECORD = 1 << 18
MAX_FLIGHT = 32 << 20
"""Bytes that are taken of one worker's error record, and of its flight recorder's dump."""


class NoPlaceError(Exception):
    """The folder can't be made anywhere; the text names what was tried."""


def places(tmpdir: str | None = None) -> list[str]:
    """The folders to try, best first: the job's TMPDIR, else the node's, else others on a disk."""
    wanted = [tmpdir or os.environ.get("TMPDIR") or SPARE_PLACES[0], *SPARE_PLACES]
    return list(dict.fromkeys(map(os.path.abspath, wanted)))


class Folder:
    """The folder, mode 0700. Its name, which nobody can guess, is fixed; where it is, `make` decides.

    Made before the agent is forked: the guardian hears through a pipe where the agent puts it, before the
    agent does, so that it can delete what a killed agent leaves.
    """

    def __init__(self) -> None:
        self._name = "distlaunch-%s" % os.urandom(8).hex()
        self._told, self._tell = os.pipe()
        os.set_blocking(self._told, False)
        self._said: set[str] = set()
        self.path = ""
        self.places = places()

    @property
    def inner(self) -> str:
        """Where workers may make files and folders that are deleted with the folder."""
        return os.path.join(self.path, "inner")

    def make(self, tmpdir: str | None = None) -> None:
        """Have the folder in the first place that can be written. Raises `NoPlaceError`."""
        self.places = places(tmpdir)
        if self.path and os.path.isdir(self.path):
            return
        refused = []
        for place in (*self.places, MEMORY):
            path = os.path.join(place, self._name)
            if path not in self._said:  # or the pipe would fill in the end
                self._said.add(path)
                os.write(self._tell, os.fsencode(path) + b"\0")
            try:
                _make(path)
                self.path = path
                return
            except OSError as error:
                remove(path)
                refused.append("%s: %s" % (place, error.strerror))
        raise NoPlaceError(
            "can't create a directory for error records in %s; set TMPDIR in env" % "; ".join(refused)
        )

    def write(self, name: str, text: str) -> None:
        """Have a file in the folder with that text, whole from the start; a full disk must not hurt."""
        path = os.path.join(self.path, name)
        try:
            with open(path + ".new", "w") as file:
                file.write(text)
            os.replace(path + ".new", path)
        except OSError:
            pass

    def flight_prefix(self, generation: int) -> str:
        """Where the workers of a generation leave their dumps: torch adds the rank."""
        return os.path.join(self.path, "flight-%d-" % generation)

    def flight_pieces(self, generation: int) -> Iterator[tuple[int, bytes]]:
        """Yield (rank, bytes) of all dumps of a generation, in order, at most MAX_OUTPUT bytes at once."""
        prefix = self.flight_prefix(generation)
        for name in sorted(os.listdir(self.path)):
            path = os.path.join(self.path, name)
            rank = path[len(prefix) :]
            if path.startswith(prefix) and rank.isdigit() and int(rank) <= 0xFFFF:
                for piece in read_left(path, MAX_FLIGHT):
                    yield int(rank), piece

    def remove(self) -> None:
        """Delete the folder: the agent's part."""
        if self.path:
            remove(self.path)

    def close(self) -> None:
        """Nobody tells or asks any more where the folder is."""
        os.close(self._told)
        os.close(self._tell)

    def remove_left(self) -> None:
        """Delete the folder wherever the agent, which has ended, has made it: the guardian's part."""
        try:
            told = os.read(self._told, 1 << 16)
        except BlockingIOError:
            return
        for path in filter(None, told.split(b"\0")):
            remove(os.fsdecode(path))


def read_left(path: str, most: int) -> Iterator[bytes]:
    """Yield what a worker has left in a file, `most` bytes of it; nothing where that is no file."""
    try:
        # A job may have put anything there: a pipe would block, a link would lead elsewhere.
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
    """A folder that was checked to have room for a file."""
    if not os.path.isdir(path):
        os.mkdir(path, 0o700)
    probe = os.path.join(path, "probe")
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, b"\0")
    finally:
        os.close(fd)
        os.unlink(probe)


def remove(folder: str) -> None:
    """Delete the folder and its files, if it is there."""
    inner = os.path.join(folder, "inner")
    if os.path.isdir(inner):
        import shutil  # few jobs leave folders

        shutil.rmtree(inner, ignore_errors=True)
    try:
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
    except OSError:
        pass  # never made, or a job put a folder of its own there: that is not ours to delete


def unlinked_file(place: str) -> int:
    """A descriptor of a new file in `place` that has no name any more. Raises OSError."""
    path = os.path.join(place, "distlaunch-%s" % os.urandom(8).hex())
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    return fd
