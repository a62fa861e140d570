"""Runs a job from spec to summary, for programs; the command does so in `cli/running.py`."""

from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

from distlaunch.errors import DistlaunchError
from distlaunch.job.spec import JobSpec
from distlaunch.launch.start import start_run
from distlaunch.system.signals import Interrupts

if TYPE_CHECKING:
    from distlaunch.diagnosis.summary import Summary
    from distlaunch.observers.observer import Observer


def run_job(
    spec: JobSpec, observers: "Iterable[Observer]" = (), interrupts: Interrupts | None = None
) -> "Summary":
    """Run `spec`: its run folder has everything, and the `observers` see it. Raises `DistlaunchError`.

    Nothing of the process is touched, no signal and no stream; `interrupts` ends the job early. Several jobs
    may run at once, each in a thread of its own.
    """
    with nullcontext(interrupts) if interrupts else Interrupts() as heard:
        start = start_run(spec)
        # Imported only now: agents boot for 20 ms or more, and the supervisor takes 10 to import.
        from distlaunch.launch.supervise import supervise

        return supervise(start, heard, observers)


def run_by_hand(
    spec: JobSpec, tell: Callable[[str], object], observers: "Iterable[Observer]", interrupts: Interrupts
) -> int:
    """Run this node's part of a job whose launchers were started by hand; the exit status of the whole.

    `tell` gets what there is to say meanwhile. Raises `DistlaunchError`.
    """
    from distlaunch.by_hand.peers import Peers
    from distlaunch.launch.supervise import supervise

    how = spec.invocation
    assert how.by_hand is not None
    with closing(Peers(spec, how.by_hand, tell)) as peers:
        try:
            sizes = tuple(peers.meet(interrupts))
            met = how._replace(by_hand=how.by_hand._replace(sizes=sizes))
            start = start_run(spec._replace(invocation=met))
            status = supervise(start, interrupts, observers, peers).state.outcome
        except DistlaunchError as error:
            peers.tell(error.exit_status, str(error))
            raise
        if status:
            return status
        ended = peers.wait_for_all(interrupts)
        if ended:
            tell(ended.words)
        return ended.status if ended else status
