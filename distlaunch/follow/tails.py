"""Files that grow: what has come since the last look."""

import json
import os
from typing import Any

from distlaunch.observers.run_folder import INDEX_RECORD, OUTPUT_INDEX, Entry, index_entries
from distlaunch.replay.lives import HistoryError

PIECE = 1 << 20
"""Bytes that are read at once."""


class _Tail:
    """The bytes of a file that may not be there yet; `position` is where the next are."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None
        self.position = 0

    def fresh(self, size: int = PIECE) -> bytes:
        """Up to so many bytes that come next."""
        if self._fd is None:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return b""
        data = os.pread(self._fd, size, self.position)
        self.position += len(data)
        return data

    def close(self) -> None:
        """Let the file go."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Lines:
    """A file of JSON lines: each once, when its end has come."""

    def __init__(self, path: str) -> None:
        self._tail = _Tail(path)
        self._partial = b""

    def fresh(self) -> list[dict[str, Any]]:
        """Those that have come since. Raises `HistoryError` for one that is none."""
        lines: list[dict[str, Any]] = []
        while data := self._tail.fresh():
            *whole, self._partial = (self._partial + data).split(b"\n")
            try:
                lines += map(json.loads, whole)
            except ValueError:
                raise HistoryError("a line is not JSON") from None
        return lines

    def close(self) -> None:
        """Let the file go."""
        self._tail.close()


class Entries:
    """The index of a run's output."""

    def __init__(self, folder: str) -> None:
        self._tail = _Tail(os.path.join(folder, OUTPUT_INDEX))

    def fresh(self) -> list[Entry]:
        """Some that have come since, in their order; none if there are none."""
        record = INDEX_RECORD.size
        data = self._tail.fresh(PIECE // record * record)
        whole = len(data) // record * record
        self._tail.position -= len(data) - whole
        return index_entries(data[:whole])

    def close(self) -> None:
        """Let the file go."""
        self._tail.close()
