"""The one place where an agent waits, for descriptors and deadlines, and pipes that don't make it wait."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time
from collections.abc import Callable, Iterable

F_SETPIPE_SZ = 1031
"""Linux's number for this fcntl command; Python's fcntl module names it only since 3.10."""
SIZE = 1 << 20
"""Bytes that the pipes of a link hold, where it has some."""
KEPT = 8 << 20
"""Bytes: more than one block of output by far, and less than glibc still takes for a hint, 32 MiB."""


class Poller:
    """Calls handlers when descriptors become ready and when deadlines pass."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._deadlines: dict[str, tuple[float, Callable[[], object]]] = {}

    def watch(self, fd: int, handler: Callable[[], object], events: int = select.POLLIN) -> None:
        """Call `handler` whenever `fd` is ready for `events`, or has hung up."""
        self._handlers[fd] = handler
        self._poll.register(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`; one that is not watched is ignored."""
        if self._handlers.pop(fd, None):
            self._poll.unregister(fd)

    def watch_signals(self, signums: Iterable[int], handler: Callable[[bytes], object]) -> None:
        """Call `handler` with those that have come, a number in each byte; they do nothing else."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for signum in signums:
            signal.signal(signum, lambda *_: None)
        self.watch(read, lambda: handler(os.read(read, 4096)))

    def after(self, delay_s: float, name: str, handler: Callable[[], object]) -> None:
        """Call `handler` once in `delay_s` seconds; the same name again replaces the earlier deadline."""
        self._deadlines[name] = (time.monotonic() + delay_s, handler)

    def within(self, delay_s: float, name: str, handler: Callable[[], object]) -> None:
        """As `after`, but an earlier deadline of that name stays."""
        known = self._deadlines.get(name)
        if known is None or known[0] > time.monotonic() + delay_s:
            self.after(delay_s, name, handler)

    def cancel(self, name: str) -> None:
        """Forget the deadline `name`; one that is not set is ignored."""
        self._deadlines.pop(name, None)

    def turn(self) -> None:
        """Wait for the next event or deadline and handle all that are due."""
        for fd, _ in self._poll.poll(self._wait_ms()):
            handler = self._handlers.get(fd)  # an earlier handler of this turn may have closed it
            if handler:
                handler()
        now = time.monotonic()
        for name, (when, handler) in list(self._deadlines.items()):
            if when <= now and name in self._deadlines:
                del self._deadlines[name]
                handler()

    def _wait_ms(self) -> float | None:
        if not self._deadlines:
            return None
        first = min(when for when, _ in self._deadlines.values())
        return max(0.0, first - time.monotonic()) * 1000 + 1


def keep_memory() -> None:
    """Have this process keep up to twice KEPT of what it frees: output comes in blocks that are soon gone.

    glibc's malloc gives back what is free beyond twice the largest block it has unmapped so far. The next
    blocks then have their pages zeroed and faulted in again: a fifth of the time it takes to pass output on.
    Elsewhere this does nothing.
    """
    try:
        bytes(KEPT)  # mapped, unmapped at once, and never touched
    except MemoryError:
        pass  # a limit on address space: it was but a hint


def widen(pipe: int, size: int = SIZE) -> None:
    """Have a pipe hold so many bytes, where that is allowed."""
    try:
        fcntl.fcntl(pipe, F_SETPIPE_SZ, size)
    except OSError:
        pass  # not more than /proc/sys/fs/pipe-max-size; or it is a socket


def written(pipe: int, unsent: bytearray) -> bool:
    """Write what the pipe takes now, which is then gone from `unsent`; whether that was all.

    Raises OSError when nobody reads any more.
    """
    try:
        while unsent:
            del unsent[: os.write(pipe, unsent)]
    except BlockingIOError:
        return False
    return True
