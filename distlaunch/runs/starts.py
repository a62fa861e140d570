"""A job that its scheduler starts again: what went before, and how another start is asked for."""

import os
from collections.abc import Callable

from distlaunch.errors import DistlaunchError
from distlaunch.job.allocation import Allocation
from distlaunch.job.spec import Earlier, JobSpec
from distlaunch.runs.folder import run_in
from distlaunch.runs.index import Begun, Starts
from distlaunch.schedulers import load
from distlaunch.supervisor.scheduling import is_to_go_on
from distlaunch.supervisor.state import State


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
