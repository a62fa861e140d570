"""Processes: telling them apart for certain, finding those of a host, and killing them.

A PID alone names nobody, because the kernel gives it out again. So a process is remembered with the time
of its start and the boot it belongs to, and is signalled only through a pidfd.
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
    """One process that ever was: `started` is the boot's id and the start in clock ticks after it."""

    pid: int
    started: str


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    start_ticks: int


def identify(pid: int) -> ProcessId:
    """Return the identity of a living process; ProcessLookupError if there is none."""
    stat = _stat(pid)
    if stat is None:
        raise ProcessLookupError(f"no process {pid}")
    return ProcessId(pid, f"{_boot()} {stat.start_ticks}")


def lives(process: ProcessId | None) -> bool:
    """Tell whether exactly this process still runs: not its PID's next owner, and not a zombie."""
    if process is None:
        return False
    stat = _stat(process.pid)
    return stat is not None and stat.state != "Z" and process.started == f"{_boot()} {stat.start_ticks}"


def netns_of(pid: int | str) -> int | None:
    """Return the inode of a process's network namespace; None if it is gone, a zombie or not ours to see."""
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
    """Return the PIDs of all processes but zombies, grouped by their parent."""
    groups: dict[int, list[int]] = defaultdict(list)
    for pid in _pids():
        stat = _stat(pid)
        if stat is not None and stat.state != "Z":
            groups[stat.parent].append(pid)
    return groups


def descendants(pid: int, children: dict[int, list[int]]) -> list[int]:
    """Return the PIDs below `pid` in the tree that `by_parent` returned, without `pid` itself."""
    found: list[int] = []
    front = [pid]
    while front:
        front = [child for parent in front for child in children.get(parent, [])]
        found += front
    return found


def kill_all(find: Callable[[], Iterable[int]], deadline: float) -> list[int]:
    """Kill what `find` finds until it finds nobody, and return who is left at the deadline.

    `find` is asked again after every pass, because a process may fork while it is being killed. The
    deadline is on time.monotonic's clock; somebody in uninterruptible sleep outlives it.
    """
    while pids := list(find()):
        if time.monotonic() >= deadline:
            return pids
        with _pidfds(pids) as fds:
            # Asked twice: whoever is found after his pidfd was opened is the one that the pidfd means.
            dying = [fds[pid] for pid in set(find()) & fds.keys() if _kill(fds[pid])]
            _wait_for_end(dying, deadline)
        if not dying:
            return list(find())
    return []


def _kill(pidfd: int) -> bool:
    # False for somebody else's process (a setuid program): waiting for its end would be in vain.
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
    # The name before the last bracket may hold anything, brackets and blanks included. See proc(5).
    fields = text.rpartition(")")[2].split()
    return _Stat(state=fields[0], parent=int(fields[1]), start_ticks=int(fields[19]))


def _boot() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
