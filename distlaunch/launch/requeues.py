"""Starts and ends by a scheduler: the earlier runs of a job that is started again, and requeueing."""

import os
from collections.abc import Callable

from distlaunch.errors import DistlaunchError
from distlaunch.job.spec import Earlier, JobSpec
from distlaunch.observers.run_directory import status_in
from distlaunch.observers.run_list import Begun, append, lines_of, starts_in, starts_path
from distlaunch.schedulers import load
from distlaunch.supervisor.allocation_end import is_to_go_on
from distlaunch.supervisor.events import AllocationReported
from distlaunch.supervisor.state import State


def continued(spec: JobSpec) -> JobSpec:
    """Add the earlier runs to `spec` if the scheduler has started this job before."""
    allocation = spec.allocation
    if allocation is None or not allocation.starts:
        return spec
    starts = [each for each in starts_in(_path_of(spec)) if each.job == spec.name]
    before = [each for each in starts if each.starts < allocation.starts]
    if not before:
        return spec
    last = status_in(os.path.join(spec.logs.folder, before[-1].run))
    restarts = last.restarts + 1 if last else len(before)
    return spec._replace(invocation=spec.invocation._replace(earlier=Earlier(before[0].run, restarts)))


def note_start(spec: JobSpec, run_id: str) -> None:
    """List this start for the next one."""
    assert spec.allocation is not None
    append(_path_of(spec), Begun(run_id, spec.name, spec.allocation.starts)._asdict())


def fate_by_stop(spec: JobSpec) -> AllocationReported:
    """Return the fate of a job whose scheduler doesn't answer: cancelled, or not known."""
    stopped = any("stop" in line for line in lines_of(_path_of(spec)))
    return AllocationReported(True, "was cancelled", final=True) if stopped else AllocationReported(None)


def ask_for_another(state: State, tell: Callable[[str], None]) -> None:
    """Requeue the job if it is to go on; `tell` takes messages about the outcome."""
    allocation, most = state.spec.allocation, state.spec.restarts.requeue
    if allocation is None or not allocation.requeues or not is_to_go_on(state):
        return
    path = _path_of(state.spec)
    if (made := sum("requeue" in line for line in lines_of(path))) >= most:
        times = "once" if made == 1 else f"{made} times"
        tell(f"not requeueing {allocation.name}: already requeued {times} (restarts.requeue)")
        return
    tell(f"requeueing {allocation.name}, {made + 1} of {most}")
    append(path, {"requeue": True})
    try:
        load(allocation.scheduler).requeue(allocation.job)  # which may kill this process at once
    except DistlaunchError as error:
        tell(f"can't requeue {allocation.name}: {error}")


def _path_of(spec: JobSpec) -> str:
    assert spec.allocation is not None
    return starts_path(spec.logs.folder, spec.allocation.job, spec.allocation.scheduler)
