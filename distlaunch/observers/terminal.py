"""Shows a run on the terminal: the ranks' output, notices, and how it ended."""

import signal
from collections.abc import Callable

from distlaunch.diagnosis.summary import Above, Summary
from distlaunch.observers.console import Console
from distlaunch.observers.observer import Observer, Printed
from distlaunch.state.actions import Notice
from distlaunch.state.job import State
from distlaunch.system.signals import Interrupts

PATIENCE_S = 5.0
"""Seconds for a reader to take something, at the end of a run whose log files have everything."""
_COLOURS = {"info": None, "warning": 33, "error": 31}


class Terminal(Observer):
    """Shows a run on the console; with `quiet`, only warnings and errors.

    When the reader of our output leaves, the job ends, as a pipeline does, by way of `interrupts`.
    """

    def __init__(self, interrupts: Interrupts, output_fd: int = 1, quiet: bool = False) -> None:
        self._interrupts, self._quiet = interrupts, quiet
        self._console = Console(lambda: interrupts.send(signal.SIGPIPE), output_fd)

    def told(self, notice: Notice, at: float) -> None:
        """Say it."""
        if notice.level != "info" or not self._quiet:
            for line in notice.text.splitlines():
                self._console.say(f"distlaunch: {line}", _COLOURS[notice.level])

    def remarked(self, text: str) -> None:
        """Say it."""
        self._console.say(f"distlaunch: {text}", _COLOURS["warning"])

    def printed(self, output: Printed) -> None:
        """Show it, if it is to be shown."""
        if output.goes_to.shown:
            self._console.output(output.rank, output.stream, output.data, output.goes_to.prefix)

    def drained(self, state: State) -> None:
        """Show the last lines that lack their end."""
        self._console.finish_lines()

    def ended(self, summary: Summary) -> None:
        """Tell how it ended, and write out what waits for a slow reader."""
        failed = summary.state.cause is not None
        if failed or not self._quiet:
            first, *others = (f"distlaunch: {line}" for line in summary.lines(self._above(summary)))
            told = first == self._console.last_said  # the cause may be right above
            for line in others if told else (first, *others):
                self._console.say(line)
        self._console.close(self._patience(summary))

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


def _length(words: str) -> int:
    """Lines of the last traceback in `words`, with what follows it; 1 without one."""
    _, found, last = words.rpartition("Traceback (most recent call last):")
    return 1 + last.rstrip("\n").count("\n") if found else 1
