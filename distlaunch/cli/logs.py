"""`logs`: prints selected lines of a run's output in order of arrival."""

import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Collection
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, NamedTuple

from typer import Option

from distlaunch.cli.options import Fold
from distlaunch.cli.output import say, while_read
from distlaunch.cli.runs import Which, ago_s, ended_words, follow_each
from distlaunch.errors import UsageError
from distlaunch.here import reaches_terminal
from distlaunch.job.types import compiled
from distlaunch.observers.console import FOLD_S, Folding, colored, harmless, wants_color
from distlaunch.observers.observer import Observer, Printed
from distlaunch.observers.run_directory import EVENTS, Entry, index_of
from distlaunch.plan.workers import destinations
from distlaunch.runs.following import follow
from distlaunch.runs.replay import HistoryError, Playback, lines_in, replay
from distlaunch.runs.run import Run
from distlaunch.runs.submissions import all_runs
from distlaunch.signals import Interrupts, search
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.state import Phase, State
from distlaunch.wording import counted, expand_ranges, listed, rank_list

STDERR = 1
END_BYTES = 1 << 20
"""Bytes at the end of the output that are searched first for the last lines."""


Ranks = Annotated[str | None, Option("--rank", "-r", metavar="0,3-5", help="Print only these ranks.")]
Follow = Annotated[bool, Option("--follow", "-f", help="Keep printing new output until the run ends.")]
_SINCE = "Print only output from the last DURATION, e.g. 30s, 10m, 1h30m."
Since = Annotated[str | None, Option("--since", metavar="DURATION", help=_SINCE, show_default=False)]
Most = Annotated[
    int | None, Option("--lines", "-n", metavar="N", min=0, max=10**9, help="Print only the last N lines.")
]
Grep = Annotated[
    str | None, Option("--grep", metavar="REGEX", help="Print only lines that match REGEX (Python syntax).")
]


def logs(
    which: Which = None,
    ranks: Ranks = None,
    goes_on: Follow = False,
    since: Since = None,
    most: Most = None,
    stderr: Annotated[bool, Option("--stderr", help="Print only stderr.")] = False,
    grep: Grep = None,
    fold: Fold = False,
) -> None:
    """Print the output of a run's ranks, across restarts, in the order it arrived."""
    choice = _choice_of(ranks, stderr, since, grep)
    if not goes_on:
        found = all_runs(which)
        for number, run in enumerate(found if most is None else found[-1:]):
            if number:
                say(f"next run of the job: {run.id}")
            print_logs(run, choice, most, fold)
        return
    run = follow_each(which, lambda run, interrupts, _: print_logs(run, choice, most, fold, interrupts))
    if run.status.exit_status or run.status.why:
        say(ended_words(run))


class Choice(NamedTuple):
    """A selection of lines: their ranks (None = all), the earliest time (`since`), and a pattern to match."""

    ranks: Collection[int] | None
    stderr_only: bool
    since: float | None
    pattern: re.Pattern[bytes] | None

    def takes(self, entry: Entry) -> bool:
        """Return whether a piece of output may contain selected lines."""
        return (
            (self.ranks is None or entry.rank in self.ranks)
            and (entry.stream == STDERR or not self.stderr_only)
            and (self.since is None or entry.time >= self.since)
        )


def _choice_of(ranks: str | None, stderr: bool, since: str | None, grep: str | None) -> Choice:
    """Return the selection according to the options. Raises `UsageError`."""
    since = f"{since}s" if since and since.replace(".", "", 1).isdecimal() else since  # as in job files
    began = None if since is None else time.time() - ago_s("--since", since, "10m")
    try:
        pattern = None if grep is None else compiled(os.fsencode(grep))
    except ValueError as error:
        raise UsageError(f"--grep: {grep!r} is not a valid regular expression: {error}") from None
    return Choice(None if ranks is None else _ranks(ranks), stderr, began, pattern)


def _ranks(text: str) -> frozenset[int]:
    try:
        if set(text) <= set("0123456789,-"):
            return frozenset(map(int, expand_ranges(f"[{text}]")))
    except ValueError:
        pass
    raise UsageError(f'--rank: expected ranks such as "0,3-5", got {text!r}')


def _check_ranks(run: Run, ranks: Collection[int]) -> None:
    """Raise `UsageError` for ranks that the run never had."""
    latest = range(run.status.ranks)
    if not latest or all(rank in latest for rank in ranks):
        return
    known = set[int]()
    with suppress(HistoryError):  # `Playback` will raise it, with the path
        moments = replay(lines_in(Path(run.directory)))
        known = {worker.rank for moment in moments for worker in moment.state.workers}
    if known and (missing := sorted(set(ranks) - known)):
        raise UsageError(f"no {rank_list(missing)}: the run has {rank_list(sorted(known))}")


def print_logs(
    run: Run, choice: Choice, most: int | None, fold: bool, interrupts: Interrupts | None = None
) -> Run:
    """Print the selected lines. With `interrupts`, continue until the run ends or a signal arrives.

    Return the run's state at that time. Raises `DistlaunchError`.
    """
    if choice.ranks is not None:
        _check_ranks(run, choice.ranks)
    if most:
        choice = _end_of(run.directory, choice, most, fold)
    lines = LogLines(choice.pattern, most, fold)
    with closing(Playback(run.directory, lines, choice.takes)) as playback, while_read():
        playback.catch_up()
        if not (interrupts and run.alive):
            lines.drained()
        lines.go_live()
        if interrupts:
            run = follow(run, interrupts, playback)
            if not run.alive:
                lines.drained()
    lost = "" if run.alive else _lost(run.directory, playback.held_bytes) or _cut_off(playback.state)
    for text in filter(None, (lines.cut, _unkept(playback.state, choice), lost)):
        say(text)
    return run


def _end_of(directory: str, choice: Choice, most: int, fold: bool) -> Choice:
    """Limit a choice to the end of the output, as far as that has the last `most` lines."""
    size, wanted, since = 0, END_BYTES, math.inf
    for entry in filter(choice.takes, index_of(directory, backwards=True)):
        size, since = size + entry.size, min(since, entry.time)  # the clock may have been set back
        if size < wanted:
            continue
        narrowed = choice._replace(since=since)
        counter = LogLines(choice.pattern, most, fold)
        with closing(Playback(directory, counter, narrowed.takes)) as playback:
            playback.catch_up()
        counter.woken()
        if counter.held >= most:
            return narrowed
        wanted *= 16
    return choice


def _lost(directory: str, size: int) -> str:
    """Describe output that belongs to no attempt in the events."""
    if not size:
        return ""
    what = (
        f"{counted(size, 'byte')} of output can't be shown because lines of {directory}/{EVENTS} are missing"
    )
    return f"{what}, as after a full disk; read the logs in the run directory"


def _cut_off(state: State | None) -> str:
    """Warn if the events of a run that has ended don't include its end."""
    if state is None or state.phase is Phase.DONE:
        return ""
    return "the last output may be missing: distlaunch was killed, or its disk was full or too slow"


def _unkept(state: State | None, choice: Choice) -> str:
    """Describe which selected ranks have no output in the run directory, as with torchrun's defaults."""
    if not state or not state.plan:
        return ""
    files = destinations(state.plan, state.attempt).items()
    ranks = {*range(state.plan.world_size)} - {rank for (rank, _), to in files if to.file}
    unkept = sorted(ranks if choice.ranks is None else ranks & {*choice.ranks})
    if not unkept:
        return ""
    places = [f"{node.label}:{node.logs}" for node in map(state.plan.node_of, unkept) if node.logs]
    where = f" ({listed([*dict.fromkeys(places)])})" if places else ""
    why = "torchrun or exec prints it where it runs"
    why += f"; torchrun's --tee and --redirects keep it on its own node{where}"
    return f"the output of {rank_list(unkept)} isn't in the run directory: {why}"


class LogLines(Observer):
    """The printer of matching lines with their origin, in color and escaped on a terminal.

    With `fold`, identical lines are printed once. Before `go_live`, only the last `most` lines are printed.
    `Observer` describes when each method is called.
    """

    def __init__(self, pattern: re.Pattern[bytes] | None, most: int | None, fold: bool) -> None:
        self._pattern = pattern
        self._last = None if most is None else deque[tuple[int, str, bytes, int]](maxlen=most)
        self._fold = Folding(self._take, FOLD_S if fold else 0.0)
        self._live, self._attempt = False, 0
        self._printed_of: int | None = None
        self._terminal = reaches_terminal(1)
        self._colors = wants_color(sys.stdout.isatty())
        self.cut = ""
        """The last message about output that was not saved."""

    @property
    def held(self) -> int:
        """Return the number of lines that `go_live` will print."""
        return len(self._last or ())

    def message(self, message: ShowMessage, at: float) -> None:
        """Record that output was not saved."""
        is_about_loss = any(part in message.text for part in ("logs.limit", "could not be written"))
        self.cut = message.text if is_about_loss else self.cut

    def started(self, state: State, at: float) -> None:
        """Print the incomplete lines of the previous attempt."""
        self.drained()
        self._attempt = state.attempt

    def printed(self, output: Printed) -> None:
        """Assemble lines."""
        self._fold.add(output.rank, output.stream, output.data, output.goes_to.prefix or "", self.moment())
        self.wake_at = time.monotonic() + FOLD_S

    def woken(self) -> None:
        """Print the lines held back."""
        self._fold.flush()
        self.wake_at = None

    def drained(self, state: State | None = None) -> None:
        """Print the incomplete lines."""
        self._fold.finish()

    def go_live(self) -> None:
        """Print the last lines so far. From now on, print each line at once."""
        self.woken()
        last, self._last = self._last or (), None
        for line in last:
            self._print(*line)
        sys.stdout.buffer.flush()
        self._live = True

    def _take(self, rank: int, stream: int, line: bytes, tag: str) -> None:
        """Print a line, or keep it until `go_live`, if it matches. Called by `Folding`."""
        try:
            if self._pattern and not search(self._pattern, line[:-1]):
                return
        except TimeoutError as error:
            raise UsageError(f"--grep: {error}") from None
        if self._last is None:
            self._print(rank, tag, line[:-1], self._attempt)
        else:
            self._last.append((rank, tag, line[:-1], self._attempt))

    def _print(self, rank: int, tag: str, text: bytes, attempt: int) -> None:
        """Print a line; announce a restart before the first line of another attempt."""
        if self._printed_of is not None and attempt > self._printed_of:
            sys.stdout.buffer.flush()  # stdout and stderr may go to the same place
            say(f"restart {attempt}")
        self._printed_of = attempt
        start = colored(tag.encode(), rank) if self._colors else tag.encode()
        sys.stdout.buffer.write(start + (harmless(text) if self._terminal else text) + b"\n")
        if self._live:
            sys.stdout.buffer.flush()
