"""Kills processes on a node: every descendant of this process, and processes left over from crashed agents.

A sweep kills every descendant, whatever its session or parent. The caller is a child subreaper: orphans are
reparented to it, even after setsid and a double fork. The caller can therefore find all descendants, and it
alone reaps the orphans (PR_SET_CHILD_SUBREAPER, Linux 3.4).

Processes left by an earlier agent are found through their environment. Every worker has two variables, which
its descendants inherit: DISTLAUNCH_RUN_ID and DISTLAUNCH_AGENT. The latter contains the node, since several
nodes may share a host. It also contains the PIDs and start times of the agent and its guardian, so a later
process with the same PID isn't mistaken for one of them. A process whose agent and guardian were both killed
is an orphan, and nothing else will sweep it. They have then left their directory behind, which
DISTLAUNCH_DEADLINE names. If it is gone, the process only has a copy of a worker's environment.

A worker may submit another job to the scheduler, which passes these variables on, to this host or another.
The processes of that job are no orphans: DISTLAUNCH_AGENT also contains the host's boot and the worker's job.
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
PR_SET_PTRACER = 0x59616D61
SETTLE_S = 0.3
"""Seconds for helper processes to exit on their own.

Python's resource tracker outlives the processes that it serves, until it has unlinked their files in
/dev/shm. This takes 30 ms, or 130 ms on a busy host.
"""
FEW = 64
"""Maximum number of helper processes to wait for. If there are more, they may be forking."""
RUN, AGENT, DEADLINE = b"DISTLAUNCH_RUN_ID=", b"DISTLAUNCH_AGENT=", b"DISTLAUNCH_DEADLINE="
JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID")
"""Variables with the ID of a scheduler's job; JOB_ID is Grid Engine's."""


def _prctl(option: int, number: int) -> None:
    ctypes.CDLL(None).prctl(option, number, 0, 0, 0)


def foreign_proc() -> str:
    """Return an error message if /proc shows another PID namespace, where PIDs mean other processes."""
    shown = os.path.basename(os.path.realpath("/proc/self"))  # "self" if this process isn't in it
    if shown == str(os.getpid()) or not os.path.lexists("/proc/self"):
        return ""
    where = "/proc shows another PID namespace, so its PIDs mean other processes"
    return where + "; mount a /proc of this namespace, as with `unshare --pid --fork --mount-proc`"


def become_subreaper() -> None:
    """Reparent orphaned descendants to this process."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: int, parent: int) -> None:
    """Have `signum` sent to this process when the parent's thread ends, or now if `parent` is gone."""
    _prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def allow_tracing(tracer: int) -> None:
    """Let process `tracer` and its descendants read this process's stack, even after exec.

    Otherwise, where Yama restricts ptrace (by default on Ubuntu), py-spy could read only its own descendants.
    """
    _prctl(PR_SET_PTRACER, tracer)


def reap() -> Iterator[tuple[int, int]]:
    """Reap every child that has exited, and yield each (pid, status) that `os.waitpid` returns."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def exit_status(status: int) -> int:
    """Convert a status of `os.waitpid` to an exit code, or to the negative signal number."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def has_children() -> bool:
    """Return whether any child is left, including zombies."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class Sweep:
    """A sweep. Keep calling `kill_descendants`, also after `settling_s`, until `has_children` returns False.

    Helper processes wait for the worker that they serve to exit, so they are killed only after `settling_s`.
    In a `gentle` sweep, all processes except the `workers` are helpers. Otherwise, only childless processes
    that ignore SIGTERM are helpers. `killed` contains the PIDs of killed processes.
    """

    def __init__(self, workers: Iterable[int] = (), gentle: bool = False) -> None:
        self.killed: set[int] = set()
        self._workers, self._gentle = frozenset(workers), gentle
        self._settled_at = time.monotonic() + SETTLE_S

    @property
    def settling_s(self) -> float:
        """Return the seconds that helper processes have left to exit on their own."""
        return max(0.0, self._settled_at - time.monotonic())

    def kill_descendants(self) -> None:
        """Kill every descendant that hasn't been killed yet and has no time left to exit."""
        self.killed |= _kill_each(self._due, self.killed)

    def _due(self) -> list[int]:
        """Return the descendants to kill now: all except helpers that have time left."""
        tree = procfs.tree(os.getpid())
        found = [pid for children in tree.values() for pid in children]
        if not self.settling_s:
            return found
        helpers = set(islice((pid for pid in found if self._is_helper(pid, pid in tree)), FEW + 1))
        return found if len(helpers) > FEW else [pid for pid in found if pid not in helpers]

    def _is_helper(self, pid: int, has_children: bool) -> bool:
        # A process with children may fork continuously, so it must be suspended before its children.
        rests = self._gentle or (not has_children and procfs.ignores(pid, signal.SIGTERM))
        return rests and pid not in self._workers

    def stuck(self) -> list[int]:
        """List processes that remain after SIGKILL. They are uninterruptible, or belong to another user."""
        return [pid for pid in procfs.descendants(os.getpid()) if pid in self.killed]


def kill_left(error_files: set[bytes]) -> set[int]:
    """Kill every descendant of workers that have exited, and return the PIDs.

    `error_files` are those workers' error files. A descendant's environment names its worker's error file.
    """
    name = b"TORCHELASTIC_ERROR_FILE="

    def left() -> list[int]:
        pids = procfs.descendants(os.getpid())
        return [pid for pid in pids if _value(procfs.environment(pid), name) in error_files]

    return _kill_each(left, set())


def _kill_each(due: Callable[[], list[int]], killed: set[int]) -> set[int]:
    """Suspend, then kill, the descendants that are `due` and haven't been killed yet, and return their PIDs.

    Processes are suspended level by level, beginning with direct children, which no other process can reap. A
    suspended parent doesn't fork or reap, so no PID below it can be reused before SIGKILL arrives.
    """
    stopped: set[int] = set()
    while True:
        fresh = [pid for pid in due() if pid not in stopped and pid not in killed]
        if not fresh:
            break
        for pid in fresh:
            send(pid, signal.SIGSTOP)
        stopped.update(fresh)
    for pid in stopped:
        send(pid, signal.SIGKILL)
    return stopped


def send(pid: int, signum: int) -> None:
    """Send a signal to a process that may have exited, or may belong to another user."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass  # it has exited, or now belongs to another user, in which case `stuck` lists it


# Processes left by earlier agents


def agent_cookie(node: int) -> str:
    """Return the beginning of DISTLAUNCH_AGENT for this agent's workers, to which `job_id` is appended.

    It contains the node, the PID and time namespaces, the host's boot, and the PIDs and start times of the
    agent and its guardian.
    """
    agent, guardian = os.getpid(), os.getppid()
    each = ["%d.%d" % (pid, procfs.start_time(pid)) for pid in (agent, guardian)]
    return "-".join([str(node), *procfs.kernel(), *each, ""])


def job_id(variable: Callable[[str], str | None]) -> str:
    """Return the ID of the scheduler's job to which a process belongs; "" = none.

    `variable` looks up one of its environment variables.
    """
    return next(filter(None, map(variable, JOB_IDS)), "")


def kill_orphans() -> int:
    """Kill every orphan, and return how many were killed. Each agent does this once, when it starts."""
    here = [word.encode() for word in procfs.kernel()]

    def is_orphan(pid: int, environ: bytes) -> bool:
        words, deadline = _value(environ, AGENT).split(b"-", 5), _value(environ, DEADLINE)
        if len(words) != 6 or words[1:3] != here or not deadline:
            return False  # unrelated, or from another host, or from a container with its own PIDs
        directory = b"/proc/%d/root%s" % (pid, os.path.dirname(deadline))  # it may have its own mounts
        return os.path.isdir(directory) and in_its_job(environ) and not any(map(_alive, words[3:5]))

    return _kill(is_orphan)


def kill_run(run_id: str, node: int) -> int:
    """Kill every process of a run on a node, whichever agent started it, and return how many were killed.

    To answer `Reap`, an agent repeats this until the number is 0.
    """
    run, mine = run_id.encode(), b"%d-" % node

    def is_ours(_: int, environ: bytes) -> bool:
        ours = _value(environ, RUN) == run and _value(environ, AGENT).startswith(mine)
        return ours and in_its_job(environ)

    return _kill(is_ours)


def _kill(wanted: Callable[[int, bytes], bool]) -> int:
    """Kill every process for whose PID and environment `wanted` is true. Return how many were killed.

    This process and its ancestors are spared: a job submitted by a worker may start distlaunch itself.
    """
    spared = procfs.lineage(os.getpid())
    found = [pid for pid in procfs.pids() if pid not in spared and wanted(pid, procfs.environment(pid))]
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # suspend all of them first, so that none forks meanwhile
        for pid in found:
            send(pid, signum)
    return len(found)


def _value(environ: bytes, name: bytes) -> bytes:
    """Return the value of a variable in /proc/PID/environ, or b"" if it isn't set. `name` ends in "="."""
    _, found, rest = (b"\0" + environ).partition(b"\0" + name)
    return rest.partition(b"\0")[0] if found else b""


def in_its_job(environ: bytes) -> bool:
    """Return whether a process is in the job that its `agent_cookie` names, not in one that it submitted."""
    job = job_id(lambda name: os.fsdecode(_value(environ, name.encode() + b"=")))
    return job in ("", os.fsdecode(_value(environ, AGENT)).split("-", 5)[-1])


def _alive(process: bytes) -> bool:
    pid, _, started = process.partition(b".")
    return pid.isdigit() and started.isdigit() and procfs.start_time(int(pid)) == int(started)
