"""Takes a run that has begun to its end: the loop, those who see it, the summary."""

from collections.abc import Iterable, Iterator
from importlib import import_module

from distlaunch.job.spec import JobSpec
from distlaunch.launch.loop import Loop
from distlaunch.launch.start import Start
from distlaunch.observers.observer import Observer, Observers
from distlaunch.observers.recording import LastOutput, Recorder
from distlaunch.runs.index import note_end
from distlaunch.signals import Interrupts
from distlaunch.supervisor.summary import Summary

LATE = ("plan.unstarted",)
"""Modules that only a failure needs."""
LATE_IN_ALLOCATIONS = ("schedulers.queue", "runs.starts")


def import_late(spec: JobSpec) -> None:
    """Import what the rest of a run may need: weeks from now another distlaunch may be installed here."""
    for name in (*LATE, *(LATE_IN_ALLOCATIONS if spec.allocation else ())):
        import_module(f"distlaunch.{name}")


def supervise(start: Start, interrupts: Interrupts, observers: Iterable[Observer] = ()) -> Summary:
    """Run the supervisor over the links of `start`; its folder and the `observers` see the run."""
    recorder, last_output = Recorder(start.folder, start.status), LastOutput()
    seeing = Observers((last_output, recorder, *_wanted(start, last_output), *observers))
    loop = Loop(start, seeing, interrupts)
    import_late(start.spec)  # while agents boot
    state = loop.run()
    seeing.tell(Observer.drained, state)
    summary = last_output.summary(state, start.folder.path, start.clock.now())
    summary = summary._replace(lagging=recorder.lagging(state))
    seeing.tell(Observer.ended, summary)
    recorder.close()
    note_end(start.run_id)
    return summary


def _wanted(start: Start, last_output: LastOutput) -> Iterator[Observer]:
    """Those that the job itself asks for; few do."""
    if start.spec.notify.command:
        from distlaunch.observers.notifier import Notifier

        yield Notifier(start.spec, start.run_id, start.folder.path, last_output)
    if start.spec.metrics:
        from distlaunch.observers.metrics import Metrics

        yield Metrics(start.spec.metrics, start.status)
