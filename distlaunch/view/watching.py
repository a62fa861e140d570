"""A screen for a run: of our own, as one of its observers, or one that goes on elsewhere, by its folder."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping

from distlaunch.job.spec import JobSpec
from distlaunch.observers.observer import Observer, Printed
from distlaunch.observers.terminal import Terminal
from distlaunch.observers.watched import USE, WATCHED
from distlaunch.runs.folder import Run
from distlaunch.runs.following import LOOK_S, over, pause, summary_of
from distlaunch.runs.retelling import Retelling
from distlaunch.supervisor.actions import Notice
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import Use
from distlaunch.supervisor.state import State
from distlaunch.supervisor.summary import Summary
from distlaunch.system.signals import Interrupts
from distlaunch.view.picture import Picture
from distlaunch.view.show import Screen, screen

TOUCH_S = 2.0


def watch(run: Run, interrupts: Interrupts) -> Run:
    """Show the run until it is over, or the user leaves; the run as it is then. Raises `HistoryError`."""
    picture = Picture(run.status.began)
    retelling = Retelling(run.folder, picture)
    picture.moment = lambda: retelling.moment
    try:
        with screen(picture) as shown:
            run = _watched(run, retelling, picture, shown, interrupts)
        if not run.alive and retelling.state and (summary := summary_of(run.folder, retelling.state)):
            Terminal(interrupts).ended(summary)
        return run
    finally:
        retelling.close()


def _watched(run: Run, retelling: Retelling, picture: Picture, shown: Screen, interrupts: Interrupts) -> Run:
    touched_at = 0.0
    while not interrupts.any() and not shown.left:
        if time.monotonic() - touched_at > TOUCH_S:
            touched_at = time.monotonic()
            _touch(run.folder)
            picture.used(_uses(run.folder), 0.0)
        run = over(run)
        retelling.catch_up()
        shown.look()
        if not run.alive:
            break
        pause(interrupts, LOOK_S)
    return run


def _touch(folder: str) -> None:
    """Tell the controller that somebody watches; who may not write there sees what there is."""
    path = os.path.join(folder, WATCHED)
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        os.utime(path)


def _uses(folder: str) -> Mapping[int, Use]:
    try:
        with open(os.path.join(folder, USE), "rb") as file:
            return {rank: Use(*use) for rank, *use in json.load(file)["ranks"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


class Viewer(Observer):
    """Shows our own run on a screen; at its end, what `run` would have said then."""

    wants_use = True

    def __init__(self, terminal: Terminal, interrupts: Interrupts, began: float) -> None:
        self._terminal, self._interrupts = terminal, interrupts
        self._picture = Picture(began)
        self._stack = contextlib.ExitStack()
        self._screen: Screen | None = self._stack.enter_context(screen(self._picture, "stop the run"))
        self._notices: list[tuple[Notice, float]] = []
        self.wake_at = 0.0

    def began(self, spec: JobSpec, chance: float, at: float) -> None:
        """Pass it on."""
        self._picture.began(spec, chance, at)

    def happened(self, event: Event, state: State, at: float) -> None:
        """Pass it on."""
        self._picture.happened(event, state, at)

    def started(self, state: State, at: float) -> None:
        """Pass it on."""
        self._picture.started(state, at)

    def told(self, notice: Notice, at: float) -> None:
        """Keep it for the end, too."""
        self._picture.told(notice, at)
        self._notices.append((notice, at))

    def used(self, uses: Mapping[int, Use], at: float) -> None:
        """Pass it on."""
        self._picture.used(uses, at)

    def printed(self, output: Printed) -> None:
        """Pass it on."""
        self._picture.printed(output)

    def woken(self) -> None:
        """Look after the screen; who leaves it stops the run, as Ctrl-C does."""
        self.wake_at = time.monotonic() + LOOK_S
        if self._screen:
            self._screen.look()
            if self._screen.left:
                self._screen.left = False
                self._interrupts.send(signal.SIGINT)

    def ended(self, summary: Summary) -> None:
        """Close the screen, and say what `run` says."""
        self.wake_at, self._screen = None, None
        self._stack.close()
        for notice, at in self._notices:
            self._terminal.told(notice, at)
        self._terminal.ended(summary)
