"""Runs a job from spec to summary."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from distlaunch.job.spec import JobSpec
from distlaunch.launch.start import start_run
from distlaunch.signals import Interrupts
from distlaunch.transports.link import Link

if TYPE_CHECKING:
    from distlaunch.observers.observer import Observer
    from distlaunch.supervisor.summary import Summary


def run_job(
    spec: JobSpec,
    observers: "Iterable[Observer]" = (),
    interrupts: Interrupts | None = None,
    early: Link | None = None,
) -> "Summary":
    """Run `spec`: its run directory has everything, and the `observers` see it. Raises `DistlaunchError`.

    Nothing of the process is touched, no signal and no stream; `interrupts` ends the job early. Several jobs
    may run at once, each in a thread of its own. `observers` are asked for once agents boot, so that a
    generator may import what they need meanwhile. `early` is what `open_early` has opened for it.
    """
    with nullcontext(interrupts) if interrupts else Interrupts() as heard:
        start = start_run(spec, early)
        # Imported only now: agents boot for 20 ms or more, and the supervisor takes 10 to import.
        from distlaunch.launch.supervise import supervise

        return supervise(start, heard, observers)
