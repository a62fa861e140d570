"""Differences between systems. The controller also runs on macOS, agents and ranks only on Linux."""

import os
import select
import signal
import sys
from collections.abc import Callable

TERMINALS = "DISTLAUNCH_TERMINALS"
"""The variable that contains the descriptors, 1 or 2, that reach a terminal over SSH."""


def reaches_terminal(fd: int) -> bool:
    """Return whether stdout (1) or stderr (2) is a terminal, or is sent to one over SSH."""
    return os.isatty(fd) or str(fd) in os.environ.get(TERMINALS, "")


def own_command() -> tuple[str, ...]:
    """Return a command that starts this program from any directory and at any later time.

    Batch scripts contain this command.
    """
    program = os.path.abspath(sys.argv[0])
    if os.path.basename(program) == "distlaunch" and os.access(program, os.X_OK) and os.path.isfile(program):
        return (program,)
    top = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    taken_along = os.path.join(top, "__main__.py")
    if os.path.exists(taken_along):
        return (sys.executable, "-I", top)
    return (sys.executable, "-m", "distlaunch")


def runs_ranks() -> bool:
    """Return whether this machine can be a node."""
    return sys.platform == "linux"


def cpu_count() -> int:
    """Return the number of CPUs that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def exit_descriptor(pid: int) -> int:
    """Open a descriptor that is readable once a child has exited: on Linux, a pidfd (since 5.3)."""
    try:
        if sys.platform == "linux":
            return os.pidfd_open(pid)
        queue = select.kqueue()
        ended = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
        queue.control([ended], 0)
        return os.dup(queue.fileno())
    except ProcessLookupError:  # the child has already been reaped; on macOS, it may only have exited
        read, write = os.pipe()
        os.close(write)
        return read  # at EOF


def send_signal(pid: int, signum: int, still: Callable[[], bool]) -> bool:
    """Send a signal to a process if `still` confirms that it is the right one. Return whether it was sent."""
    if sys.platform != "linux":
        if sent := still():
            os.kill(pid, signum)
        return sent
    try:
        process = os.pidfd_open(pid)
        try:
            if sent := still():  # then it was also right when the pidfd was opened
                signal.pidfd_send_signal(process, signum)
            return sent
        finally:
            os.close(process)
    except ProcessLookupError:
        return False
