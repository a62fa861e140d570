"""Runs a job from spec to summary."""

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from distlaunch.errors import DistlaunchError
from distlaunch.job.spec import JobSpec
from distlaunch.launch.start import start_run
from distlaunch.rim.signals import Signals

if TYPE_CHECKING:
    from distlaunch.launch.summary import Summary


def run_by_hand(spec: JobSpec, tell: Callable[[str], object]) -> int:
    """Run this node's part of a job whose launchers were started by hand; the exit status of the whole.

    `tell` gets what there is to say meanwhile. Raises `DistlaunchError`.
    """
    from distlaunch.launch.opening import ahead
    from distlaunch.launch.peers.meeting import Peers
    from distlaunch.launch.supervise import supervise

    invocation = spec.invocation
    assert invocation.by_hand is not None
    with Signals(invocation.signals) as signals, closing(Peers(spec, invocation.by_hand, tell)) as peers:
        early = ahead.take()  # its lease may end while the others are waited for
        if early:
            early.discard()
        try:
            sizes = tuple(peers.meet(signals))
            met = invocation._replace(by_hand=invocation.by_hand._replace(sizes=sizes))
            spec = spec._replace(invocation=met)
            status = supervise(start_run(spec), signals, peers, as_json=False, quiet=True).state.outcome
        except DistlaunchError as error:
            peers.tell(error.exit_status, str(error))
            raise
        if status:
            return status
        ended = peers.wait_for_all(signals)
        if ended:
            tell(ended.words)
        return ended.status if ended else status


def run_job(spec: JobSpec, *, as_json: bool = False, quiet: bool = False) -> "Summary":
    """Run `spec`; ranks' output goes to the console and the run folder. Raises `DistlaunchError`."""
    with Signals(spec.invocation.signals) as signals:  # from here on a Ctrl-C finds a supervisor
        start = start_run(spec)
        # Imported only now: agents boot for 20 ms or more, and the supervisor takes 10 to import.
        from distlaunch.launch.supervise import supervise

        return supervise(start, signals, as_json=as_json, quiet=quiet)
