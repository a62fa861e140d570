"""Runs a job as a command of this process: its signals, its terminal, its garbage collector."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from distlaunch.job.spec import JobSpec
from distlaunch.launch.run import run_job
from distlaunch.links.link import Link
from distlaunch.system.signals import Interrupts, Signals

if TYPE_CHECKING:
    from distlaunch.diagnosis.summary import Summary
    from distlaunch.links.door import Door
    from distlaunch.observers.observer import Observer
    from distlaunch.observers.terminal import Terminal
    from distlaunch.plan.gathering import Gathering


def run_shown(
    spec: JobSpec, early: Link | None = None, *, output_fd: int = 1, quiet: bool = False, view: bool = False
) -> "Summary":
    """Run `spec` and show it, with `view` on a screen; ranks' output goes to `output_fd`.

    Raises `DistlaunchError`.
    """
    with Signals(spec.invocation.signals) as signals:  # from here on a Ctrl-C finds a supervisor
        observers = _screen(signals) if view else _observers(signals, output_fd, quiet)
        summary = run_job(spec, observers, signals, early)
    if spec.restarts.requeue:
        from distlaunch.catalog.starts import ask_for_another  # there already; the last act: it may end us
        from distlaunch.cli.stderr import say

        ask_for_another(summary.state, say)
    return summary


def run_gathered(spec: JobSpec, gathering: "Gathering", early: Link | None = None) -> int:
    """Run this node's part of a job whose launchers somebody else started; the exit status of the whole.

    Raises `DistlaunchError`.
    """
    from distlaunch.cli.stderr import say
    from distlaunch.launch.gather import Gathered, gather
    from distlaunch.links.dial import blocked

    with Signals(spec.invocation.signals) as signals:
        if early:
            early.discard()  # its lease may end while the others are waited for
        met = gather(spec, gathering, signals, say)
        if isinstance(met, Gathered):
            return run_controller(met.spec, met.door, signals)
        blocked(signals.watched)
    from distlaunch.launch.joined import serve
    from distlaunch.launch.own_ranks import OwnRanks

    return serve(met, OwnRanks(spec), signals.watched)


def run_controller(spec: JobSpec, door: "Door", signals: Signals) -> int:
    """Run a job whose launchers have joined; its exit status. Raises `DistlaunchError`."""
    from distlaunch.launch.start import start_run
    from distlaunch.launch.supervise import supervise

    start = start_run(spec, door=door)
    return supervise(start, signals, _observers(signals, 1, quiet=True)).state.outcome


def _observers(interrupts: Interrupts, output_fd: int, quiet: bool) -> "Iterator[Terminal]":
    """Who shows the run, made when it is asked for: it takes long to import."""
    import gc

    from distlaunch.observers.terminal import Terminal

    gc.freeze()  # off since the start of the program: what was imported stays, what a long run makes may not
    gc.enable()
    yield Terminal(interrupts, output_fd, quiet)


def _screen(interrupts: Interrupts) -> "Iterator[Observer]":
    import time

    from distlaunch.view.watching import Viewer

    for terminal in _observers(interrupts, 1, quiet=False):
        yield Viewer(terminal, interrupts, time.time())
