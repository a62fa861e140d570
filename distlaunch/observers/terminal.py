"""Shows a run on the terminal: how its start proceeds, the ranks' output, messages, and how it ended."""

import math
import os
import signal
import time
from collections.abc import Callable, Sequence

from distlaunch.job.allocation import Allocation
from distlaunch.job.spec import JobSpec
from distlaunch.observers.console import Console, Folding
from distlaunch.observers.observer import Observer, Printed
from distlaunch.signals import Interrupts
from distlaunch.supervisor.actions import Notice
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.nodes import Reaping, Up, WorkerPhase
from distlaunch.supervisor.state import Phase, State
from distlaunch.supervisor.summary import Above, Summary
from distlaunch.wording import counted, listed, spans

PATIENCE_S = 5.0
"""Seconds for a reader to take something, at the end of a run whose log files have everything."""
PROGRESS_S = 0.5
"""Between two looks at a start that takes its time."""
HOLD_S = 0.5
"""An error of a node that connects waits so long to be told: the summary, if that comes first, tells more."""
MOST_NAMED = 4
"""Nodes that are named as missing from a start."""


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
        self._starting = False
        self._connecting = True
        self._held: list[Notice] = []
        self._state: State | None = None
        self._console = Console(
            lambda: interrupts.send(signal.SIGPIPE), output_fd, lambda: waits and not interrupts.any()
        )
        self._fold = Folding(self._console.output) if fold else None

    def told(self, notice: Notice, at: float) -> None:
        """Say it, or wait a moment; what comes meanwhile waits, too."""
        if notice.level == "info" and self._quiet:
            return
        if self._held or (self._connecting and notice.level == "error"):
            self._held.append(notice)
            self.wake_at = min(self.wake_at or math.inf, time.monotonic() + HOLD_S)
        else:
            self._console.say(notice.text, notice.level)

    def _release(self, told: Sequence[str] = ()) -> None:
        """Say what was held back, but for what begins one of the lines that are `told` next."""
        held, self._held = self._held, []
        for notice in held:
            if not any(line.startswith(f"{notice.text};") for line in told):
                self._console.say(notice.text, notice.level)

    def remarked(self, text: str) -> None:
        """Say it."""
        self._release()
        self._console.say(text, "warning")

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
        self._fold.add(output.rank, output.stream, output.data, prefix, time.monotonic())
        self.wake_at = self._fold.due

    def began(self, spec: JobSpec, chance: float, at: float) -> None:
        """Say which hosts a scheduler gave; fold, if the job wants it; look out for a slow start."""
        if spec.allocation and not self._quiet:
            self._console.say(_origin(spec, spec.allocation))
        if spec.logs.fold and self._fold is None:
            self._fold = Folding(self._console.output)
        if self._console.has_terminal and not self._quiet:
            self._starting = True
            self.wake_at = time.monotonic() + PROGRESS_S

    def happened(self, event: Event, state: State, at: float) -> None:
        """Remember how far the start is."""
        self._state = state

    def started(self, state: State, at: float) -> None:
        """Show the last lines that lack their end: those who printed them have ended."""
        self._connecting = False
        self._release()
        self.drained(state)

    def woken(self) -> None:
        """Show what was held back, or how far the start is."""
        self.wake_at = None
        self._release()
        if self._fold:
            self._fold.flush()
        if self._starting:
            words = progress_words(self._state) if self._state else ""
            self._console.live(f"distlaunch: {words}" if words else "")
            self.wake_at = time.monotonic() + PROGRESS_S

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
        above = lines[:1] == [self._console.last_said]  # the cause may have been told just now
        for line in lines[1:] if above else lines:
            self._console.say(line)
        # There may be no log files, as under torchrun: then a reader is waited for until a signal comes.
        needed = summary.state.spec.logs.torchrun is not None
        self._console.close(lambda silent_s: silent_s < PATIENCE_S or (needed and not self._interrupts.any()))

    def close(self) -> None:
        """Show nothing more of a run that goes on."""
        self._release()
        self._console.close(lambda silent_s: silent_s < PATIENCE_S)

    def _above(self, summary: Summary) -> dict[int, Above]:
        """By stream, the blamed rank's output that the terminal already shows, if lines are prefixed."""
        rank = summary.state.cause.rank if summary.state.cause else None
        if rank is None:
            return {}
        lengths = (_length(said.get(rank, "")) for said in (summary.last_lines, summary.last_words))
        found = ((stream, self._console.above(rank, stream, length)) for stream, length in enumerate(lengths))
        return {stream: Above(*above) for stream, above in found if above}


def _origin(spec: JobSpec, allocation: Allocation) -> str:
    """Which hosts an allocation has given the job, and how to have others."""
    names = listed([node.label for node in spec.pool])
    other = "" if "launcher" in spec.places else " (launcher: auto; `--set launcher=local` runs here)"
    return f"{counted(len(spec.pool), 'node')} from {allocation.name}: {names}{other}"


def _length(words: str) -> int:
    """Lines of the last traceback in `words`, with what follows it; 1 without one."""
    _, found, last = words.rpartition("Traceback (most recent call last):")
    return 1 + last.rstrip("\n").count("\n") if found else 1


def progress_words(state: State) -> str:
    """How far a start has come, as `connecting: 12 of 16 nodes; waiting for gpu-3`; "" if it is complete."""
    if state.phase in (Phase.CONNECTING, Phase.PREPARING):
        return _connecting(state)
    return _joining(state) if state.phase is Phase.RUNNING else ""


def _connecting(state: State) -> str:
    missing = [index for index, node in enumerate(state.nodes) if not isinstance(node, Up | Reaping)]
    nodes = counted(len(state.nodes), "node")
    if not missing:
        return f"{nodes} connected"
    names = listed([state.label(node) for node in missing], MOST_NAMED)
    return f"connecting: {len(state.nodes) - len(missing)} of {nodes}; waiting for {names}"


def _joining(state: State) -> str:
    size, ranks = len(state.workers), state.counted(len(state.workers))
    if planned := sum(worker.phase is WorkerPhase.PLANNED for worker in state.workers):
        return f"starting: {size - planned} of {ranks}"
    missing = [worker.rank for worker in state.workers if worker.running and not worker.joined]
    # Ranks that have nothing to do with torch never join: as long as none tries, we don't speak of it.
    if len(missing) == size and not any(worker.trying for worker in state.workers):
        return f"{ranks} started"
    names = f"{'rank' if len(missing) == 1 else 'ranks'} {spans(missing)}"
    return f"joining: {size - len(missing)} of {ranks}; waiting for {names}" if missing else ""


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
