"""A run's metrics in Prometheus' text format, in a file that is written whole or not at all."""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator, Mapping

from distlaunch.errors import reason
from distlaunch.observers.observer import Observer, Printed
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import Use
from distlaunch.supervisor.state import Phase, State
from distlaunch.supervisor.status import RunState, Status, status_now
from distlaunch.supervisor.summary import Summary

_USES = (
    ("distlaunch_rank_cpu_percent", "CPU use of the rank's processes; 100 = one CPU.", "cpu"),
    ("distlaunch_rank_memory_bytes", "Memory of the rank's processes.", "memory"),
    ("distlaunch_rank_gpu_percent", "How busy the rank's GPU is.", "gpu"),
    ("distlaunch_rank_gpu_memory_bytes", "Memory in use on the rank's GPU.", "gpu_memory"),
)
_BEGAN = ("distlaunch_run_start_timestamp_seconds", "Unix time at which the run began.")
_SINCE = ("distlaunch_run_state_since_timestamp_seconds", "Unix time at which it entered this state.")
_HEARD = ("distlaunch_rank_last_output_timestamp_seconds", "Unix time of the rank's last output.")
EVERY_S = 5.0
"""It is written at most so often for what changes all the time."""


class Metrics(Observer):
    """Writes `path` when the run's state changes, and now and then while ranks print."""

    def __init__(self, path: str, status: Status) -> None:
        self._path, self._status = path, status
        self._state: State | None = None
        self._heard: dict[int, float] = {}
        self._uses: dict[int, Use] = {}
        self._failed = False

    def happened(self, event: Event, state: State, at: float) -> None:
        """Write it if something of it has changed."""
        self._state = state
        status = status_now(self._status, state, time.time())
        if status != self._status and state.phase is not Phase.DONE:
            self._status = status
            self._write()

    def started(self, state: State, at: float) -> None:
        """What the ranks of an earlier generation have said does not count any more."""
        self._heard.clear()
        self._uses.clear()
        self.wants_use = True

    def used(self, uses: Mapping[int, Use], at: float) -> None:
        """Remember it until it is time to write."""
        self._uses.update(uses)
        if self.wake_at is None:
            self.wake_at = time.monotonic() + EVERY_S

    def printed(self, output: Printed) -> None:
        """Note when the rank was last heard."""
        self._heard[output.rank] = time.time()
        if self.wake_at is None:
            self.wake_at = time.monotonic() + EVERY_S

    def woken(self) -> None:
        """Write what ranks have said since."""
        self.wake_at = None
        self._write()

    def ended(self, summary: Summary) -> None:
        """Write how it ended; the file stays, for the next scrape."""
        self.wake_at = None
        self._status = status_now(self._status, summary.state, time.time())
        self._write()

    def _write(self) -> None:
        fresh = f"{self._path}.{os.getpid()}"
        try:
            _check_replaceable(self._path)
            with open(fresh, "w", encoding="utf-8") as file:
                file.write(self._text())
            os.replace(fresh, self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(fresh)
            if not self._failed:
                self.remark(f"metrics.file: can't write {self._path}: {reason(error)}; trying again")
            self._failed = True
        else:
            self._failed = False

    def _text(self) -> str:
        status = self._status
        labels = f'job="{_quoted(status.job)}",run="{_quoted(status.run)}"'
        lines = [
            *_head("distlaunch_run_state", "1 for the run's current state, 0 for the others."),
            *(
                f'distlaunch_run_state{{{labels},state="{state.value}"}} {int(state is status.state)}'
                for state in RunState
            ),
            *_gauge("distlaunch_ranks", "Ranks of the current generation.", labels, status.ranks),
            *_gauge("distlaunch_ranks_running", "Ranks currently running.", labels, self._running()),
            *_gauge("distlaunch_nodes", "Nodes of the current generation.", labels, status.nodes),
            *_gauge("distlaunch_restarts", "Restarts so far.", labels, status.restarts),
            *_gauge(*_BEGAN, labels, status.began),
            *_gauge(*_SINCE, labels, status.since),
        ]
        if status.exit_status is not None:
            lines += _gauge("distlaunch_exit_status", "The run's exit status.", labels, status.exit_status)
        lines += [*self._use_lines(labels)]
        lines += _head(*_HEARD)
        lines += [
            f'{_HEARD[0]}{{{labels},rank="{rank}"}} {heard:.3f}'
            for rank, heard in sorted(self._heard.items())
        ]
        return "\n".join(lines) + "\n"

    def _use_lines(self, labels: str) -> Iterator[str]:
        for name, says, field in _USES:
            values = [(rank, getattr(use, field)) for rank, use in sorted(self._uses.items())]
            known = [(rank, value) for rank, value in values if value is not None]
            if known:
                yield from _head(name, says)
                yield from (f'{name}{{{labels},rank="{rank}"}} {value:.15g}' for rank, value in known)

    def _running(self) -> int:
        return sum(worker.running for worker in self._state.workers) if self._state else 0


def _check_replaceable(path: str) -> None:
    """Raises OSError where a device, a pipe or a folder is, which a file would take the place of."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")


def _head(name: str, says: str) -> tuple[str, str]:
    return f"# HELP {name} {says}", f"# TYPE {name} gauge"


def _gauge(name: str, says: str, labels: str, value: float) -> list[str]:
    return [*_head(name, says), f"{name}{{{labels}}} {value:.15g}"]


def _quoted(text: str) -> str:
    """For a label's value."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
