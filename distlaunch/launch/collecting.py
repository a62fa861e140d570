"""Files sent by nodes at the end of a job, written to `collected/NODE` in the run directory.

Nodes don't choose where files are written. Each path must be new, and below its node's directory. A node
can't send more than it announces. Files that are incomplete or don't fit on the disk are removed. Until then,
the directory has another name, which it keeps if this process is killed.
"""

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from distlaunch.agent.collection import MAX_FILES, MAX_PATH
from distlaunch.agent.messages import FileBegins, FilesEnd
from distlaunch.agent.tree import stays_inside
from distlaunch.agent.wire import ProtocolError
from distlaunch.job.spec import Collect
from distlaunch.observers.outlet import CAPACITY
from distlaunch.observers.run_directory import COLLECTED, COLLECTING, FLUSH_S, LogWriter
from distlaunch.wording import counted, cut, listed, size_words

FULL = {os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT)}
SPARE = 2 * CAPACITY
"""Bytes to keep free on the disk for the run's other files."""
MAX_LISTED, SHOWN = 1000, 100
"""Maximum files listed in summary.json, and maximum characters of a path in messages."""


class _Node:
    """A node's files with their sizes. `missing` bytes of the last file have yet to arrive.

    `refused` contains the files that don't fit on the disk. `room` is the number of bytes left until
    `collect.limit`.
    """

    def __init__(self, label: str, room: int) -> None:
        self.label, self.sizes = label, dict[str, int]()
        self.room, self.missing, self.refused = room, 0, set[str]()
        self.end = FilesEnd(0, (("other files", "the node did not send them"),), 0)

    @property
    def last(self) -> str:
        """Return the file that the node announced last; "" = none yet."""
        return next(reversed(self.sizes), "")


class Files:
    """The writer of files to `collected` in a run directory, at most `collect.limit` bytes per node."""

    def __init__(self, directory: str, collect: Collect) -> None:
        self._directory, self._collect = directory, collect
        self._place = os.path.join(directory, COLLECTING)
        with suppress(OSError):  # a full disk; the writer tries again
            os.mkdir(self._place, 0o700)
        self._writer = LogWriter(directory)
        self._writer.patience_s = FLUSH_S  # nothing else is urgent anymore
        self._nodes: dict[int, _Node] = {}
        self._full = False

    def take(self, number: int, label: str, what: FileBegins | FilesEnd | bytes) -> None:
        """Handle an announced file, a piece of it, or the end of a node's files. Raises `ProtocolError`."""
        node = self._nodes.setdefault(number, _Node(label, self._collect.limit))
        try:
            if isinstance(what, FilesEnd):
                node.end = what
                return
            if isinstance(what, FileBegins):
                self._begin(node, what)
            self._add(node, what if isinstance(what, bytes) else b"")
        except ProtocolError as error:
            node.end = FilesEnd(0, (("other files", f"protocol error: {error}"),), 0)
            raise

    def _begin(self, node: _Node, file: FileBegins) -> None:
        """Accept the announcement of a file, unless its path or size is invalid. Check whether it fits."""
        shown = cut(ascii(file.path), SHOWN)
        fresh = file.path not in node.sizes and len(node.sizes) < MAX_FILES
        path = f"{node.label}/{file.path}"
        if not fresh or len(path) > 2 * MAX_PATH or not stays_inside(path):
            raise ProtocolError(f"{shown} is not the path of a collected file")
        if not 0 <= file.size <= node.room:
            raise ProtocolError(f"{shown} exceeds collect.limit")
        node.sizes[file.path] = node.missing = file.size
        node.room -= file.size
        with suppress(OSError):  # the directory may be gone, which is noticed when the file is written
            disk = os.statvfs(self._directory)
            expected = sum(each.missing for each in self._nodes.values() if each.last not in each.refused)
            if expected + SPARE > disk.f_bavail * disk.f_frsize:
                node.refused.add(file.path)

    def _add(self, node: _Node, piece: bytes) -> None:
        """Write a piece of the file that a node announced last, unless the disk is full."""
        if len(piece) > node.missing:
            raise ProtocolError("a collected file is larger than announced")
        node.missing -= len(piece)
        if self._full or not node.last or node.last in node.refused:
            return
        self._writer.append(f"{COLLECTING}/{node.label}/{node.last}", piece)
        self._full = self._writer.trouble in FULL  # since any earlier piece: the writer is a thread
        if self._full:
            self._sift()  # immediately makes room for the run's other files

    def _sift(self) -> list[dict[str, Any]] | None:
        """Close all files, remove incomplete ones, and return the others as JSON objects.

        Return None if the disk is stalled, because removing a file could take forever.
        """
        if not self._writer.flush():
            return None
        self._writer.close()
        kept = []
        for node in self._nodes.values():
            for path, size in node.sizes.items():
                place = os.path.join(self._place, node.label, path)
                with suppress(OSError):
                    if os.lstat(place).st_size == size:
                        kept.append({"node": node.label, "path": path, "size": size})
                    else:
                        os.unlink(place)
        return kept

    def close(self, expected: Mapping[int, str]) -> tuple[list[dict[str, Any]], list[str]]:
        """Return at most MAX_LISTED complete files, as JSON objects, and messages about all files.

        `expected` maps the nodes that should have sent files to their names. Called once, after the run.
        """
        for number in expected.keys() - self._nodes.keys():
            node = self._nodes[number] = _Node(expected[number], 0)
            node.end = FilesEnd(0, (("all files", "the node sent none"),), 0)
        self._nodes = dict(sorted(self._nodes.items()))
        kept, left_out = self._sift(), dict[str, list[str]]()
        if kept is not None:
            self._rename()
        kept = kept or []
        there = {(file["node"], file["path"]) for file in kept}
        for node in self._nodes.values():
            missing = [path for path in node.sizes if (node.label, path) not in there]
            if text := self._left_out(node, missing):
                left_out.setdefault(text, []).append(node.label)
        size = size_words(sum(file["size"] for file in kept))
        done = f"collected {counted(len(kept), 'file')} ({size}) into {self._place}"
        lines = [f"not collected from {listed(labels)}: {text}" for text, labels in left_out.items()]
        return kept[:MAX_LISTED], [done, *lines] if kept else lines

    def _rename(self) -> None:
        """Give the directory its final name, or remove it if it is empty."""
        final = os.path.join(self._directory, COLLECTED)
        with suppress(OSError):
            os.rmdir(self._place)
        with suppress(OSError):
            os.rename(self._place, final)
            self._place = final

    def _left_out(self, node: _Node, missing: list[str]) -> str:
        """List a node's files that are `missing` or were not sent, with reasons; "" if there are none."""
        full = f"{os.strerror(errno.ENOSPC)}: {size_words(SPARE)} are kept free for the run's other files"
        why = self._writer.trouble if self._writer.lost else "is incomplete"
        reasons = {path: full if path in node.refused else why for path in missing} | dict(node.end.left_out)
        # A name may have line breaks.
        names = [
            " ".join(f"{cut(path, SHOWN)} ({cut(text, SHOWN)})".split()) for path, text in reasons.items()
        ]
        return listed(names) + (f" and {node.end.more} more" if node.end.more else "")
