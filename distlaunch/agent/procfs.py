"""Kernel data about processes, TCP sockets and memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

ESTABLISHED, SYN_SENT, LISTEN = 0x01, 0x02, 0x0A
STATE_NAMES = {
    ESTABLISHED: "connected",
    SYN_SENT: "no answer yet",
    8: "closed by the peer",
    LISTEN: "listening",
}
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def contents(path: str) -> bytes:
    """Read a whole file. Return b"" if it doesn't exist or isn't readable, or if its process has exited."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read() or b""
    except OSError:
        return b""


def names(directory: str) -> list[str]:
    """List a directory. Return [] if it doesn't exist or isn't readable."""
    try:
        return os.listdir(directory)
    except OSError:
        return []


# Processes


def pids() -> list[int]:
    """List all processes in /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[bytes]:
    """Return all but the first two fields of /proc/PID/stat (proc(5)), or [] if the process doesn't exist."""
    # The command between the parentheses may itself contain parentheses and spaces.
    return contents("/proc/%d/stat" % pid).rpartition(b")")[2].split()


def start_time(pid: int) -> int:
    """Return a process's start time in clock ticks since boot; 0 if it doesn't exist or is a zombie."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in (b"Z", b"X") else 0


def boot_id() -> str:
    """Return the ID of the machine's current boot, or "" if there is none."""
    return contents("/proc/sys/kernel/random/boot_id").decode().strip()


def kernel() -> tuple[str, str]:
    """Return the PID and time namespaces, and the beginning of the ID of the host's boot.

    Only processes for which these are the same see the same PIDs and start times.
    """
    times = os.path.basename(os.path.realpath("/proc/self/ns/time"))  # Linux 5.6 and later
    return "%s.%s" % (pid_namespace()[5:-1], times[6:-1]), boot_id()[:8]


def pid_namespace() -> str:
    """Return this process's PID namespace, such as "pid:[4026531836]", or "pid" if it is unknown."""
    return os.path.basename(os.path.realpath("/proc/self/ns/pid"))


def state(pid: int) -> str:
    """Return the kernel's letter for a process's state: R running, S sleeping, D uninterruptible, T stopped.

    Return "" if the process doesn't exist.
    """
    fields = _stat(pid)
    return fields[0].decode() if fields else ""


def suspended(pids: Iterable[int]) -> int:
    """Return the first process that a signal has suspended, or 0."""
    return next((each for each in pids if state(each) == "T"), 0)


def lineage(pid: int) -> list[int]:
    """List a process and its ancestors."""
    found: list[int] = []
    while fields := _stat(pid):
        found.append(pid)
        pid = int(fields[1])
    return found


def ignores(pid: int, signum: int) -> bool:
    """Return whether a process ignores a signal; False if there is no such process."""
    return _is_in(pid, signum, "SigIgn:")


def handles(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal, or blocks it, to wait for it."""
    return _is_in(pid, signum, "SigCgt:", "SigBlk:")


def _is_in(pid: int, signum: int, *masks: str) -> bool:
    """Return whether one of these masks in a process's status contains a signal."""
    found = [line.split()[1] for line in _lines("/proc/%d/status" % pid) if line.startswith(masks)]
    return any(int(mask, 16) >> (signum - 1) & 1 for mask in found)


def cpu_ticks(pids: list[int]) -> int:
    """Return the total CPU time, in clock ticks, of processes and the children they have reaped."""
    return sum(int(ticks) for pid in pids for ticks in _stat(pid)[11:15])


def resident_bytes(pids: list[int]) -> int:
    """Return the total memory of processes in bytes. Shared memory counts for each of them."""
    fields = [contents("/proc/%d/statm" % pid).split() for pid in pids]
    return sum(int(each[1]) for each in fields if each) * PAGE


def environment(pid: int) -> bytes:
    """Read the initial environment of a process, with NUL between variables; b"" if it isn't readable."""
    return contents("/proc/%d/environ" % pid)


def command_name(pid: int) -> str:
    """Return the kernel's short name of a process (15 bytes), or "?"."""
    return contents("/proc/%d/comm" % pid).decode(errors="replace").strip() or "?"


def family(pid: int) -> list[int]:
    """List a process and its descendants."""
    return [pid, *descendants(pid)]


def descendants(root: int) -> list[int]:
    """List the processes below `root`, parents before children."""
    return [pid for children in tree(root).values() for pid in children]


def tree(root: int) -> dict[int, list[int]]:
    """Map `root` and its descendants to their children, if they have any. Parents come before children.

    A process that is forked or exits in the meantime may be missing. If the kernel provides lists of
    children, its siblings may be missing, too (proc(5)). A caller that needs every process must repeat the
    call.
    """
    of_all = None if os.path.exists(_CHILDREN % (os.getpid(), os.getpid())) else _all_children()
    found: dict[int, list[int]] = {}
    left = [root]
    for pid in left:
        children = _children(pid) if of_all is None else of_all.get(pid, [])
        if children and pid not in found:
            found[pid] = children
            left += children
    return found


_CHILDREN = "/proc/%d/task/%d/children"
"""Exists unless the kernel was built without CONFIG_PROC_CHILDREN."""


def _children(pid: int) -> list[int]:
    """List the children of all threads of a process, without reading all of /proc."""
    threads = map(int, names("/proc/%d/task" % pid))
    return [int(child) for thread in threads for child in contents(_CHILDREN % (pid, thread)).split()]


def _all_children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for pid in pids():
        fields = _stat(pid)
        if fields:  # otherwise, it has exited in the meantime
            children.setdefault(int(fields[1]), []).append(pid)
    return children


# TCP sockets


class Socket:
    """A row of /proc/net/tcp{,6}: ``local_port``, ``remote_port``, ``state``, ``uid``, ``inode``."""

    __slots__ = ("_remote", "inode", "local_port", "remote_port", "state", "uid")

    def __init__(self, row: str) -> None:
        fields = row.split()
        self.local_port = int(fields[1].rpartition(":")[2], 16)
        self._remote, _, port = fields[2].rpartition(":")
        self.remote_port = int(port, 16)
        self.state = int(fields[3], 16)
        self.uid = int(fields[7])
        self.inode = int(fields[9])

    @property
    def words(self) -> str:
        """Return a description of the socket: its ports, remote address and state."""
        if self.state == LISTEN:
            return "listens on port %d" % self.local_port
        import socket  # only for evidence

        words = [bytes.fromhex(self._remote[i : i + 8])[::-1] for i in range(0, len(self._remote), 8)]
        family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
        address = socket.inet_ntop(family, b"".join(words)).replace("::ffff:", "")
        state = STATE_NAMES.get(self.state, "TCP state %d" % self.state)
        shown = (self.local_port, address, self.remote_port, state)
        return "connection from port %d to %s port %d: %s" % shown


def sockets() -> Iterator[Socket]:
    """Yield every TCP socket of this network namespace, for both address families."""
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in _lines(path)[1:]:
            yield Socket(row)


def connections_counted() -> tuple[bytes, ...]:
    """Return counters of the TCP connections in this network namespace.

    They are tcpActiveOpens, tcpPassiveOpens and tcpCurrEstab of RFC 4022. Return () if they are unreadable. A
    connection appears in the table that `sockets` reads before it is counted.
    """
    rows = [row.split() for row in contents("/proc/net/snmp").splitlines() if row.startswith(b"Tcp:")]
    if len(rows) != 2:
        return ()
    wanted = (b"ActiveOpens", b"PassiveOpens", b"CurrEstab")
    return tuple([value for name, value in zip(*rows) if name in wanted])


def socket_inodes(pids: list[int]) -> set[int]:
    """Return the inodes of the visible sockets that processes hold."""
    return {inode for pid in pids for _, inode in _sockets_of(pid)}


def holds_tcp_beside(pid: int, inodes: set[int]) -> bool:
    """Return whether a process holds a TCP socket that is not among `inodes`."""
    return any(inode not in inodes and _is_tcp(path) for path, inode in _sockets_of(pid))


def _is_tcp(path: str) -> bool:
    try:
        return os.getxattr(path, "system.sockprotoname").startswith(b"TCP")
    except OSError:
        return False


def _sockets_of(pid: int) -> Iterator[tuple[str, int]]:
    """Yield (path of the descriptor, inode) of each visible socket that a process holds."""
    directory = "/proc/%d/fd" % pid
    for name in names(directory):
        path = "%s/%s" % (directory, name)
        try:
            target = os.readlink(path)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield path, int(target[8:-1])


# Memory

MEMORY_EVENTS = ("high", "max", "oom", "oom_kill", "under_oom")


def oom_kills() -> int:
    """Return the number of OOM kills in this cgroup, or on the node if the cgroup's number is unreadable.

    The number only grows, so callers subtract an earlier value.
    """
    return memory_events().get("oom_kill", 0)


def memory_events() -> dict[str, int]:
    """Return the memory event counters of this cgroup, or of the node if the cgroup's are unreadable."""
    for path in _oom_counters():
        rows = [line.split() for line in _lines(path)]
        found = {row[0]: int(row[1]) for row in rows if row[0] in MEMORY_EVENTS and row[1:2]}
        if "oom_kill" in found:
            return found
    return {}


def _oom_counters() -> Iterator[str]:
    """Yield the files that may contain the counters: those of this cgroup, then those of the node."""
    for line in _lines("/proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":  # cgroup v2
            yield "/sys/fs/cgroup%s/memory.events" % path
        elif "memory" in controllers.split(","):
            # In a container, the path is the host's, but the container's own cgroup is mounted.
            yield "/sys/fs/cgroup/memory%s/memory.oom_control" % path
            yield "/sys/fs/cgroup/memory/memory.oom_control"
    yield "/sys/fs/cgroup/memory.events"
    yield "/proc/vmstat"


def shared_memory() -> tuple[int, ...]:
    """Return (size, free) of /dev/shm in bytes, or () if it doesn't exist."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return ()
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _lines(path: str) -> list[str]:
    return os.fsdecode(contents(path)).splitlines()
