"""What a worker is doing, seen from outside: its state, its CPU time, what it has loaded."""

import os

from distlaunch.agent.probes import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable, List, Sequence, Set, Tuple


TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> "Sequence[int]":
    """A process and its descendants."""
    return [pid, *procfs.descendants(pid)]


def cpu_ticks(pids: "Sequence[int]") -> int:
    """CPU time that these processes have used, in clock ticks."""
    return sum(procfs.cpu_time(pid) for pid in pids)


def stopped(pid: int) -> int:
    """The first of a process and its descendants that a signal has stopped; 0 where none is."""
    return next((each for each in tree(pid) if procfs.state(each) == "T"), 0)


def doing(pids: "Iterable[int]", port: int) -> "List[Tuple[bool, str]]":
    """(whether it is trying to reach the rendezvous `port`, what it does in words) of each worker."""
    trees = [tree(pid) for pid in pids]
    held = [procfs.socket_inodes(*below) for below in trees]
    sockets = list(procfs.sockets()) if any(held) else []  # it takes milliseconds
    return [_doing(below, inodes, port, sockets) for below, inodes in zip(trees, held)]


def _doing(
    pids: "Sequence[int]", held: "Set[int]", port: int, sockets: "Sequence[procfs.Socket]"
) -> "Tuple[bool, str]":
    """What a worker does, the first of `pids`, with those below it, which hold the sockets `held`."""
    pid = pids[0]
    if _is_connecting(held, port, sockets):
        return True, "no answer from the rendezvous"
    halted = stopped(pid)
    if halted:
        return False, "stopped by a signal; `kill -CONT %d` resumes it" % halted
    if procfs.state(pid) == "D":
        return False, "blocked on a disk or driver"
    if not any(procfs.has_mapped(each, b"libtorch") for each in pids):
        return False, "has not imported torch yet"
    if held and _was_refused(pids, sockets):
        return True, "the rendezvous refuses its connection"
    at_work = any(procfs.state(each) == "R" for each in pids)
    return False, "torch imported, %s" % ("busy" if at_work else "idle")


def _is_connecting(held: "Set[int]", port: int, sockets: "Sequence[procfs.Socket]") -> bool:
    asking = (found for found in sockets if found.remote_port == port and found.state == procfs.SYN_SENT)
    return any(found.inode in held for found in asking)


def _was_refused(pids: "Sequence[int]", sockets: "Sequence[procfs.Socket]") -> bool:
    """Whether a process holds a TCP socket that is neither connected nor listening.

    A refused connection leaves no trace in /proc/net/tcp, but while the TCPStore's client waits for its next
    try, ever longer (torch/csrc/distributed/c10d/socket.cpp), it keeps the socket of the last one.
    """
    alive = {found.inode for found in sockets}
    return any(procfs.holds_tcp_beside(pid, alive) for pid in pids)
