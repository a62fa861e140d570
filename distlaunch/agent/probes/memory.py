"""What the kernel says about memory: its OOM killer's count, and how big /dev/shm is."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Optional


def oom_kills() -> int:
    """Processes that the OOM killer has ended in this cgroup, else on the node as far as we can read."""
    for path, key in _counters():
        count = _field(path, key)
        if count is not None:
            return count
    return 0


def shared_memory() -> "List[int]":
    """[size, free] of /dev/shm in bytes; empty where there is none."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return []
    return [found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize]


def _counters() -> "List[List[str]]":
    found = []
    for line in _lines("/proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":  # cgroup v2
            found.append(["/sys/fs/cgroup%s/memory.events" % path, "oom_kill"])
        elif "memory" in controllers.split(","):
            # In a container the path is the host's, and what is mounted is our own.
            found.append(["/sys/fs/cgroup/memory%s/memory.oom_control" % path, "oom_kill"])
            found.append(["/sys/fs/cgroup/memory/memory.oom_control", "oom_kill"])
    return [*found, ["/sys/fs/cgroup/memory.events", "oom_kill"], ["/proc/vmstat", "oom_kill"]]


def _field(path: str, key: str) -> "Optional[int]":
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return None


def _lines(path: str) -> "List[str]":
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []
