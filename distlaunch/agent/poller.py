"""Nonblocking pipes, and the event loop of an agent, which is the only place where an agent waits."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterable

F_SETPIPE_SZ = 1031
"""The number of this fcntl command on Linux. Only Python 3.10 and later define it."""
SIZE = 1 << 20
"""Capacity in bytes of a link's pipes, if it has any."""
STEP_S = 1.0
"""Maximum seconds of a suspension that go unnoticed."""
KEPT = 8 << 20
"""Bytes of freed memory to keep. Far more than a block of output, but below glibc's maximum of 32 MiB."""


class Poller:
    """An event loop that calls handlers when descriptors become ready and when deadlines pass."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._deadlines: dict[str, tuple[float, Callable[[], object], bool]] = {}
        self._polled_at = time.monotonic()
        self.was_suspended = False
        """Whether this turn began late, so that what has been received may be old."""

    def watch(self, fd: int, handler: Callable[[], object], events: int = select.POLLIN) -> None:
        """Call `handler` whenever `fd` is ready for `events`, or has hung up."""
        self._handlers[fd] = handler
        self._poll.register(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`, if it is watched."""
        if self._handlers.pop(fd, None):
            self._poll.unregister(fd)

    def watch_signals(self, signums: Iterable[int], handler: Callable[[bytes], object]) -> None:
        """Call `handler` with the numbers of received signals, one per byte. Signals have no other effect."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for signum in signums:
            signal.signal(signum, lambda *_: None)
        self.watch(read, lambda: handler(os.read(read, 4096)))

    def after(self, delay_s: float, name: str, handler: Callable[[], object], awake: bool = False) -> None:
        """Call `handler` once, after `delay_s` seconds. This replaces a deadline with the same name.

        With `awake`, time in which this process is suspended doesn't count, except for up to STEP_S seconds.
        """
        self._deadlines[name] = (time.monotonic() + delay_s, handler, awake)

    def within(self, delay_s: float, name: str, handler: Callable[[], object], awake: bool = False) -> None:
        """Call `handler` after `delay_s` seconds, unless the name already has an earlier deadline."""
        known = self._deadlines.get(name)
        if known is None or known[0] > time.monotonic() + delay_s:
            self.after(delay_s, name, handler, awake)

    def count_suspensions(self, name: str) -> None:
        """Count the time in which this process is suspended toward the deadline `name`, if it is set."""
        if name in self._deadlines:
            when, handler, _ = self._deadlines[name]
            self._deadlines[name] = (when, handler, False)

    def cancel(self, name: str) -> None:
        """Cancel the deadline `name`, if it is set."""
        self._deadlines.pop(name, None)

    def turn(self) -> None:
        """Wait for the next event or deadline, and handle everything that is due."""
        wait_s = self._wait_s()
        ready = self._poll.poll(None if wait_s is None else wait_s * 1000 + 1)
        since, self._polled_at = self._polled_at, time.monotonic()
        late_s = self._polled_at - since - (wait_s or 0.0)
        self.was_suspended = wait_s is not None and late_s > STEP_S
        before = {**self._deadlines} if self.was_suspended else {}
        for fd, react in [(fd, self._handlers.get(fd)) for fd, _ in ready]:
            # An earlier handler of this turn may have closed it, and even opened another with this number.
            if react and self._handlers.get(fd) == react:
                react()
        for name, known in before.items():
            if known[2] and self._deadlines.get(name) is known:  # the handlers had their say
                self._deadlines[name] = (known[0] + late_s, *known[1:])
        now = time.monotonic()
        for name, (when, handler, _) in list(self._deadlines.items()):
            if when <= now and name in self._deadlines:
                del self._deadlines[name]
                handler()

    def _wait_s(self) -> float | None:
        if not self._deadlines:
            return None
        first = min(when for when, _, _ in self._deadlines.values())
        wait_s = max(0.0, first - time.monotonic())
        return min(wait_s, STEP_S) if any(awake for _, _, awake in self._deadlines.values()) else wait_s


def keep_memory() -> None:
    """Make this process keep up to twice KEPT bytes of freed memory, since output uses short-lived blocks.

    glibc's malloc returns free memory to the kernel beyond twice the largest block that it has unmapped so
    far. Each new block would then be zeroed and faulted in again, which takes a fifth of the time spent
    forwarding output. With other libraries, this function has no effect.
    """
    try:
        bytes(KEPT)  # mapped, then unmapped at once, and never touched
    except MemoryError:
        pass  # address space is limited, and this is only an optimization


def make_room(wanted: int) -> None:
    """Raise the soft limit on descriptors to `wanted`, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def widen(pipe: int, size: int = SIZE) -> None:
    """Enlarge a pipe, if permitted."""
    try:
        fcntl.fcntl(pipe, F_SETPIPE_SZ, size)
    except OSError:
        pass  # more than /proc/sys/fs/pipe-max-size, or a socket


def written(pipe: int, unsent: bytearray) -> bool:
    """Write as much of `unsent` as the pipe accepts, and delete that part. Return whether nothing is left.

    Raises OSError if the reader is gone.
    """
    try:
        while unsent:
            del unsent[: os.write(pipe, unsent)]
    except BlockingIOError:
        return False
    return True
