"""What /proc tells about processes and TCP sockets."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterator, List, Set

ESTABLISHED, LISTEN = 0x01, 0x0A


class Socket:
    """One row of /proc/net/tcp{,6}: ``local_port``, ``remote_port``, ``state``, ``uid``, ``inode``."""

    __slots__ = ("inode", "local_port", "remote_port", "state", "uid")

    def __init__(self, row: str) -> None:
        fields = row.split()
        self.local_port = int(fields[1].rpartition(":")[2], 16)
        self.remote_port = int(fields[2].rpartition(":")[2], 16)
        self.state = int(fields[3], 16)
        self.uid = int(fields[7])
        self.inode = int(fields[9])


def sockets() -> "Iterator[Socket]":
    """Every TCP socket of this network namespace, both address families."""
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path) as table:
                next(table, None)
                for row in table:
                    yield Socket(row)
        except OSError:
            continue


def parents() -> "Dict[int, int]":
    """pid → parent's pid of every process that /proc shows."""
    found = {}
    for pid in pids():
        try:
            with open("/proc/%d/stat" % pid, "rb") as stat:
                # The command between the parentheses may itself hold parentheses and spaces.
                found[pid] = int(stat.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it ended while we were looking
    return found


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since the boot; 0 when it is not there or a zombie."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError):
        return 0


def environment(pid: int) -> bytes:
    """The environment that a process was started with, NUL between variables; empty where we may not look."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as environ:
            return environ.read()
    except OSError:
        return b""


def pids() -> "List[int]":
    """Every process that /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int) -> "List[int]":
    """PIDs of the processes below `root`, parents before children."""
    children: "Dict[int, List[int]]" = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found = list(children.get(root, ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def socket_inodes(pid: int) -> "Set[int]":
    """Inodes of the sockets that a process holds; empty where we may not look."""
    found: "Set[int]" = set()
    folder = "/proc/%d/fd" % pid
    try:
        names = os.listdir(folder)
    except OSError:
        return found
    for name in names:
        try:
            target = os.readlink("%s/%s" % (folder, name))
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def command_name(pid: int) -> str:
    """The kernel's short name of a process (15 bytes), or "?"."""
    try:
        with open("/proc/%d/comm" % pid, errors="replace") as comm:
            return comm.read().strip()
    except OSError:
        return "?"
