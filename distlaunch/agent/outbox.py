"""What the agent has still to send: control frames first, output in order, bounded in memory.

A worker is never slowed by a slow link: output beyond MEMORY bytes goes to an unlinked file, beyond
DISK bytes it is dropped and counted.
"""

import os
from collections import deque

from distlaunch.agent import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from io import FileIO
    from typing import Deque, Dict, List, Optional

    from distlaunch.agent.wire import Message

MEMORY = 2 << 20
DISK = 1 << 30


class Spool:
    """A FIFO of encoded frames: in memory up to MEMORY bytes, then in an unlinked file up to DISK bytes."""

    def __init__(self, memory: int = MEMORY, disk: int = DISK) -> None:
        self._memory, self._disk = memory, disk
        self._entries: "Deque[bytes]" = deque()
        self._held = 0
        self._file: "Optional[FileIO]" = None
        self._read = self._written = 0

    def __bool__(self) -> bool:
        return bool(self._entries) or self._read < self._written

    def append(self, entry: bytes) -> bool:
        """Add one entry; False when there is no room and it was dropped."""
        if self._read == self._written and self._held + len(entry) <= self._memory:
            self._entries.append(entry)
            self._held += len(entry)
            return True
        return self._append_to_file(entry)

    def pop(self) -> bytes:
        """The oldest frame."""
        if self._entries:
            entry = self._entries.popleft()
            self._held -= len(entry)
            return entry
        return self._pop_from_file()

    def _append_to_file(self, entry: bytes) -> bool:
        if self._written + len(entry) > self._disk:
            return False
        try:
            if self._file is None:
                self._file = _unlinked_file()
            if os.pwrite(self._file.fileno(), entry, self._written) < len(entry):
                return False
        except OSError:  # the node's disk is full or forbidden: the caller counts the loss
            return False
        self._written += len(entry)
        return True

    def _pop_from_file(self) -> bytes:
        assert self._file is not None
        header = os.pread(self._file.fileno(), wire.HEADER.size, self._read)
        size = len(header) + wire.HEADER.unpack(header)[3]
        entry = os.pread(self._file.fileno(), size, self._read)
        self._read += size
        if self._read == self._written:
            self._file.truncate(0)
            self._read = self._written = 0
        return entry


def _unlinked_file() -> "FileIO":
    import tempfile  # costs 10 ms, and few jobs outrun their link

    return tempfile.TemporaryFile(buffering=0)


class Outbox:
    """Orders and writes frames to the link's descriptor, which must not block."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._control: "Deque[bytes]" = deque()
        self._spool = Spool()
        self._current = memoryview(b"")
        self._lost: "Dict[int, int]" = {}

    def __bool__(self) -> bool:
        return bool(self._current) or bool(self._control) or bool(self._spool)

    def report(self, message: "Message") -> None:
        """Queue one control frame."""
        self._control.append(wire.encode_message(self._node, message))

    def discard(self) -> None:
        """Forget everything: nobody will read it."""
        self._control.clear()
        self._spool = Spool()
        self._current = memoryview(b"")

    def output(self, channel: int, data: bytes) -> None:
        """Queue output of a worker, at most MAX_OUTPUT bytes, or count its loss."""
        if not self._spool.append(wire.encode_output(self._node, channel, data)):
            self._lost[channel] = self._lost.get(channel, 0) + len(data)

    def losses(self) -> "List[Message]":
        """`dropped` reports of what was lost since the last call."""
        lost, self._lost = self._lost, {}
        return [
            {"op": "dropped", "local_rank": channel // 2, "stream": channel % 2, "bytes": size}
            for channel, size in sorted(lost.items())
        ]

    def write(self, link: int) -> int:
        """Write until the link would block; the number of bytes. Raises OSError when the link is gone."""
        written = 0
        while self:
            if not self._current:
                self._current = memoryview(self._next())
            try:
                sent = os.write(link, self._current)
            except BlockingIOError:
                break
            written += sent
            self._current = self._current[sent:]
        return written

    def _next(self) -> bytes:
        return self._control.popleft() if self._control else self._spool.pop()
