"""Observers of a run. `TABLE` lists them with their conditions. `Observers` (observer.py) notifies each.

recording    writes the run directory (run_directory), and keeps the last output in memory
terminal     shows the run to the user, through the console; screen shows it full-screen
outlet       writes for the console and the run directory in threads, so slow readers don't delay a job
metrics, notifier    write metrics, and run a notification command, for jobs that request this
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distlaunch.observers.observer import Observed, Observer

TABLE: Mapping[str, Callable[["Observed"], object]] = {
    "observers.recording.Recorder": lambda run: True,
    "observers.notifier.Notifier": lambda run: run.spec.notify.command,
    "observers.metrics.Metrics": lambda run: run.spec.metrics,
    "observers.terminal.Terminal": lambda run: run.shown.how == "terminal",
    "observers.terminal.DetachedTerminal": lambda run: run.shown.how == "detached",
    "observers.screen.Screen": lambda run: run.shown.how == "view",
}
"""The class of each observer, and whether a run has it. Observers are called in this order.

Each observer gets its settings from its run. Its module is imported only if a run has this observer.
"""


def observers_of(run: "Observed") -> "Iterator[Observer]":
    """Make the observers of a run."""
    for place, wanted in TABLE.items():
        if wanted(run):
            module, _, name = place.rpartition(".")
            yield getattr(import_module(f"distlaunch.{module}"), name).of(run)
