"""`logs`: chosen lines of a run's output, on stdout."""

import os
import re
import sys
import time
from collections.abc import Collection

from distlaunch.cli.output import reader_left
from distlaunch.cli.stderr import say
from distlaunch.errors import UsageError
from distlaunch.job.regex import compiled
from distlaunch.observers.console import RANK_COLOURS, escape, latest, wants_colour
from distlaunch.runs.attending import follow
from distlaunch.runs.folder import Run
from distlaunch.runs.logs import Choice, Last, Line, LogLines, has_order, ranks_of, unordered
from distlaunch.runs.retelling import Retelling
from distlaunch.system.signals import Interrupts
from distlaunch.wording import rank_list

_SPAN = r"\d{1,6}(?:-\d{1,6})?"
_RANKS = re.compile(f"{_SPAN}(?:,{_SPAN})*")


def choice_of(ranks: str | None, stderr: bool, since: str | None, grep: str | None) -> Choice:
    """What the options ask for. Raises `UsageError`."""
    from distlaunch.cli.durations import ago_s

    ago = None if since is None else ago_s("--since", since, "10m")
    try:
        pattern = None if grep is None else compiled(os.fsencode(grep))
    except ValueError as error:
        raise UsageError(f"--grep: {grep!r} is not a regular expression: {error}") from None
    began = None if ago is None else time.time() - ago
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
    known = ranks_of(run.folder) if has_order(run.folder) else set(latest)
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
    printer = Printer()
    try:
        if not has_order(run.folder) and not run.alive:
            _print_unordered(run, choice, most, printer)
        else:
            run = _print_in_order(run, choice, most, fold, printer, interrupts)
        printer.flush()
        return run
    except BrokenPipeError:
        raise reader_left() from None


def _print_unordered(run: Run, choice: Choice, most: int | None, printer: "Printer") -> None:
    last = Last(most) if most is not None else None
    for line in unordered(run.folder, choice):
        (last or printer)(line)
    for line in last.taken() if last else ():
        printer(line)


def _print_in_order(
    run: Run,
    choice: Choice,
    most: int | None,
    fold: bool,
    printer: "Printer",
    interrupts: Interrupts | None,
) -> Run:
    last = Last(most) if most is not None else None
    lines = LogLines(choice, last or printer, fold)
    retelling = Retelling(run.folder, lines, choice.takes)
    lines.clock = lambda: retelling.moment
    try:
        while retelling.turn():
            pass
        if not (interrupts and run.alive):
            lines.drained()
        lines.woken()
        for line in last.taken() if last else ():
            printer(line)
        return _follow(run, retelling, lines, printer, interrupts) if interrupts else run
    finally:
        retelling.close()


def _follow(
    run: Run, retelling: Retelling, lines: LogLines, printer: "Printer", interrupts: Interrupts
) -> Run:
    lines.show = printer
    printer.flush()
    printer.live = True
    run = follow(run, retelling, interrupts)
    if not run.alive:
        lines.drained()
    return run


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
        sys.stdout.buffer.write(self._tag(line) + self._text(line.text) + b"\n")
        if self.live:
            self.flush()

    def flush(self) -> None:
        """Have all of it seen."""
        sys.stdout.buffer.flush()

    def _tag(self, line: Line) -> bytes:
        if not self._colours:
            return line.tag.encode()
        return b"\x1b[%dm%s\x1b[0m" % (RANK_COLOURS[line.rank % len(RANK_COLOURS)], line.tag.encode())

    def _text(self, text: bytes) -> bytes:
        if not self._terminal:
            return text
        shown = escape(latest(text).decode(errors="backslashreplace"))
        return (shown + "\x1b[0m" if "\x1b[" in shown else shown).encode(errors="backslashreplace")
