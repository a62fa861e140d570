"""Kills what is to end on a node: every descendant of this process, and what dead agents have left.

A sweep ends every descendant, whatever session or parent it fled to. That works because the caller is a child
subreaper: an orphan reparents to it, also after setsid and double fork, so the descendants are complete and
only the caller reaps them (PR_SET_CHILD_SUBREAPER, Linux 3.4).

What an earlier agent has left is found by its environment. Every worker carries two variables, and its
descendants inherit them: DISTLAUNCH_RUN_ID, and DISTLAUNCH_AGENT, which names the node (several may share a
machine), the agent and its guardian, these with their start times so that no later process with the same PID
is taken for them. A process whose agent and guardian are both dead is an orphan: nobody will sweep it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from distlaunch.agent import procfs

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SETTLE_S = 0.3
"""Seconds in which helpers may end by themselves. Python's resource tracker ends after the last process that
it serves, once it has unlinked what those left in /dev/shm: 30 ms, 130 ms on a busy machine."""
FEW = 64
"""More processes than this are not waited for: they may be forking."""
RUN, AGENT = b"DISTLAUNCH_RUN_ID=", b"DISTLAUNCH_AGENT="


def _prctl(option: int, number: int) -> None:
    ctypes.CDLL(None).prctl(option, number, 0, 0, 0)


def become_subreaper() -> None:
    """Make orphaned descendants reparent to this process."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: int, parent: int) -> None:
    """Have the kernel send `signum` when the parent's thread ends; at once if `parent` is gone already."""
    _prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def reap() -> Iterator[tuple[int, int]]:
    """Reap, and yield (pid, status) of, every child that has ended; status as `os.waitpid` gives it."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def exit_status(status: int) -> int:
    """Convert `os.waitpid`'s status to an exit code, or the negative signal number."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def has_children() -> bool:
    """Tell whether any child is left, ended or not."""
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

    def __init__(self, workers: Iterable[int] = (), gentle: bool = False) -> None:
        self.killed: set[int] = set()
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
        stopped: set[int] = set()
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

    def _due(self) -> list[int]:
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

    def stuck(self) -> list[int]:
        """List those still there although they were killed: uninterruptible, or another user's."""
        return [pid for pid in procfs.descendants(os.getpid()) if pid in self.killed]


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass  # ended meanwhile, or became another user's: `stuck` names the latter


# What earlier agents have left


def agent_cookie(node: int) -> str:
    """Give DISTLAUNCH_AGENT: node index, PID namespace, then PID and start time of agent and guardian."""
    agent, guardian = os.getpid(), os.getppid()
    each = ["%d.%d" % (pid, procfs.start_time(pid)) for pid in (agent, guardian)]
    return "-".join([str(node), _pid_namespace(os.getpid()), *each])


def kill_orphans() -> int:
    """Kill every process whose agent is dead; return their number."""
    here = _pid_namespace(os.getpid())
    return _kill(lambda environ: _is_orphan(_value(environ, AGENT), here))


def kill_run(run_id: str, node: int) -> int:
    """Kill every process of a run's node, whichever agent started it; return their number."""
    run, mine = run_id.encode(), b"%d-" % node
    return _kill(lambda environ: _value(environ, RUN) == run and _value(environ, AGENT).startswith(mine))


def claim(run_id: str, node: int) -> object | None:
    """Become the only agent of a run's node here, while the socket returned is open; None if another is.

    The name is in the kernel's abstract namespace (unix(7)): nothing listens on it, and it ends with us.
    """
    import socket  # the guardian needs none

    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        sock.bind("\0distlaunch-%s-%d" % (run_id, node))
    except OSError:
        sock.close()
        return None
    return sock


def _kill(wanted: Callable[[bytes], bool]) -> int:
    """SIGKILL to every process whose environment is `wanted`, in a session of ours or not."""
    found = [pid for pid in procfs.pids() if wanted(procfs.environment(pid))]
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none forks meanwhile
        for pid in found:
            _send(pid, signum)
    return len(found)


def _value(environ: bytes, name: bytes) -> bytes:
    _, found, rest = (b"\0" + environ).partition(b"\0" + name)
    return rest.partition(b"\0")[0] if found else b""


def _is_orphan(cookie: bytes, here: str) -> bool:
    words = cookie.decode(errors="replace").split("-")
    if len(words) != 4 or words[1] != here:
        return False  # not ours, or of a container whose PIDs mean something else
    return not any(_alive(process) for process in words[2:])


def _alive(process: str) -> bool:
    pid, _, started = process.partition(".")
    return pid.isdigit() and started.isdigit() and procfs.start_time(int(pid)) == int(started)


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink("/proc/%d/ns/pid" % pid)[5:-1]  # pid:[4026531836]
    except OSError:
        return "?"
