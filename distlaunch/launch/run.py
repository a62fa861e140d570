"""Runs a job from spec to summary."""

from typing import TYPE_CHECKING

from distlaunch.job.spec import JobSpec
from distlaunch.launch.start import start_run
from distlaunch.rim.signals import Signals

if TYPE_CHECKING:
    from distlaunch.launch.summary import Summary


def run_job(spec: JobSpec, *, as_json: bool = False, quiet: bool = False) -> "Summary":
    """Run `spec`; ranks' output goes to the console and the run folder. Raises `DistlaunchError`."""
    with Signals() as signals:  # from here on a Ctrl-C finds a supervisor that ends what was started
        start = start_run(spec)
        # Imported only now: agents boot for 20 ms or more, and the supervisor takes 10 to import.
        from distlaunch.launch.supervise import supervise

        return supervise(start, signals, as_json=as_json, quiet=quiet)
