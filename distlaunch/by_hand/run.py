"""Runs one node's part of a job whose launchers were started by hand."""

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import TYPE_CHECKING

from distlaunch.by_hand.peers import Peers
from distlaunch.errors import DistlaunchError
from distlaunch.job.spec import JobSpec
from distlaunch.launch.start import start_run
from distlaunch.launch.supervise import supervise
from distlaunch.system.signals import Interrupts

if TYPE_CHECKING:
    from distlaunch.observers.observer import Observer


def run_by_hand(
    spec: JobSpec, tell: Callable[[str], object], observers: "Iterable[Observer]", interrupts: Interrupts
) -> int:
    """Run this node's part of a job whose launchers were started by hand; the exit status of the whole.

    `tell` gets what there is to say meanwhile. Raises `DistlaunchError`.
    """
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
