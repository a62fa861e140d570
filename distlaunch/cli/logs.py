"""`logs`: chosen lines of what a run's ranks printed, in the order in which they came."""

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from typer import Option

from distlaunch.cli.options import Fold, SshConfig
from distlaunch.cli.output import reader_left, say
from distlaunch.cli.runs import Which, ago_s, ended_words, follow_each, run_elsewhere
from distlaunch.errors import UsageError
from distlaunch.job.types import compiled
from distlaunch.observers.console import FOLD_S, Folding, Lines, coloured, harmless, wants_colour
from distlaunch.observers.observer import Observer, Printed
from distlaunch.observers.run_folder import Entry
from distlaunch.runs.folder import Run
from distlaunch.runs.following import follow
from distlaunch.runs.replay import lines_in, replay
from distlaunch.runs.retelling import Retelling
from distlaunch.runs.submissions import run_of
from distlaunch.signals import Interrupts
from distlaunch.supervisor.state import State
from distlaunch.wording import rank_list

STDERR = 1
_SPAN = r"\d{1,6}(?:-\d{1,6})?"
_RANKS = re.compile(f"{_SPAN}(?:,{_SPAN})*")


Ranks = Annotated[str | None, Option("--rank", "-r", metavar="0,3-5", help="Only these ranks.")]
Follow = Annotated[bool, Option("--follow", "-f", help="Keep printing new output until the run ends.")]
_SINCE = "Only output of the last DURATION, e.g. 30s, 10m, 1h30m."
Since = Annotated[str | None, Option("--since", metavar="DURATION", help=_SINCE, show_default=False)]
Most = Annotated[
    int | None, Option("--lines", "-n", metavar="N", min=0, max=10**9, help="Print only the last N lines.")
]
Grep = Annotated[
    str | None, Option("--grep", metavar="REGEX", help="Only lines that match REGEX (Python syntax).")
]


def logs(
    context: typer.Context,
    which: Which = None,
    ranks: Ranks = None,
    goes_on: Follow = False,
    since: Since = None,
    most: Most = None,
    stderr: Annotated[bool, Option("--stderr", help="Only stderr.")] = False,
    grep: Grep = None,
    fold: Fold = False,
    ssh_config: SshConfig = None,
) -> None:
    """Print the output of a run's ranks, across restarts, in the order it arrived."""
    run_elsewhere(context, which, ssh_config)
    choice = _choice_of(ranks, stderr, since, grep)
    if not goes_on:
        print_logs(run_of(which), choice, most, fold)
        return
    run = follow_each(which, lambda run, interrupts: print_logs(run, choice, most, fold, interrupts))
    if run.status.exit_status or run.status.why:
        say(ended_words(run))


class Line(NamedTuple):
    """A line that a rank printed, without its end; `tag` says whose, as `[gpu-a:0] `.

    `generation` is the number of restarts before it.
    """

    rank: int
    tag: str
    text: bytes
    generation: int


class Choice(NamedTuple):
    """Which lines are wanted: of which ranks (None = all), `since` which time, matching what."""

    ranks: Collection[int] | None
    stderr_only: bool
    since: float | None
    pattern: re.Pattern[bytes] | None

    def takes(self, entry: Entry) -> bool:
        """Whether a piece of output may have some."""
        return (
            (self.ranks is None or entry.rank in self.ranks)
            and (entry.stream == STDERR or not self.stderr_only)
            and (self.since is None or entry.time >= self.since)
        )


def _choice_of(ranks: str | None, stderr: bool, since: str | None, grep: str | None) -> Choice:
    """What the options ask for. Raises `UsageError`."""
    began = None if since is None else time.time() - ago_s("--since", since, "10m")
    try:
        pattern = None if grep is None else compiled(os.fsencode(grep))
    except ValueError as error:
        raise UsageError(f"--grep: {grep!r} is not a regular expression: {error}") from None
    return Choice(None if ranks is None else _ranks(ranks), stderr, began, pattern)


def _ranks(text: str) -> frozenset[int]:
    found = _RANKS.fullmatch(text)
    parts = [[int(number) for number in part.split("-")] for part in text.split(",")] if found else []
    if not parts or any(part[0] > part[-1] for part in parts):
        raise UsageError(f'--rank: expected ranks such as "0,3-5", got {text!r}')
    return frozenset(rank for part in parts for rank in range(part[0], part[-1] + 1))


def _check_ranks(run: Run, ranks: Collection[int]) -> None:
    """Whether it has them, or had. Raises `UsageError`."""
    latest = range(run.status.ranks)
    if not latest or all(rank in latest for rank in ranks):
        return
    moments = replay(lines_in(Path(run.folder)))
    known = {worker.rank for moment in moments for worker in moment.state.workers}
    if known and (missing := sorted(set(ranks) - known)):
        raise UsageError(f"no {rank_list(missing)}: the run has {rank_list(sorted(known))}")


def print_logs(
    run: Run, choice: Choice, most: int | None, fold: bool, interrupts: Interrupts | None = None
) -> Run:
    """Print them, and with `interrupts` what comes until the run ends, or one of them; the run as it is then.

    Raises `DistlaunchError`.
    """
    if choice.ranks is not None:
        _check_ranks(run, choice.ranks)
    printer, last = Printer(), deque[Line](maxlen=most)
    lines = LogLines(choice.pattern, printer if most is None else last.append, fold)
    with closing(Retelling(run.folder, lines, choice.takes)) as retelling:
        try:
            retelling.catch_up()
            if not (interrupts and run.alive):
                lines.drained()
            lines.woken()
            for line in last:
                printer(line)
            printer.flush()
            if interrupts:
                lines.show, printer.live = printer, True
                run = follow(run, interrupts, retelling)
                if not run.alive:
                    lines.drained()
                printer.flush()
        except BrokenPipeError:
            raise reader_left() from None
    return run


class LogLines(Observer):
    """Hands lines that match on to `show`, each when its end has come.

    With `fold`, equal lines of a moment are one.
    """

    def __init__(self, pattern: re.Pattern[bytes] | None, show: Callable[[Line], object], fold: bool) -> None:
        self._pattern, self.show = pattern, show
        self._fold = Folding(self._give_folded) if fold else None
        self._generation = 0
        self._lines = Lines()
        self._tags: dict[tuple[int, int], str] = {}

    def started(self, state: State, at: float) -> None:
        """What lacks its end has none: those who printed it have ended."""
        self.drained()
        self._generation = state.generation

    def printed(self, output: Printed) -> None:
        """Put lines together."""
        rank, stream, data, generation, goes_to = output
        tag = goes_to.prefix or ""
        if self._fold:
            self._fold.add(rank, stream, data, tag, self.moment())
            self.wake_at = time.monotonic() + FOLD_S
            return
        self._tags[generation, rank] = tag
        if (whole := self._lines.whole((generation, rank, stream), data)) is not None:
            for text in whole.split(b"\n"):
                self._give(Line(rank, tag, text, generation))

    def woken(self) -> None:
        """Hand on what was held back."""
        if self._fold:
            self._fold.flush()
        self.wake_at = None

    def _give_folded(self, rank: int, stream: int, line: bytes, tag: str) -> None:
        self._give(Line(rank, tag, line.rstrip(b"\n"), self._generation))

    def drained(self, state: State | None = None) -> None:
        """Hand on the lines that lack their end."""
        if self._fold:
            self._fold.finish()
        for (generation, rank, _), rest in self._lines.rest():
            self._give(Line(rank, self._tags[generation, rank], rest, generation))

    def _give(self, line: Line) -> None:
        if self._pattern is None or self._pattern.search(line.text):
            self.show(line)


class Printer:
    """Prints lines with their origin; on a terminal in colour, without what it would obey."""

    def __init__(self) -> None:
        self.live = False
        self._generation: int | None = None
        self._terminal = sys.stdout.isatty()
        self._colours = wants_colour(self._terminal)

    def __call__(self, line: Line) -> None:
        """Print it, and where another generation begins, say so."""
        if self._generation is None or line.generation > self._generation:
            if self._generation is not None:
                self.flush()  # where both go to one place, it is said in its place
                say(f"restart {line.generation}")
            self._generation = line.generation
        tag = coloured(line.tag.encode(), line.rank) if self._colours else line.tag.encode()
        text = harmless(line.text) if self._terminal else line.text
        sys.stdout.buffer.write(tag + text + b"\n")
        if self.live:
            self.flush()

    def flush(self) -> None:
        """Have all of it seen."""
        sys.stdout.buffer.flush()
