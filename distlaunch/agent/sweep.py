"""Ends every descendant of this process, whatever session or parent it fled to.

Works because the caller is a child subreaper: an orphan reparents to it, also after setsid and
double fork, so the descendants are complete and only the caller reaps them (PR_SET_CHILD_SUBREAPER,
Linux 3.4).
"""

import os
import time
from itertools import islice

from distlaunch.agent.lean import signal
from distlaunch.agent.probes import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Iterable, Iterator, List, Set, Tuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SETTLE_S = 0.3
"""Seconds in which helpers may end by themselves. Python's resource tracker ends after the last process that
it serves, once it has unlinked what those left in /dev/shm: 30 ms, 130 ms on a busy machine."""
FEW = 64
"""More processes than this are not waited for: they may be forking."""


def _prctl() -> "Callable[[int, int], object]":
    """prctl(2), for options with one number."""
    try:
        import _ctypes  # the part of ctypes in C, which alone takes a fifth of the time

        address = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
        call = _ctypes.call_function
    except (ImportError, AttributeError, OSError, TypeError):
        import ctypes

        libc = ctypes.CDLL(None)
        return lambda option, number: libc.prctl(option, number, 0, 0, 0)
    return lambda option, number: call(address, (option, number, 0, 0, 0))


def become_subreaper() -> None:
    """Make orphaned descendants reparent to this process."""
    _prctl()(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: int, parent: int) -> None:
    """Have the kernel send `signum` when the parent's thread ends; at once if `parent` is gone already."""
    _prctl()(PR_SET_PDEATHSIG, signum)
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


def exit_status(status: int) -> int:
    """`os.waitpid`'s status as exit code, or the negative signal number."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def has_children() -> bool:
    """Whether any child is left, ended or not."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class Sweep:
    """One clean-up: `strike` until `has_children` says no, also when `settling_s` is over.

    Helper processes, which wait for the end of the worker that they serve, are killed only once that time
    is over: in a `gentle` sweep all but the `workers`, else those that ignore SIGTERM. `killed` has the PIDs
    that were struck.
    """

    def __init__(self, workers: "Iterable[int]" = (), gentle: bool = False) -> None:
        self.killed: "Set[int]" = set()
        self._workers, self._gentle = frozenset(workers), gentle
        self._settled_at = time.monotonic() + SETTLE_S

    @property
    def settling_s(self) -> float:
        """Seconds that helpers still have."""
        return max(0.0, self._settled_at - time.monotonic())

    def strike(self) -> None:
        """Stop, then kill, every descendant not struck yet that has no more time.

        Stopped level by level from our own children, which nobody else can reap: a stopped parent
        neither forks nor reaps, so no PID below it can be reused before our SIGKILL arrives.
        """
        stopped: "Set[int]" = set()
        while True:
            fresh = [pid for pid in self._due() if pid not in stopped and pid not in self.killed]
            if not fresh:
                break
            for pid in fresh:
                _send(pid, signal.SIGSTOP)
            stopped.update(fresh)
        for pid in stopped:
            _send(pid, signal.SIGKILL)
        self.killed |= stopped

    def _due(self) -> "List[int]":
        tree = procfs.tree(os.getpid())
        found = [pid for children in tree.values() for pid in children]
        if not self.settling_s:
            return found
        helpers = set(islice((pid for pid in found if self._is_helper(pid, pid in tree)), FEW + 1))
        return found if len(helpers) > FEW else [pid for pid in found if pid not in helpers]

    def _is_helper(self, pid: int, has_children: bool) -> bool:
        # One that has children may be forking all the time, and has to be stopped before they are.
        rests = self._gentle or (not has_children and procfs.ignores(pid, signal.SIGTERM))
        return rests and pid not in self._workers

    def stuck(self) -> "List[int]":
        """PIDs that are still there although they were killed: uninterruptible, or another user's."""
        return [pid for pid in procfs.descendants(os.getpid()) if pid in self.killed]


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass  # ended meanwhile, or became another user's: `stuck` names the latter
