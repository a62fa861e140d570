"""The starts of a job that a scheduler queues: a line for each, beside the run folders.

By them a run knows what went before, and how often its job may be started again.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.catalog.folder import run_in
from distlaunch.errors import DistlaunchError
from distlaunch.job.allocation import Allocation
from distlaunch.job.spec import Earlier, JobSpec
from distlaunch.schedulers import load
from distlaunch.state.job import State
from distlaunch.supervisor.requeueing import is_to_go_on


class Begun(Frozen):
    """A start: its run, of which job, and how often the scheduler had started that before."""

    run: str
    job: str
    starts: int


class Starts:
    """Those of the job `queued`, of that scheduler's queue, whose run folders are in `folder`."""

    def __init__(self, folder: str, queued: str, scheduler: str) -> None:
        self.path = os.path.join(folder, f"{scheduler}-{queued}.jsonl")

    def note(self, begun: Begun) -> None:
        """Another start; where it can't be noted, the next one knows nothing of it."""
        self._append(begun._asdict())

    def note_requeue(self) -> None:
        """Another start has been asked for."""
        self._append({"requeue": True})

    @property
    def requeues(self) -> int:
        """How often one has been asked for."""
        return sum("requeue" in line for line in self._lines())

    def begun(self) -> list[Begun]:
        """The oldest first."""
        fields = Begun._fields
        return [
            Begun(**{name: line[name] for name in fields})
            for line in self._lines()
            if line.keys() >= {*fields}
        ]

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self.path, encoding="utf-8") as file:
                lines = file.read().splitlines()
        except OSError:
            return
        for line in lines:
            with contextlib.suppress(ValueError):
                document = json.loads(line)
                if isinstance(document, dict):
                    yield document

    def _append(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(fd, json.dumps(line).encode() + b"\n")
            finally:
                os.close(fd)


def continued(spec: JobSpec) -> JobSpec:
    """`spec` with what went before, if the scheduler has started this very job before."""
    allocation = spec.allocation
    if allocation is None or not allocation.starts:
        return spec
    starts = _starts(spec, allocation).begun()
    before = [each for each in starts if each.job == spec.name and each.starts < allocation.starts]
    if not before:
        return spec
    last = run_in(os.path.join(spec.logs.folder, before[-1].run))
    restarts = last.status.restarts + 1 if last else len(before)
    return spec._replace(invocation=spec.invocation._replace(earlier=Earlier(before[0].run, restarts)))


def note_start(spec: JobSpec, run_id: str) -> None:
    """Have the next start know of this one."""
    assert spec.allocation is not None
    _starts(spec, spec.allocation).note(Begun(run_id, spec.name, spec.allocation.starts))


def ask_for_another(state: State, tell: Callable[[str], None]) -> None:
    """Have the scheduler start the job again, if it is to go on; `tell` gets what comes of it."""
    allocation, most = state.spec.allocation, state.spec.restarts.requeue
    if allocation is None or not allocation.requeues or not is_to_go_on(state):
        return
    starts = _starts(state.spec, allocation)
    if (made := starts.requeues) >= most:
        times = "once" if made == 1 else f"{made} times"
        tell(f"not requeueing {allocation.name}: already requeued {times} (restarts.requeue)")
        return
    tell(f"requeueing {allocation.name}, {made + 1} of {most}")
    starts.note_requeue()
    try:
        load(allocation.scheduler).requeue(allocation.job)  # which may kill us at once
    except DistlaunchError as error:
        tell(f"can't requeue {allocation.name}: {error}")


def _starts(spec: JobSpec, allocation: Allocation) -> Starts:
    return Starts(spec.logs.folder, allocation.job, allocation.scheduler)
