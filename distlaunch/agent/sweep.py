"""Ends every descendant of this process, whatever session or parent it fled to.

Works because the caller is a child subreaper: an orphan reparents to it, also after setsid and
double fork, so the descendants are complete and only the caller reaps them (PR_SET_CHILD_SUBREAPER,
Linux 3.4).
"""

import ctypes
import os
import signal

from distlaunch.agent.probes import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, List, Set, Tuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make orphaned descendants reparent to this process."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(signum: int, parent: int) -> None:
    """Have the kernel send `signum` when the parent's thread ends; at once if `parent` is gone already."""
    _libc.prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def reap() -> "Iterator[Tuple[int, int]]":
    """Yield (pid, status) of every child that has ended; status as `os.waitpid` gives it."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def has_children() -> bool:
    """Whether any child is left, ended or not."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class Sweep:
    """One clean-up: `strike` until `has_children` says no.

    `killed` collects the PIDs that were struck.
    """

    def __init__(self) -> None:
        self.killed: "Set[int]" = set()

    def strike(self) -> None:
        """Stop, then kill, every descendant not struck yet.

        Stopped level by level from our own children, which nobody else can reap: a stopped parent
        neither forks nor reaps, so no PID below it can be reused before our SIGKILL arrives.
        """
        stopped: "Set[int]" = set()
        while True:
            fresh = [
                pid
                for pid in procfs.descendants(os.getpid())
                if pid not in stopped and pid not in self.killed
            ]
            if not fresh:
                break
            for pid in fresh:
                _send(pid, signal.SIGSTOP)
            stopped.update(fresh)
        for pid in stopped:
            _send(pid, signal.SIGKILL)
        self.killed |= stopped

    def stuck(self) -> "List[int]":
        """PIDs that are still there although they were killed: uninterruptible, or another user's."""
        return [pid for pid in procfs.descendants(os.getpid()) if pid in self.killed]


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass  # ended meanwhile, or became another user's: `stuck` names the latter
