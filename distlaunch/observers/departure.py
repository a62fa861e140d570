"""A run that its command leaves: shown until all ranks have started, known by its folder from then on."""

import os
from collections.abc import Callable

from distlaunch.observers.observer import Observer
from distlaunch.observers.terminal import Terminal
from distlaunch.supervisor.actions import Notice
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import WorkerPhase
from distlaunch.supervisor.state import Phase, State
from distlaunch.supervisor.summary import Summary


class Departure(Observer):
    """Shows what a terminal would, without the ranks' output, until all have started; then calls `leave`."""

    def __init__(self, terminal: Terminal, leave: Callable[[State], None]) -> None:
        self._terminal: Terminal | None = terminal
        self._leave = leave

    def happened(self, event: Event, state: State, at: float) -> None:
        """Leave as soon as nothing of the start can fail any more."""
        waits = any(worker.phase is WorkerPhase.PLANNED for worker in state.workers)
        if self._terminal and state.phase is Phase.RUNNING and not waits:
            self._terminal.close()
            self._terminal = None
            self._leave(state)

    def told(self, notice: Notice, at: float) -> None:
        """Say it, as long as somebody listens."""
        if self._terminal:
            self._terminal.told(notice, at)

    def remarked(self, text: str) -> None:
        """Say it, as long as somebody listens; then keep it."""
        if self._terminal:
            self._terminal.remarked(text)
        else:
            os.write(2, f"distlaunch: {text}\n".encode(errors="backslashreplace"))

    def ended(self, summary: Summary) -> None:
        """Tell how it ended if that was before all ranks had started."""
        if self._terminal:
            self._terminal.ended(summary)


def silence(log: str) -> None:
    """Take the standard streams away from the terminal; what still goes to stderr is kept in `log`."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError:
        errors = os.dup(null)
    for fd, target in enumerate((null, null, errors)):
        os.dup2(target, fd)
    os.close(null)
    os.close(errors)
