"""Following runs to their ends, or until Ctrl-C: what logs -f, attach, view and wait share."""

import sys
from collections.abc import Callable

import typer

from distlaunch.cli.stderr import say
from distlaunch.errors import Exit
from distlaunch.runs.folder import Run
from distlaunch.runs.queued_following import runs_of
from distlaunch.state.status import RunState
from distlaunch.system.signals import Interrupts, Signals


def follow_each(which: str | None, seen: Callable[[Run, Interrupts], Run]) -> tuple[Run, int]:
    """Have `seen` follow each run that `which` means, one after another.

    The last one, and the signal on which it was left alone, if it is still alive. Leaves with that signal's
    status where the job waits in a queue. Raises `DistlaunchError`.
    """
    last: Run | None = None
    with Signals() as signals:
        for run in runs_of(which, signals, say):
            last = seen(run, signals)
            if last.alive:
                break
    if last is None:
        raise typer.Exit(128 + signals.received_last)
    return last, signals.received_last


def leave_alone(run: Run, signum: int) -> None:
    """Leave a run that goes on, with the status of the signal that ended us, if one did."""
    if run.alive:
        say(f"detached from {run.id}, which is still running; `distlaunch stop {run.id}` stops it")
        raise typer.Exit(128 + signum if signum else Exit.OK)


def say_over(run: Run) -> None:
    """Tell how a run ended that nobody has followed; of one that is lost `leave_with` does."""
    if run.status.state is not RunState.LOST:
        say(ended_words(run))


def leave_with(run: Run) -> None:
    """With the run's own status. Of one that is lost nobody has told the end yet."""
    if run.status.state is RunState.LOST:
        say(ended_words(run))
    sys.stdout.flush()
    raise typer.Exit(status_of(run))


def status_of(run: Run) -> int:
    """The exit status of a run that is over."""
    return Exit.NODE_LOST if run.status.state is RunState.LOST else run.status.exit_status or Exit.OK


def ended_words(run: Run, lead: str = ":") -> str:
    """How a run ended, for people."""
    status = run.status
    said = f"{run.id}{lead} {status.state.value}"
    if status.exit_status:
        said += f", exit status {status.exit_status}"
    return f"{said}{f': {status.why}' if status.why else ''}; logs: {run.folder}"
