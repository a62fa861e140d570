"""The queue of frames to send. Control frames go first, output stays in order, and memory is bounded.

A slow link never slows a worker. Output beyond MEMORY bytes goes to unlinked files, in the first directory
with enough space. Output beyond DISK bytes is dropped and counted.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Callable

from distlaunch.agent import messages, scratch, wire
from distlaunch.agent.messages import OutputLost
from distlaunch.agent.poller import Poller

MEMORY, DISK, SEGMENT = 2 << 20, 1 << 30, 64 << 20
"""Maximum bytes of output in memory, of output in files, and of one file."""
HOLD_S = 0.1
"""Seconds within which a link must accept half of the outbox's memory. Workers don't wait any longer."""


class Spool:
    """A FIFO of encoded frames: in memory up to MEMORY bytes, then in unlinked files up to DISK bytes.

    The files are in the first of `directory.places` with enough space. `is_damaged` is set once one could not
    be read back, which may happen on a network file system that reports a full disk late.
    """

    def __init__(self, directory: scratch.Directory) -> None:
        self._directory = directory
        self._entries: deque[bytes] = deque()
        self._segments: deque[Segment] = deque()
        self._in_memory = self._on_disk = 0
        self.is_damaged = False

    def __bool__(self) -> bool:
        return bool(self._entries) or bool(self._segments)

    @property
    def left(self) -> int:
        """Return the number of bytes that still fit in memory; 0 while any frame is in a file."""
        return 0 if self._segments else MEMORY - self._in_memory

    def append(self, entry: bytes) -> bool:
        """Add an entry. Return False if there was no room and the entry was dropped."""
        if len(entry) <= self.left:
            self._entries.append(entry)
            self._in_memory += len(entry)
            return True
        if self._on_disk + len(entry) > DISK:
            return False
        last = self._segments[-1] if self._segments else None
        extended = last is not None and last.written < SEGMENT and last.append(entry)
        if not (extended or self._start_segment(entry)):
            return False
        self._on_disk += len(entry)
        return True

    def _start_segment(self, entry: bytes) -> bool:
        """Add an entry to a new segment. Return False if no directory is writable and has room."""
        for place in self._directory.places:
            try:
                segment = Segment(place)
            except OSError:
                continue
            if segment.append(entry):
                self._segments.append(segment)
                return True
            segment.close()
        return False

    def pop(self) -> bytes:
        """Remove and return the oldest frame, or b"" if its file can't be read and is dropped."""
        if self._entries:
            entry = self._entries.popleft()
            self._in_memory -= len(entry)
            return entry
        segment = self._segments[0]
        entry = segment.pop()
        self._on_disk -= len(entry) or segment.written - segment.read
        if segment.read == segment.written or not entry:
            self.is_damaged = self.is_damaged or not entry
            self._segments.popleft().close()
        return entry

    def close(self) -> None:
        """Discard everything."""
        self._entries.clear()
        self._in_memory = self._on_disk = 0
        while self._segments:
            self._segments.popleft().close()


class Segment:
    """A part of a spool on disk, freed once all `written` bytes have been `read`.

    Raises OSError if the directory isn't writable.
    """

    def __init__(self, place: str) -> None:
        self._fd = scratch.unlinked_file(place)
        self.read = self.written = 0

    def append(self, entry: bytes) -> bool:
        """Add a frame. Return False if there is no room for all of it."""
        try:
            if os.pwrite(self._fd, entry, self.written) < len(entry):
                return False
        except OSError:
            return False
        self.written += len(entry)
        return True

    def pop(self) -> bytes:
        """Remove and return the oldest frame, or b"" if it can't be read."""
        try:
            header = os.pread(self._fd, wire.HEADER.size, self.read)
            size = len(header) + wire.HEADER.unpack(header)[-1]
            entry = os.pread(self._fd, size, self.read)
        except (OSError, struct.error):
            return b""
        if len(entry) < size:
            return b""
        self.read += size
        return entry

    def close(self) -> None:
        """Free the space on disk."""
        os.close(self._fd)


class Outbox:
    """A queue that orders frames and writes them to the link's descriptor, which must be nonblocking.

    `form` encodes each frame. `hello` is written together with the first frame. Waiting control frames are
    also written together, because srun delays a second write by 40 ms. `_current` is the rest of the frame
    being written. `_lost` counts dropped bytes by channel.
    """

    def __init__(
        self,
        node: int,
        directory: scratch.Directory,
        form: Callable[[bytes], bytes] | None = None,
        hello: bytes = b"",
    ) -> None:
        self.node, self._form, self._hello = node, form, hello
        self._control: list[bytes] = []
        self._spool = Spool(directory)
        self._current = memoryview(b"")
        self._lost: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._current) or bool(self._control) or bool(self._spool)

    @property
    def is_full(self) -> bool:
        """Return whether further output may have to be spooled to a file."""
        return self._spool.left < wire.HEADER.size + wire.MAX_OUTPUT

    @property
    def has_room(self) -> bool:
        """Return whether at least half of the memory for output is free."""
        return self._spool.left >= MEMORY // 2

    @property
    def is_damaged(self) -> bool:
        """Return whether output couldn't be read back from a file."""
        return self._spool.is_damaged

    @property
    def has_output(self) -> bool:
        """Return whether output is waiting to be sent."""
        return bool(self._spool)

    def report(self, report: tuple[object, ...]) -> None:
        """Queue a report."""
        self.post(messages.as_object(report))

    def post(self, message: wire.Message) -> None:
        """Queue a control frame with this JSON object."""
        self._control.append(wire.encode_message(self.node, message))

    def discard(self) -> None:
        """Discard everything, because the link is gone."""
        self._control.clear()
        self._spool.close()
        self._current = memoryview(b"")

    def output(self, attempt: int, channel: int, data: bytes | memoryview) -> None:
        """Queue output of a worker, at most MAX_OUTPUT bytes, or count it as lost."""
        if not self._spool.append(wire.encode(self.node, attempt, channel, data)):
            self._lost[channel] = self._lost.get(channel, 0) + len(data)

    def flight(self, attempt: int, rank: int, data: bytes) -> None:
        """Queue a piece of a flight recorder dump, at most MAX_OUTPUT bytes, if there is room."""
        self._spool.append(wire.encode(self.node, attempt, rank, data, wire.FLIGHT))

    def file(self, data: bytes) -> None:
        """Queue a piece of a file, at most MAX_OUTPUT bytes, if there is room. b"" is a keepalive."""
        self._spool.append(wire.encode(self.node, 0, 0, data, wire.FILE))

    def report_in_order(self, report: tuple[object, ...]) -> None:
        """Queue a report behind all output and pieces of files, if there is room."""
        self._spool.append(wire.encode_message(self.node, messages.as_object(report)))

    def losses(self) -> list[OutputLost]:
        """Return reports of output lost since the last call."""
        lost, self._lost = self._lost, {}
        return [
            OutputLost(self.node, channel // 2, channel % 2, size) for channel, size in sorted(lost.items())
        ]

    def write(self, link: int) -> int:
        """Write until the link would block, and return the number of bytes written.

        Raises OSError if the link is gone.
        """
        written = 0
        while self:
            if not self._current:
                frame = self._next()
                if not frame:
                    continue
                self._current = memoryview(self._hello + (self._form(frame) if self._form else frame))
                self._hello = b""
            try:
                sent = os.write(link, self._current)
            except BlockingIOError:
                break
            written += sent
            self._current = self._current[sent:]
        return written

    def _next(self) -> bytes:
        if not self._control:
            return self._spool.pop()
        frames = b"".join(self._control)
        self._control.clear()
        return frames


class Flow:
    """Backpressure: decides whether a worker's pipe is read now, or only once the outbox has room again.

    A pipe waits for at most HOLD_S seconds, and doesn't wait again until the link has caught up.
    """

    def __init__(self, poller: Poller, outbox: Outbox) -> None:
        self._poller, self._outbox = poller, outbox
        self._held: dict[int, Callable[[], object]] = {}
        self._is_slow = False

    def holds(self, pipe: int, read: Callable[[], object]) -> bool:
        """Return whether a pipe with data must wait. If so, `read` is called later."""
        if self._is_slow or not self._outbox.is_full:
            return False
        if not self._held:
            self._poller.after(HOLD_S, "flow", self._give_up)
        self._held[pipe] = read
        self._poller.forget(pipe)
        return True

    def forget(self, pipe: int) -> None:
        """Forget a pipe that was closed."""
        self._held.pop(pipe, None)

    def sent(self) -> None:
        """Note that the link has accepted data."""
        if not self._outbox.has_output:
            self._is_slow = False
        if self._held and self._outbox.has_room:
            self._release()

    def _give_up(self) -> None:
        self._is_slow = True
        self._release()

    def _release(self) -> None:
        self._poller.cancel("flow")
        held, self._held = self._held, {}
        for pipe, read in held.items():
            self._poller.watch(pipe, read)
