"""Descriptors with their handlers and deadlines with theirs: the one place where an agent waits."""

import os
import select
import time

from distlaunch.agent.lean import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, Iterable, Optional, Tuple

    Handler = Callable[[], object]


class Poller:
    """Calls handlers when descriptors become ready and when deadlines pass."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: "Dict[int, Handler]" = {}
        self._deadlines: "Dict[str, Tuple[float, Handler]]" = {}

    def watch(self, fd: int, handler: "Handler", events: int = select.POLLIN) -> None:
        """Call `handler` whenever `fd` is ready for `events`, or has hung up."""
        self._handlers[fd] = handler
        self._poll.register(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`; one that is not watched is ignored."""
        if self._handlers.pop(fd, None):
            self._poll.unregister(fd)

    def watch_signals(self, signums: "Iterable[int]", handler: "Callable[[bytes], object]") -> None:
        """Call `handler` with those that have come, a number in each byte; they do nothing else."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for signum in signums:
            signal.signal(signum, lambda *_: None)
        self.watch(read, lambda: handler(os.read(read, 4096)))

    def after(self, delay_s: float, name: str, handler: "Handler") -> None:
        """Call `handler` once in `delay_s` seconds; the same name again replaces the earlier deadline."""
        self._deadlines[name] = (time.monotonic() + delay_s, handler)

    def within(self, delay_s: float, name: str, handler: "Handler") -> None:
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

    def _wait_ms(self) -> "Optional[float]":
        if not self._deadlines:
            return None
        first = min(when for when, _ in self._deadlines.values())
        return max(0.0, first - time.monotonic()) * 1000 + 1
