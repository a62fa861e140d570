"""What ranks printed, line by line, in the order in which the lines came."""

import os
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from distlaunch.errors import DistlaunchError, reason
from distlaunch.follow.retelling import Retelling
from distlaunch.observers.console import FOLD_S, MAX_LINE, Folding
from distlaunch.observers.observer import Observer, Printed
from distlaunch.observers.run_folder import OUTPUT_INDEX, Entry
from distlaunch.state.job import State

STDERR = 1
_FILE = re.compile(r"(?:generation(\d+)/)?(?:rank|agent)(\d+)\.(out|err)")


class Line(NamedTuple):
    """A line of a rank's stdout (0) or stderr (1), without its end; `tag` says whose, as `[gpu-a:0] `.

    `generation` is the number of restarts before it.
    """

    rank: int
    stream: int
    tag: str
    text: bytes
    generation: int


class Choice(NamedTuple):
    """Which lines are wanted: of which ranks (None = all), `since` which time, matching what."""

    ranks: Collection[int] | None = None
    stderr_only: bool = False
    since: float | None = None
    pattern: re.Pattern[bytes] | None = None

    def takes(self, entry: Entry) -> bool:
        """Whether a piece of output may have some."""
        return self.has(entry.rank, entry.stream) and (self.since is None or entry.time >= self.since)

    def has(self, rank: int, stream: int) -> bool:
        """Whether lines of that stream are wanted."""
        return (self.ranks is None or rank in self.ranks) and (stream == STDERR or not self.stderr_only)

    def matches(self, line: Line) -> bool:
        """Whether the line itself is wanted."""
        return self.pattern is None or self.pattern.search(line.text) is not None


class _Ranks(Observer):
    """The ranks that a run has had."""

    def __init__(self) -> None:
        self.known: set[int] = set()

    def started(self, state: State, at: float) -> None:
        """There may be more of them than before, or fewer."""
        self.known |= {worker.rank for worker in state.workers}


def ranks_of(folder: str) -> set[int]:
    """The ranks of all generations that have started. Raises `HistoryError`."""
    ranks = _Ranks()
    retelling = Retelling(folder, ranks, lambda entry: False)
    try:
        while retelling.turn():
            pass
    finally:
        retelling.close()
    return ranks.known


class LogLines(Observer):
    """Hands wanted lines on to `show`, each when its end has come; with `fold` equal ones of a moment once.

    `clock` tells when that was which is being told.
    """

    def __init__(self, choice: Choice, show: Callable[[Line], object], fold: bool = False) -> None:
        self._choice, self.show = choice, show
        self._fold = Folding(self._give_folded) if fold else None
        self._generation = 0
        self._partial: dict[tuple[int, int, int], tuple[str, bytes]] = {}
        self.clock: Callable[[], float] = time.time

    def started(self, state: State, at: float) -> None:
        """What lacks its end has none: those who printed it have ended."""
        self.drained()
        self._generation = state.generation

    def printed(self, output: Printed) -> None:
        """Put lines together."""
        if self._fold is None:
            self._take(output)
            return
        tag = output.goes_to.prefix or ""
        self._fold.add(output.rank, output.stream, output.data, tag, self.clock())
        self.wake_at = time.monotonic() + FOLD_S

    def woken(self) -> None:
        """Hand on what was held back."""
        if self._fold:
            self._fold.flush()
        self.wake_at = None

    def _give_folded(self, rank: int, stream: int, line: bytes, tag: str) -> None:
        self._give(Line(rank, stream, tag, line.rstrip(b"\n"), self._generation))

    def _take(self, output: Printed) -> None:
        key = (output.generation, output.rank, output.stream)
        tag = output.goes_to.prefix or ""
        data = self._partial.pop(key, ("", b""))[1] + output.data
        whole, newline, rest = data.rpartition(b"\n")
        if len(rest) > MAX_LINE:
            whole, newline, rest = data, b"\n", b""
        for text in whole.split(b"\n") if newline else ():
            self._give(Line(output.rank, output.stream, tag, text, output.generation))
        if rest:
            self._partial[key] = (tag, rest)

    def drained(self, state: State | None = None) -> None:
        """Hand on the lines that lack their end."""
        if self._fold:
            self._fold.finish()
        for (generation, rank, stream), (tag, rest) in sorted(self._partial.items()):
            self._give(Line(rank, stream, tag, rest, generation))
        self._partial.clear()

    def _give(self, line: Line) -> None:
        if self._choice.matches(line):
            self.show(line)


class Last:
    """The last `most` lines that it was given."""

    def __init__(self, most: int) -> None:
        self._lines: deque[Line] = deque(maxlen=most)

    def __call__(self, line: Line) -> None:
        """Keep it, as long as it is one of the last."""
        self._lines.append(line)

    def taken(self) -> Iterator[Line]:
        """All of them; none are left."""
        while self._lines:
            yield self._lines.popleft()


def has_order(folder: str) -> bool:
    """Whether the folder has the order in which output came: a distlaunch of long ago did not keep it."""
    return os.path.exists(os.path.join(folder, OUTPUT_INDEX))


def unordered(folder: str, choice: Choice) -> Iterator[Line]:
    """The lines of such a folder: generation by generation, rank by rank. Raises `DistlaunchError`."""
    for generation, rank, stream, path in sorted(_files(folder)):
        if choice.has(rank, stream):
            try:
                with open(path, "rb") as file:
                    lines = (text.rstrip(b"\n") for text in file)
                    made = (Line(rank, stream, f"[{rank}] ", text, generation) for text in lines)
                    yield from filter(choice.matches, made)
            except OSError as error:
                raise DistlaunchError(f"{path}: {reason(error)}") from None


def _files(folder: str) -> Iterator[tuple[int, int, int, str]]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            if found := _FILE.fullmatch(os.path.relpath(path, folder)):
                yield int(found[1] or 0), int(found[2]), int(found[3] == "err"), path
