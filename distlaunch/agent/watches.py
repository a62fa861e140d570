"""Observes running workers from outside: joins, stalls and resource use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from distlaunch.agent import gpus, procfs
from distlaunch.agent.messages import RanksJoined, RanksLag, RanksStalled, Usage, WatchUse
from distlaunch.agent.outbox import Outbox
from distlaunch.agent.poller import Poller
from distlaunch.agent.wire import DUMP_S, STALL_LOOK_MAX_S, STALL_LOOKS
from distlaunch.agent.worker import Worker

JOIN_INTERVAL_S, JOIN_INTERVAL_MAX_S = 0.02, 1.0
JOIN_SLOWER = 1.02
"""Factor by which the interval between checks for joins grows.

The kernel doesn't announce connections of other processes. The interval is a fiftieth of the time since the
start, so ranks that join late and exit soon afterward are still noticed.
"""
LAG_S, LAG_MAX_S = 5.0, 30.0
"""Seconds from the start until workers that haven't joined are reported, with their activity.

Since a job may have no rendezvous, each further report is delayed by half of the time since the start, but by
at least LAG_S and at most LAG_MAX_S seconds.
"""
IDLE_SHARE = 0.01
"""Share of one core below which a worker counts as idle. Waiting threads wake up occasionally."""
IDLE_TICKS = 2
"""Maximum clock ticks between checks that count as idle. An idle torch process occasionally uses one."""
IDLE_GPU_PERCENT = 1
LIBRARIES = (("torch", b"libtorch"), ("JAX", b"/jaxlib/"))
"""Libraries that join a rendezvous, each with part of the path of a file that the library maps."""
USAGE_INTERVAL_S, USAGE_FIRST_S = 2.0, 0.5
"""Seconds between measurements, and between the first two, which the first report needs."""


class Watch:
    """A periodic check of the workers that `running` returns. `name` is the name of the check's deadline."""

    name = ""

    def __init__(self, poller: Poller, outbox: Outbox, running: Callable[[], list[Worker]]) -> None:
        self._poller, self._outbox, self._running = poller, outbox, running
        self._gpus: gpus.Utilization | None = None

    def stop(self) -> None:
        """Stop watching."""
        self._poller.cancel(self.name)

    def _devices(self) -> gpus.Utilization:
        self._gpus = self._gpus or gpus.Utilization()  # only when needed, because loading NVML is slow
        return self._gpus

    def known_use(self, device: str) -> tuple[int | None, int | None]:
        """Return the utilization of a GPU, or (None, None) if this watch hasn't used NVML yet.

        NVML may hang on a faulty GPU.
        """
        return self._gpus.use(device) if self._gpus else (None, None)


# Joining


class JoinWatch(Watch):
    """A watch that reports which workers have connected to the rendezvous, and the activity of the others.

    `joined` contains the local ranks that have connected.
    """

    name = "joins"

    def begin(self, port: int, counted: tuple[bytes, ...]) -> None:
        """Watch workers that have just started. `counted` is as in `Arrivals`."""
        self._port, self._arrivals = port, Arrivals(port, counted)
        self._last_reported: dict[int, str] = {}
        self._torch: str | None = None
        self._began = time.monotonic()
        self._lag_at = self._began + LAG_S
        self.joined: set[int] = set()
        self._look(JOIN_INTERVAL_S)

    def _look(self, interval_s: float) -> None:
        """Report workers that have joined since the last check and, at times, the activity of the others.

        Until all have joined, schedule the next check in `interval_s` seconds, and later ones less often.
        """
        running = [w for w in self._running() if w.local_rank not in self.joined]
        missing = {w.local_rank: w.pid for w in running}
        fresh = self._arrivals.look({w.local_rank: w.pid for w in running if w.started})
        if not all(w.started for w in running):  # before exec, a worker shares the sockets of its agent
            self._arrivals = Arrivals(self._port)
        if fresh:
            self.joined |= fresh
            if self._torch is None:  # the workers of a node share their environment
                self._torch = loaded_torch(missing[min(fresh)])
            self._outbox.report(RanksJoined(self._outbox.node, tuple(sorted(fresh)), self._torch))
        left = {rank: pid for rank, pid in missing.items() if rank not in fresh}
        if left:
            if time.monotonic() >= self._lag_at:
                self._report_lag(left)
            slower = min(interval_s * JOIN_SLOWER, JOIN_INTERVAL_MAX_S)
            self._poller.after(interval_s, self.name, lambda: self._look(slower))

    def _report_lag(self, left: dict[int, int]) -> None:
        """Report the workers in `left` (local rank → PID) whose activity has changed."""
        now = time.monotonic()
        self._lag_at = now + min(max(LAG_S, (now - self._began) / 2), LAG_MAX_S)
        seen = dict(zip(left, doing(left.values(), self._port)))
        fresh = {rank: words for rank, (_, words) in seen.items() if self._last_reported.get(rank) != words}
        if fresh:
            self._last_reported.update(fresh)
            ranks = [(rank, seen[rank][0], words) for rank, words in sorted(fresh.items())]
            self._outbox.report(RanksLag(self._outbox.node, tuple(ranks)))


class Arrivals:
    """A repeated check for connections to the rendezvous `port`.

    Reading the table of connections takes milliseconds, or longer on a large host. The table is read only if
    connections were opened or closed since the last check and a worker has a socket. Connections already
    included in `counted` are skipped.
    """

    def __init__(self, port: int, counted: tuple[bytes, ...] | None = None) -> None:
        self._port, self._counted = port, counted
        self._connecting = False  # whether a connection attempt was pending at the last check

    def look(self, workers: dict[int, int]) -> set[int]:
        """Return the local ranks of those `workers` (local rank → PID) that have joined."""
        counted = procfs.connections_counted()
        if counted and counted == self._counted and not self._connecting:
            return set()
        self._counted = counted
        # The socket may belong to a descendant of the worker.
        held = {rank: procfs.socket_inodes(procfs.family(pid)) for rank, pid in workers.items()}
        if not any(held.values()):
            self._connecting = False
            return set()
        ours = [found for found in procfs.sockets() if found.remote_port == self._port]
        self._connecting = any(found.state == procfs.SYN_SENT for found in ours)
        joined = {found.inode for found in ours if found.state == procfs.ESTABLISHED}
        return {rank for rank, inodes in held.items() if inodes & joined}


def loaded_torch(worker: int) -> str:
    """Return the version of torch that a worker or its descendant has loaded, or ""."""
    for pid in procfs.family(worker):
        before, library, _ = procfs.contents("/proc/%d/maps" % pid).partition(b"/lib/libtorch_cpu.so")
        if library:
            package = before[before.rfind(b" /") + 1 :]
            text = procfs.contents(os.fsdecode(package + b"/version.py")).decode(errors="replace")
            return text.partition("__version__ = '")[2].partition("'")[0]
    return ""


def doing(pids: Iterable[int], port: int) -> list[tuple[bool, str]]:
    """Return whether each worker is trying to reach the rendezvous `port`, and its activity."""
    families = [procfs.family(pid) for pid in pids]
    held = [procfs.socket_inodes(family) for family in families]
    sockets = list(procfs.sockets()) if any(held) else []  # takes milliseconds
    return [_doing(family, inodes, port, sockets) for family, inodes in zip(families, held)]


def _doing(pids: list[int], held: set[int], port: int, sockets: list[procfs.Socket]) -> tuple[bool, str]:
    """Describe the worker `pids[0]`, whose descendants are the other `pids` and whose sockets are `held`."""
    asking = (found for found in sockets if found.remote_port == port and found.state == procfs.SYN_SENT)
    if any(found.inode in held for found in asking):
        return True, "no answer from the rendezvous"
    halted = procfs.suspended(pids)
    if halted:
        return False, "stopped by a signal; `kill -CONT %d` resumes it" % halted
    if procfs.state(pids[0]) == "D":
        return False, "blocked on a disk or driver"
    mapped = [procfs.contents("/proc/%d/maps" % pid) for pid in pids]
    has = [name for name, file in LIBRARIES if any(file in files for files in mapped)]
    if not has:
        return False, "has not imported torch or JAX yet"
    if held and _was_refused(pids, sockets):
        return True, "connection to the rendezvous refused"
    at_work = any(procfs.state(each) == "R" for each in pids)
    return False, "%s imported, %s" % (has[0], "busy" if at_work else "idle")


def _was_refused(pids: list[int], sockets: list[procfs.Socket]) -> bool:
    """Return whether a process holds a TCP socket that is neither connected nor listening.

    A refused connection leaves no trace in /proc/net/tcp. But while the TCPStore client waits before its next
    attempt (torch/csrc/distributed/c10d/socket.cpp), it keeps the socket of the last attempt.
    """
    alive = {found.inode for found in sockets}
    return any(procfs.holds_tcp_beside(pid, alive) for pid in pids)


# Stalling


class StallWatch(Watch):
    """A watch for workers that have had no output, CPU use or GPU use for some time."""

    name = "stalls"
    _interval_s = _excused_until = 0.0

    def excuse(self) -> None:
        """Ignore CPU use and output of stalled workers for several seconds, while they help collect evidence.

        Otherwise, each collection would make them count as active again. torch uses CPU time for a flight
        recorder dump, and logs it.
        """
        self._excused_until = time.monotonic() + self._interval_s + DUMP_S

    def begin(self, stall_s: float) -> None:
        """Watch workers that have just started. They count as stalled after `stall_s` seconds."""
        self._stall_s = stall_s
        self._interval_s = min(STALL_LOOK_MAX_S, stall_s / STALL_LOOKS)
        # CPU ticks, bytes printed and the time of the last activity, keyed by local rank
        self._last_use: dict[int, tuple[int, int, float]] = {}
        self._reported = RanksStalled(self._outbox.node, ())
        self._poller.after(self._interval_s, self.name, self._look)

    def _look(self) -> None:
        """Report the stalled workers, if they differ from the last report, and schedule the next check."""
        now = time.monotonic()
        stalled = [w for w in self._running() if now - self._alive_at(w, now) >= self._stall_s]
        halted = [(w.local_rank, procfs.suspended(procfs.family(w.pid))) for w in stalled]
        stopped = tuple([each for each in halted if each[1]])
        report = RanksStalled(self._outbox.node, tuple([w.local_rank for w in stalled]), stopped)
        if report != self._reported:
            self._reported = report
            self._outbox.report(report)
        self._poller.after(self._interval_s, self.name, self._look)

    def _alive_at(self, worker: Worker, now: float) -> float:
        """Return the time at which a worker was last seen active, which may be now."""
        ticks, printed = procfs.cpu_ticks(procfs.family(worker.pid)), worker.printed
        had, had_printed, alive_at = self._last_use.get(worker.local_rank, (0, -1, now))
        idle = max(IDLE_TICKS, IDLE_SHARE * self._interval_s * procfs.TICKS_A_SECOND)
        excused = now <= self._excused_until and now - alive_at >= self._stall_s
        busy = (ticks - had > idle or printed != had_printed) and not excused
        if busy or (self._devices().use(worker.device)[0] or 0) >= IDLE_GPU_PERCENT:
            alive_at = now
        self._last_use[worker.local_rank] = (ticks, printed, alive_at)
        return alive_at


# Resource use


class UsageWatch(Watch):
    """A watch that reports resource use every USAGE_INTERVAL_S seconds, for as long as requested."""

    name = "usage"

    _until = _looked_at = 0.0

    def go_on(self, command: WatchUse) -> None:
        """Report for `for_s` seconds from now. The controller repeats the command while a view is shown."""
        now = time.monotonic()
        idle = now > self._until
        self._until = now + command.for_s
        if idle:
            self._before: dict[int, int] = {}  # CPU ticks at the last measurement, by PID
            self._look()

    def _look(self) -> None:
        """Measure, report unless this is the first measurement, and schedule the next one."""
        now = time.monotonic()
        if now > self._until:
            return
        before, self._before = self._before, {}
        rows = [self._row(worker, before, now) for worker in self._running()]
        self._looked_at = now
        if before:
            self._outbox.report(Usage(self._outbox.node, tuple(rows)))
        self._poller.after(USAGE_INTERVAL_S if before else USAGE_FIRST_S, self.name, self._look)

    def _row(self, worker: Worker, before: dict[int, int], now: float) -> list[object]:
        """Return [local rank, percent of one core, bytes, GPU percent, GPU bytes], as in `Usage`."""
        pids = procfs.family(worker.pid)
        ticks = procfs.cpu_ticks(pids)
        self._before[worker.pid] = ticks
        used = ticks - before.get(worker.pid, ticks)
        cpu = 100.0 * used / procfs.TICKS_A_SECOND / max(now - self._looked_at, 0.01)
        memory = procfs.resident_bytes(pids)
        return [worker.local_rank, round(max(cpu, 0.0), 1), memory, *self._devices().use(worker.device)]
