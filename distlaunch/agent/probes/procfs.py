"""What /proc tells about processes and TCP sockets."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterator, List, Set, Tuple

ESTABLISHED, SYN_SENT, LISTEN = 0x01, 0x02, 0x0A
CHUNK = 1 << 14
"""Bytes that are read at once: of a larger buffer the making takes longer than the reading."""


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


def connections_counted() -> "Tuple[bytes, ...]":
    """How many TCP connections of this network namespace were opened, either way, and are established.

    These are tcpActiveOpens, tcpPassiveOpens and tcpCurrEstab of RFC 4022; empty where they can't be read. A
    connection is in the table of `sockets` before it is counted.
    """
    rows = [row.split() for row in _contents("/proc/net/snmp").splitlines() if row.startswith(b"Tcp:")]
    if len(rows) != 2:
        return ()
    names, values = rows
    return tuple([v for n, v in zip(names, values) if n in (b"ActiveOpens", b"PassiveOpens", b"CurrEstab")])


def _stat(pid: int) -> "List[bytes]":
    """The fields of /proc/PID/stat from the third on (proc(5)); empty when the process is not there."""
    # The command between the parentheses may itself hold parentheses and spaces.
    return _contents("/proc/%d/stat" % pid).rpartition(b")")[2].split()


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since the boot; 0 when it is not there or a zombie."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in (b"Z", b"X") else 0


def state(pid: int) -> str:
    """The kernel's letter for what a process does: R runs, S sleeps, D can't be interrupted, T is stopped."""
    fields = _stat(pid)
    return fields[0].decode() if fields else ""


def ignores(pid: int, signum: int) -> bool:
    """Whether a process ignores a signal; False when it is not there."""
    try:
        with open("/proc/%d/status" % pid) as status:
            masks = [line.split()[1] for line in status if line.startswith("SigIgn:")]
    except OSError:
        return False
    return any(int(mask, 16) >> (signum - 1) & 1 for mask in masks)


def cpu_time(pid: int) -> int:
    """CPU time of a process in clock ticks, that of its reaped children included."""
    return sum(int(ticks) for ticks in _stat(pid)[11:15])


def resident_pages(pid: int) -> int:
    """Pages of memory that a process has, shared ones included; 0 when it is not there."""
    try:
        with open("/proc/%d/statm" % pid, "rb") as statm:
            return int(statm.read().split()[1])
    except OSError:
        return 0


def has_mapped(pid: int, name: bytes) -> bool:
    """Whether a process has loaded a file whose path has `name`; False where we may not look."""
    try:
        with open("/proc/%d/maps" % pid, "rb") as maps:
            return any(name in line for line in maps)
    except OSError:
        return False


def environment(pid: int) -> bytes:
    """The environment that a process was started with, NUL between variables; empty where we may not look."""
    return _contents("/proc/%d/environ" % pid)


def _contents(path: str) -> bytes:
    """All of a file, in half the time of open(); empty where it is not there, or we may not look."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    found = b""
    try:
        while len(found) % CHUNK == 0:
            data = os.read(fd, CHUNK)  # as much as that, but at the end
            if not data:
                break
            found += data
    except OSError:
        return b""  # it has ended
    finally:
        os.close(fd)
    return found


def pids() -> "List[int]":
    """Every process that /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int) -> "List[int]":
    """PIDs of the processes below `root`, parents before children."""
    return [pid for children in tree(root).values() for pid in children]


def tree(root: int) -> "Dict[int, List[int]]":
    """pid → children's pids of `root` and of each process below it that has any, parents before children.

    One that is forked, or ends, meanwhile may be missing, and, where the kernel lists children by itself, a
    sibling of it, too (proc(5)): whoever must have them all looks again.
    """
    of_all = None if os.path.exists(_CHILDREN % (os.getpid(), os.getpid())) else _all_children()
    found: "Dict[int, List[int]]" = {}
    left = [root]
    for pid in left:
        children = _children(pid) if of_all is None else of_all.get(pid, [])
        if children and pid not in found:
            found[pid] = children
            left += children
    return found


_CHILDREN = "/proc/%d/task/%d/children"
"""There unless the kernel was built without CONFIG_PROC_CHILDREN."""


def _children(pid: int) -> "List[int]":
    """Those of each of its threads; all of /proc need not be read for that."""
    try:
        threads = os.listdir("/proc/%d/task" % pid)
    except OSError:
        return []  # it has ended
    return [child for thread in threads for child in _forked_by(pid, int(thread))]


def _forked_by(pid: int, thread: int) -> "List[int]":
    try:
        with open(_CHILDREN % (pid, thread)) as children:
            return [int(child) for child in children.read().split()]
    except OSError:
        return []


def _all_children() -> "Dict[int, List[int]]":
    children: "Dict[int, List[int]]" = {}
    for pid in pids():
        fields = _stat(pid)
        if fields:  # else it ended meanwhile
            children.setdefault(int(fields[1]), []).append(pid)
    return children


def socket_inodes(*pids: int) -> "Set[int]":
    """Inodes of the sockets that these processes hold, but for those at which we may not look."""
    return {inode for pid in pids for _, inode in _sockets_of(pid)}


def holds_tcp_beside(pid: int, inodes: "Set[int]") -> bool:
    """Whether a process holds a TCP socket that is not one of these."""
    return any(inode not in inodes and _is_tcp(path) for path, inode in _sockets_of(pid))


def _is_tcp(path: str) -> bool:
    try:
        return os.getxattr(path, "system.sockprotoname").startswith(b"TCP")
    except OSError:
        return False


def _sockets_of(pid: int) -> "Iterator[Tuple[str, int]]":
    """(descriptor's path, inode) of each socket that a process holds; none where we may not look."""
    folder = "/proc/%d/fd" % pid
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        path = "%s/%s" % (folder, name)
        try:
            target = os.readlink(path)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield path, int(target[8:-1])


def command_name(pid: int) -> str:
    """The kernel's short name of a process (15 bytes), or "?"."""
    try:
        with open("/proc/%d/comm" % pid, errors="replace") as comm:
            return comm.read().strip()
    except OSError:
        return "?"
