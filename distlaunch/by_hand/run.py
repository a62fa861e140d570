"""Runs one node's part of a job whose launchers were started by hand."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from distlaunch.by_hand.peers import Peers
from distlaunch.errors import DistlaunchError
from distlaunch.job.spec import ByHand, JobSpec
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
            met = how.by_hand._replace(**peers.meet(interrupts)._asdict())
            for line in _renumbered(met):
                tell(line)
            start = start_run(spec._replace(invocation=how._replace(by_hand=met)))
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


def _renumbered(met: ByHand) -> Iterator[str]:
    """What to say where the user wanted another number."""
    wanted = met.arrival.places[0] if met.arrival else None
    if wanted is not None and wanted != met.node_rank:
        why = "with c10d it counts only if all nodes have different ones; node 0 is on the endpoint's machine"
        yield f"this is node {met.node_rank}, not --node-rank {wanted}: {why}"
