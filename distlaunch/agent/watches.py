"""Watches running workers from outside: which join the rendezvous, and which stall."""

import time

from distlaunch.agent.messages import RanksJoined, RanksLag, RanksStalled
from distlaunch.agent.probes import activity, gpus, joins
from distlaunch.agent.wire import STALL_LOOK_MAX_S, STALL_LOOKS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, List, Optional, Set, Tuple

    from distlaunch.agent.outbox import Outbox
    from distlaunch.agent.poller import Poller
    from distlaunch.agent.worker import Worker

JOIN_INTERVAL_S, JOIN_INTERVAL_MAX_S = 0.02, 1.0
JOIN_SLOWER = 1.02
"""The join watch looks this often, ever more slowly: the kernel announces no connection of others. A gap is a
fiftieth of the time since the start: ranks that join late and end soon are still seen."""
LAG_S, LAG_MAX_S = 5.0, 30.0
"""How long after the start to report what the missing workers are doing. Again after half of the time since
the start, but within these limits: a job may have no rendezvous."""
IDLE_SHARE = 0.01
"""Less CPU than this share of one core counts as idle: waiting threads wake up now and then."""
IDLE_TICKS = 2
"""This few clock ticks between two looks count as idle, too: an idle torch process uses one now and then."""
IDLE_GPU_PERCENT = 1


class JoinWatch:
    """Reports which workers have connected to the rendezvous `port`, and what the others do.

    `counted` is as `joins.Arrivals` has it.
    """

    def __init__(
        self,
        poller: "Poller",
        outbox: "Outbox",
        running: "Callable[[], List[Worker]]",
        port: int,
        counted: "Optional[Tuple[bytes, ...]]",
    ) -> None:
        self._poller, self._outbox, self._running, self._port = poller, outbox, running, port
        self._arrivals = joins.Arrivals(port, counted)
        self._told: "Dict[int, str]" = {}
        self._began = time.monotonic()
        self._lag_at = self._began + LAG_S
        self.joined: "Set[int]" = set()
        self._look(JOIN_INTERVAL_S)

    def stop(self) -> None:
        """Watch no more."""
        self._poller.cancel("joins")

    def _look(self, interval_s: float) -> None:
        missing = {w.local_rank: w.pid for w in self._running() if w.local_rank not in self.joined}
        fresh = self._arrivals.look(missing)
        if fresh:
            self.joined |= fresh
            self._outbox.report(RanksJoined(sorted(fresh)))
        left = {rank: pid for rank, pid in missing.items() if rank not in fresh}
        if left:
            if time.monotonic() >= self._lag_at:
                self._tell_who_lags(left)
            slower = min(interval_s * JOIN_SLOWER, JOIN_INTERVAL_MAX_S)
            self._poller.after(interval_s, "joins", lambda: self._look(slower))

    def _tell_who_lags(self, left: "Dict[int, int]") -> None:
        now = time.monotonic()
        self._lag_at = now + min(max(LAG_S, (now - self._began) / 2), LAG_MAX_S)
        seen = dict(zip(left, activity.doing(left.values(), self._port)))
        fresh = {rank: words for rank, (_, words) in seen.items() if self._told.get(rank) != words}
        if fresh:
            self._told.update(fresh)
            ranks = [[rank, seen[rank][0], words] for rank, words in sorted(fresh.items())]
            self._outbox.report(RanksLag(ranks))


class _Pulse:
    """When a worker was last seen to do something."""

    def __init__(self, ticks: int, printed: int, alive_at: float) -> None:
        self.ticks, self.printed, self.alive_at = ticks, printed, alive_at


class StallWatch:
    """Reports the workers that print nothing and use no CPU and no GPU for `stall_s` seconds."""

    def __init__(
        self, poller: "Poller", outbox: "Outbox", running: "Callable[[], List[Worker]]", stall_s: float
    ) -> None:
        self._poller, self._outbox, self._running, self._stall_s = poller, outbox, running, stall_s
        self._interval_s = min(STALL_LOOK_MAX_S, stall_s / STALL_LOOKS)
        self._pulses: "Dict[int, _Pulse]" = {}
        self._told = RanksStalled([], [])
        self._gpus: "Optional[gpus.Utilization]" = None
        self._poller.after(self._interval_s, "stalls", self._look)

    def stop(self) -> None:
        """Watch no more."""
        self._poller.cancel("stalls")

    def _look(self) -> None:
        now = time.monotonic()
        self._gpus = self._gpus or gpus.Utilization()  # not before: NVML takes its time
        for worker in self._running():
            ticks = activity.cpu_ticks(activity.tree(worker.pid))
            self._feel(worker, _Pulse(ticks, worker.printed, now), self._gpus)
        self._tell([w for w in self._running() if now - self._pulses[w.local_rank].alive_at >= self._stall_s])
        self._poller.after(self._interval_s, "stalls", self._look)

    def _tell(self, stalled: "List[Worker]") -> None:
        stopped = [[worker.local_rank, activity.stopped(worker.pid)] for worker in stalled]
        told = RanksStalled(
            sorted(w.local_rank for w in stalled), sorted(each for each in stopped if each[1])
        )
        if told != self._told:
            self._told = told
            self._outbox.report(told)

    def _feel(self, worker: "Worker", pulse: "_Pulse", devices: "gpus.Utilization") -> None:
        before = self._pulses.get(worker.local_rank)
        self._pulses[worker.local_rank] = pulse
        if before is None:
            return
        idle = max(IDLE_TICKS, IDLE_SHARE * self._interval_s * activity.TICKS_A_SECOND)
        busy = pulse.ticks - before.ticks > idle or pulse.printed != before.printed
        if not busy and devices.percent(worker.device) < IDLE_GPU_PERCENT:
            pulse.alive_at = before.alive_at
