"""Signals to this process, read from a descriptor, and searches that a signal interrupts."""

import contextlib
import os
import re
import signal
from collections.abc import Iterable
from typing import Any, AnyStr

from distlaunch.agent.wire import WARNINGS

caught: set[int] = set()
"""The signals caught so far by any `Signals` of this process."""

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, *WARNINGS)

MATCH_S = 0.5
"""Maximum CPU seconds for searching one line for a user's pattern."""


class Interrupts:
    """Signals for a job, as numbers on a pipe. `fd` is readable while signals are unread.

    Threads of this process add signals with `send`. `Signals` also catches signals sent to this process.
    """

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)
        self.received_last = 0
        """The number of the last signal received; 0 = none."""

    def __enter__(self) -> "Interrupts":
        return self

    def __exit__(self, *error: object) -> None:
        write, self._write = self._write, -1  # a thread that is too late has nothing to write to
        os.close(self.fd)
        os.close(write)

    def send(self, signum: int) -> None:
        """Send `signum` to the job. Safe from any thread, and harmless if sent too late."""
        with contextlib.suppress(OSError):
            os.write(self._write, bytes([signum]))

    def received(self) -> bytes:
        """Return the signal numbers received since the last call."""
        try:
            numbers = os.read(self.fd, 4096)
        except BlockingIOError:
            return b""
        self.received_last = numbers[-1]
        return numbers

    def any(self) -> bool:
        """Return whether any signal has ever been received."""
        return bool(self.received_last or self.received())


class Signals(Interrupts):
    """Signals to this process, caught inside the context. SIGHUP stays ignored under nohup.

    They also arrive if the parent process had blocked them.

    `more` names additional signals to catch. Python allows only the main thread to enter the context.
    """

    def __init__(self, more: Iterable[str] = ()) -> None:
        super().__init__()
        self.watched: set[int] = {*_WATCHED, *(signal.Signals[name] for name in more)}
        self._before: dict[int, Any] = {}
        self._blocked: set[int] = set()

    def __enter__(self) -> "Signals":
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            self.watched.discard(signal.SIGHUP)
        for signum in self.watched:
            self._before[signum] = signal.signal(signum, lambda signum, _: caught.add(signum))
        self._blocked = self.watched & signal.pthread_sigmask(signal.SIG_UNBLOCK, self.watched)
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        super().__exit__(*error)


def search(pattern: re.Pattern[AnyStr], line: AnyStr) -> re.Match[AnyStr] | None:
    """Search a line for a user's pattern. Raises TimeoutError after MATCH_S CPU seconds. Main thread only.

    A pattern such as (a+)+$ can backtrack for years, but `re` calls signal handlers meanwhile.
    """

    def give_up(*_: object) -> None:
        raise TimeoutError(f"the pattern takes more than {MATCH_S:g} s on a line: avoid nested repetition")

    before = signal.signal(signal.SIGVTALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, MATCH_S)
        return pattern.search(line)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
