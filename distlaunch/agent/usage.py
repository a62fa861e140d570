"""What workers use of their node, sampled as long as somebody watches."""

import os
import time

from distlaunch.agent.messages import Usage
from distlaunch.agent.probes import activity, gpus, procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional

    from distlaunch.agent.outbox import Outbox
    from distlaunch.agent.poller import Poller
    from distlaunch.agent.worker import Worker

INTERVAL_S, FIRST_S = 2.0, 0.5
"""Between two looks; the second comes sooner, since it takes two to tell anything."""
PAGE = os.sysconf("SC_PAGE_SIZE")


class UsageWatch:
    """Reports every INTERVAL_S, for as long as it was last asked to."""

    def __init__(self, poller: "Poller", outbox: "Outbox", running: "Callable[[], List[Worker]]") -> None:
        self._poller, self._outbox, self._running = poller, outbox, running
        self._until = 0.0
        self._before: "Dict[int, int]" = {}
        self._looked_at = 0.0
        self._gpus: "Optional[gpus.Utilization]" = None

    def go_on(self, for_s: float) -> None:
        """Report for so many seconds from now on."""
        now = time.monotonic()
        asleep = now > self._until
        self._until = now + for_s
        if asleep:
            self._before = {}
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now > self._until:
            return
        self._gpus = self._gpus or gpus.Utilization()
        before, self._before = self._before, {}
        rows = [self._row(worker, before, now, self._gpus) for worker in self._running()]
        self._looked_at = now
        if before:
            self._outbox.report(Usage(rows))
        self._poller.after(INTERVAL_S if before else FIRST_S, "usage", self._look)

    def _row(
        self, worker: "Worker", before: "Dict[int, int]", now: float, devices: "gpus.Utilization"
    ) -> "List[Any]":
        """local rank, CPU in percent of one, bytes, GPU in percent, bytes there; None = not known."""
        pids = activity.tree(worker.pid)
        ticks = activity.cpu_ticks(pids)
        self._before[worker.pid] = ticks
        used = ticks - before.get(worker.pid, ticks)
        cpu = 100.0 * used / activity.TICKS_A_SECOND / max(now - self._looked_at, 0.01)
        memory = sum(procfs.resident_pages(pid) for pid in pids) * PAGE
        return [worker.local_rank, round(max(cpu, 0.0), 1), memory, *devices.use(worker.device)]
