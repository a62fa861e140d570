"""Shows a run on the terminal: the ranks' output, notices, and how it ended."""

import math
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from distlaunch.diagnosis.summary import Above, Summary
from distlaunch.job.allocation import Allocation
from distlaunch.job.spec import JobSpec
from distlaunch.observers.console import Console
from distlaunch.observers.observer import Observer, Printed
from distlaunch.state.actions import Notice
from distlaunch.state.events import Event
from distlaunch.state.job import State
from distlaunch.system.signals import Interrupts
from distlaunch.wording import counted, listed

if TYPE_CHECKING:
    from distlaunch.observers.folding import Folding

PATIENCE_S = 5.0
"""Seconds for a reader to take something, at the end of a run whose log files have everything."""
PROGRESS_S = 0.5
"""Between two looks at a start that takes its time."""
HOLD_S = 0.5
"""An error of a node that connects waits so long to be told: the summary, if that comes first, tells more."""
_COLOURS = {"info": None, "warning": 33, "error": 31}


class Terminal(Observer):
    """Shows a run on the console; with `quiet`, only warnings and errors.

    When the reader of our output leaves, the job ends, as a pipeline does, by way of `interrupts`.
    With `waits`, for a run that we don't hold up, a slow reader gets all of it.
    """

    def __init__(
        self,
        interrupts: Interrupts,
        output_fd: int = 1,
        quiet: bool = False,
        fold: bool = False,
        waits: bool = False,
    ) -> None:
        self._interrupts, self._quiet = interrupts, quiet
        self._fold: Folding | None = None
        self._tags: dict[int, str] = {}
        self._starting = False
        self._connecting = True
        self._held: list[Notice] = []
        self._state: State | None = None
        if fold:
            self._begin_folding()
        self._console = Console(
            lambda: interrupts.send(signal.SIGPIPE), output_fd, lambda: waits and not interrupts.any()
        )

    def told(self, notice: Notice, at: float) -> None:
        """Say it, or wait a moment; what comes meanwhile waits, too."""
        if notice.level == "info" and self._quiet:
            return
        if self._held or (self._connecting and notice.level == "error"):
            self._held.append(notice)
            self.wake_at = min(self.wake_at or math.inf, time.monotonic() + HOLD_S)
        else:
            self._say(notice)

    def _say(self, notice: Notice) -> None:
        for line in notice.text.splitlines():
            self._console.say(f"distlaunch: {line}", _COLOURS[notice.level])

    def _release(self, told: Sequence[str] = ()) -> None:
        """Say what was held back, but for what begins one of the lines that are `told` next."""
        held, self._held = self._held, []
        for notice in held:
            if not any(line.startswith(f"{notice.text};") for line in told):
                self._say(notice)

    def remarked(self, text: str) -> None:
        """Say it."""
        self._release()
        self._console.say(f"distlaunch: {text}", _COLOURS["warning"])

    def printed(self, output: Printed) -> None:
        """Show it, if it is to be shown."""
        prefix = output.goes_to.prefix
        self._release()
        if self._starting:
            self._starting, self.wake_at = False, None
        if not output.goes_to.shown:
            return
        if self._fold is None or prefix is None:
            self._console.output(output.rank, output.stream, output.data, prefix)
            return
        self._tags[output.rank] = prefix
        self._fold.add(output.rank, output.stream, output.data, time.monotonic())
        self.wake_at = self._fold.due

    def began(self, spec: JobSpec, chance: float, at: float) -> None:
        """Say which hosts a scheduler gave; fold, if the job wants it; look out for a slow start."""
        if spec.allocation and not self._quiet:
            self._say(Notice("info", _origin(spec, spec.allocation)))
        if spec.logs.fold and self._fold is None:
            self._begin_folding()
        if self._console.has_terminal and not self._quiet:
            self._starting = True
            self.wake_at = time.monotonic() + PROGRESS_S

    def happened(self, event: Event, state: State, at: float) -> None:
        """Remember how far the start is."""
        if self._starting:
            self._state = state

    def started(self, state: State, at: float) -> None:
        """Show the last lines that lack their end: those who printed them have ended."""
        self._connecting = False
        self._release()
        self.drained(state)

    def _show_progress(self) -> None:
        from distlaunch.observers.progress import progress_words  # most starts are quick

        if self._state:
            words = progress_words(self._state)
            self._console.live(f"distlaunch: {words}" if words else "")
        self.wake_at = time.monotonic() + PROGRESS_S

    def _begin_folding(self) -> None:
        from distlaunch.observers.folding import Folding  # few jobs want that

        self._fold = Folding(self._show_folded)

    def _show_folded(self, ranks: list[int], stream: int, line: bytes) -> None:
        from distlaunch.observers.folding import tag_of

        self._console.output(ranks[0], stream, line, tag_of(ranks, self._tags))

    def woken(self) -> None:
        """Show what was held back, or how far the start is."""
        self.wake_at = None
        self._release()
        if self._fold:
            self._fold.flush()
        if self._starting:
            self._show_progress()

    def drained(self, state: State) -> None:
        """Show the last lines that lack their end."""
        if self._fold:
            self._fold.finish()
        self._console.finish_lines()

    def ended(self, summary: Summary) -> None:
        """Tell how it ended, and write out what waits for a slow reader."""
        shown = summary.state.cause is not None or not self._quiet
        lines = summary.lines(self._above(summary)) if shown else []
        self._release(lines)
        if lines:
            first, *others = (f"distlaunch: {line}" for line in lines)
            told = first == self._console.last_said  # the cause may be right above
            for line in others if told else (first, *others):
                self._console.say(line)
        self._console.close(self._patience(summary))

    def close(self) -> None:
        """Show nothing more of a run that goes on."""
        self._release()
        self._console.close(lambda silent_s: silent_s < PATIENCE_S)

    def _above(self, summary: Summary) -> dict[int, Above]:
        """By stream, what the terminal shows already of the rank to blame, if it marks its lines."""
        rank = summary.state.cause.rank if summary.state.cause else None
        if rank is None:
            return {}
        found = {}
        for stream, said in enumerate((summary.last_lines, summary.last_words)):
            mark = self._console.prefix(rank, stream)
            since = self._console.lines_since(rank, stream, _length(said.get(rank, ""))) if mark else None
            found.update({} if since is None else {stream: Above(since, mark.strip())})
        return found

    def _patience(self, summary: Summary) -> Callable[[float], bool]:
        """Whether to keep waiting, at the end, for a reader that has taken nothing for a while.

        If there may be no log files, as under torchrun, we wait until a signal comes.
        """
        needed = summary.state.spec.logs.torchrun is not None
        return lambda silent_s: silent_s < PATIENCE_S or (needed and not self._interrupts.any())


def _origin(spec: JobSpec, allocation: Allocation) -> str:
    """Which hosts an allocation has given the job, and how to have others."""
    names = listed([node.label for node in spec.pool])
    other = "" if "launcher" in spec.places else " (launcher: auto; `--set launcher=local` runs here)"
    return f"{counted(len(spec.pool), 'node')} from {allocation.name}: {names}{other}"


def _length(words: str) -> int:
    """Lines of the last traceback in `words`, with what follows it; 1 without one."""
    _, found, last = words.rpartition("Traceback (most recent call last):")
    return 1 + last.rstrip("\n").count("\n") if found else 1
