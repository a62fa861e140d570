"""Identifies processes reliably, finds those of a host, and kills them.

A PID alone doesn't identify a process, because the kernel reuses it. A process is therefore identified by its
PID, start time and boot ID, and signaled only through a pidfd.
"""

import contextlib
import os
import select
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessId:
    """The unique identity of a process; `started` is the boot ID and the start in clock ticks since boot."""

    pid: int
    started: str


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    start_ticks: int


def identify(pid: int) -> ProcessId:
    """Return the identity of a running process. Raises ProcessLookupError if there is none."""
    stat = _stat(pid)
    if stat is None:
        raise ProcessLookupError(f"no process {pid}")
    return ProcessId(pid, f"{_boot()} {stat.start_ticks}")


def lives(process: ProcessId | None) -> bool:
    """Return whether this process still runs. A zombie or a later process with the same PID doesn't count."""
    if process is None:
        return False
    stat = _stat(process.pid)
    return stat is not None and stat.state != "Z" and process.started == f"{_boot()} {stat.start_ticks}"


def netns_of(pid: int | str) -> int | None:
    """Return the inode of a process's network namespace; None if it is gone, a zombie or inaccessible."""
    try:
        return (_PROC / str(pid) / "ns/net").stat().st_ino
    except OSError:
        return None


def by_netns() -> dict[int, list[int]]:
    """Return the PIDs of all processes, grouped by the inode of their network namespace."""
    groups: dict[int, list[int]] = defaultdict(list)
    for pid in _pids():
        inode = netns_of(pid)
        if inode is not None:
            groups[inode].append(pid)
    return groups


def by_parent() -> dict[int, list[int]]:
    """Return the PIDs of all processes except zombies, grouped by parent."""
    groups: dict[int, list[int]] = defaultdict(list)
    for pid in _pids():
        stat = _stat(pid)
        if stat is not None and stat.state != "Z":
            groups[stat.parent].append(pid)
    return groups


def descendants(pid: int, children: dict[int, list[int]]) -> list[int]:
    """Return the PIDs below `pid` in the tree from `by_parent`, without `pid` itself."""
    found: list[int] = []
    front = [pid]
    while front:
        front = [child for parent in front for child in children.get(parent, [])]
        found += front
    return found


def kill_all(find: Callable[[], Iterable[int]], deadline: float) -> list[int]:
    """Kill the processes that `find` returns until it returns none. Return those left at the deadline.

    `find` is called again after every pass, because a process may fork while it is being killed. The deadline
    uses time.monotonic. Processes in uninterruptible sleep may remain.
    """
    while pids := list(find()):
        if time.monotonic() >= deadline:
            return pids
        with _pidfds(pids) as fds:
            # Called twice: if a process is still found after its pidfd was opened, the pidfd refers to it.
            dying = [fds[pid] for pid in set(find()) & fds.keys() if _kill(fds[pid])]
            _wait_for_end(dying, deadline)
        if not dying:
            return list(find())
    return []


def _kill(pidfd: int) -> bool:
    # False for another user's process (a setuid program), whose end would never come.
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True


@contextlib.contextmanager
def _pidfds(pids: Iterable[int]) -> Iterator[dict[int, int]]:
    fds: dict[int, int] = {}
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                fds[pid] = os.pidfd_open(pid)
        yield fds
    finally:
        for fd in fds.values():
            os.close(fd)


def _wait_for_end(pidfds: Iterable[int], deadline: float) -> None:
    waiting = select.poll()
    left = set(pidfds)
    for fd in left:
        waiting.register(fd, select.POLLIN)
    while left and (rest_s := deadline - time.monotonic()) > 0:
        for fd, _ in waiting.poll(rest_s * 1000):
            waiting.unregister(fd)
            left.discard(fd)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def _stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name before the last parenthesis may contain anything, even parentheses and blanks. See proc(5).
    fields = text.rpartition(")")[2].split()
    return _Stat(state=fields[0], parent=int(fields[1]), start_ticks=int(fields[19]))


def _boot() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
