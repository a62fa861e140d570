"""Writes the metrics of a run in the Prometheus text format to a file, which is replaced as a whole."""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator, Mapping

from distlaunch.errors import reason
from distlaunch.observers.observer import Observed, Observer, Printed
from distlaunch.observers.outlet import LOOK_S, Backlog
from distlaunch.observers.run_directory import FLUSH_S
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import Use
from distlaunch.supervisor.state import Phase, State
from distlaunch.supervisor.status import RunState, status_now
from distlaunch.supervisor.summary import Summary

_OF_RANKS = (
    ("rank_cpu_percent", "CPU use of the rank's processes; 100 = one CPU.", "cpu"),
    ("rank_memory_bytes", "Memory of the rank's processes.", "memory"),
    ("rank_gpu_percent", "How busy the rank's GPU is.", "gpu"),
    ("rank_gpu_memory_bytes", "Memory in use on the rank's GPU.", "gpu_memory"),
)
"""The name and help of each metric, and the field of `Use` that contains its value."""
_OF_RUN = (
    ("ranks", "Ranks of the current attempt.", "ranks"),
    ("nodes", "Nodes of the current attempt.", "nodes"),
    ("restarts", "Restarts so far.", "restarts"),
    ("run_start_timestamp_seconds", "Unix time at which the run began.", "began"),
    ("run_state_since_timestamp_seconds", "Unix time at which it entered this state.", "since"),
    ("exit_status", "The run's exit status.", "exit_status"),
)
"""The name and help of each metric, and the field of `Status` that contains its value."""
_BEGIN = "# HELP distlaunch_"
"""The beginning of a metrics file."""
EVERY_S = 5.0
"""Minimum seconds between two writes caused by output or measurements."""


class Metrics(Observer):
    """The writer of the job's metrics file, at changes of the run's state and regularly while ranks print.

    `Observer` describes when each method is called.
    """

    def __init__(self, run: Observed) -> None:
        self._path, self._status = str(run.spec.metrics), run.status
        self._state: State | None = None
        self._heard: dict[int, float] = {}
        self._uses: dict[int, Use] = {}
        self._backlog = Backlog[bytes]("metrics", self._write)
        self._failure, self._failed = "", False

    def happened(self, event: Event, state: State, at: float) -> None:
        """Write the file if one of its values has changed."""
        self._state = state
        status = status_now(self._status, state, time.time())
        if status != self._status and state.phase is not Phase.DONE:
            self._status = status
            self.woken()

    def started(self, state: State, at: float) -> None:
        """Forget the times of output and the resource use of ranks in the previous attempt."""
        self._heard.clear()
        self._uses.clear()
        self.wants_use = True

    def used(self, uses: Mapping[int, Use], at: float) -> None:
        """Remember the ranks' resource use until the next write."""
        self._uses.update(uses)
        self._write_soon()

    def printed(self, output: Printed) -> None:
        """Remember the time of the rank's last output."""
        self._heard[output.rank] = time.time()
        self._write_soon()

    def _write_soon(self) -> None:
        if self.wake_at is None:
            self.wake_at = time.monotonic() + EVERY_S

    def woken(self) -> None:
        """Write the file, from a thread, and wait a moment for that. Report a failure once."""
        self.wake_at = None
        text = "".join(self._lines()).encode()
        with self._backlog.changed:
            if self._backlog.queue:  # the disk is slow, and only the newest text matters
                self._backlog.queue[0] = text
            else:
                self._backlog.add(text, 1)
        self._backlog.drain(LOOK_S, lambda quiet_s: False)
        self._report()

    def _report(self) -> None:
        failure = self._failure
        if failure and not self._failed:
            what = f"metrics.file: can't replace {self._path}: {failure}"
            self.remark(f"{what}; it must be a file in a writable directory, on a disk that isn't full")
        self._failed = bool(failure)

    def _write(self) -> None:
        """Replace the file by the newest text. Called by the thread of the backlog."""
        with self._backlog.changed:
            text = self._backlog.queue.popleft()
        fresh = f"{self._path}.{os.getpid()}"
        try:
            _check_replaceable(self._path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fresh)
            with open(fresh, "xb") as file:  # not a link that others planted
                file.write(text)
            os.replace(fresh, self._path)
            self._failure = ""
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(fresh)
            self._failure = reason(error)
        with self._backlog.changed:
            self._backlog.written(1)

    def ended(self, summary: Summary) -> None:
        """Write how the run ended. The file remains for the next scrape."""
        self._status = status_now(self._status, summary.state, time.time())
        self.woken()
        if not self._backlog.drain(FLUSH_S, lambda quiet_s: quiet_s < FLUSH_S):
            self._failure = "the disk is too slow"
        self._backlog.end()
        self._report()

    def _lines(self) -> Iterator[str]:
        labels = f'job="{_quoted(self._status.job)}",run="{_quoted(self._status.run)}"'
        for name, says, values in self._gauges():
            yield f"{_BEGIN}{name} {says}\n# TYPE distlaunch_{name} gauge\n"
            for label, value in values.items():
                yield f"distlaunch_{name}{{{labels}{label}}} {value:.15g}\n"

    def _gauges(self) -> Iterator[tuple[str, str, Mapping[str, float]]]:
        """Yield the name, the help and the values (keyed by label) of each gauge."""
        states = {f',state="{state.value}"': int(state is self._status.state) for state in RunState}
        yield "run_state", "1 for the run's current state, 0 for the others.", states
        running = sum(worker.running for worker in self._state.workers) if self._state else 0
        yield "ranks_running", "Ranks currently running.", {"": running}
        for name, says, field in _OF_RUN:
            if (value := getattr(self._status, field)) is not None:
                yield name, says, {"": value}
        for name, says, field in _OF_RANKS:
            found = {rank: getattr(use, field) for rank, use in self._uses.items()}
            known = {rank: value for rank, value in found.items() if value is not None}
            if known:
                yield name, says, _by_rank(known)
        heard = {rank: round(at, 3) for rank, at in self._heard.items()}
        yield "rank_last_output_timestamp_seconds", "Unix time of the rank's last output.", _by_rank(heard)


def has_other_content(path: str) -> bool:
    """Return whether `path` is known to be a file, other than an empty one, without a run's metrics."""
    with contextlib.suppress(OSError):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return file.read(len(_BEGIN)) not in (b"", _BEGIN.encode())
    return False


def _check_replaceable(path: str) -> None:
    """Raise OSError if `path` is a device, a pipe or a directory, because it would be replaced by a file."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")


def _by_rank(values: Mapping[int, float]) -> dict[str, float]:
    return {f',rank="{rank}"': value for rank, value in sorted(values.items())}


def _quoted(text: str) -> str:
    """Return `text` as the value of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
