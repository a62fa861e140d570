"""Lines that ranks print alike within a moment, told once with all their ranks."""

from collections.abc import Callable, Mapping, Sequence

from distlaunch.observers.console import MAX_LINE
from distlaunch.wording import spans

MOMENT_S = 0.2
"""Lines are held back for so long at most."""
MAX_BYTES = 1 << 20
"""Of lines that are held back."""

Show = Callable[[list[int], int, bytes], object]
"""Shows a line of a stream that these ranks have printed; it has its end."""


def tag_of(ranks: Sequence[int], tags: Mapping[int, str]) -> str:
    """What stands before a folded line: a single rank's own tag, else all their numbers."""
    return tags[ranks[0]] if len(ranks) == 1 else f"[{spans(ranks)}] "


class Folding:
    """Puts lines together and hands them to `show`, in the order in which they first came.

    A rank's equal lines are told as often as it printed them.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._groups: dict[tuple[int, bytes, int], dict[int, None]] = {}
        self._partial: dict[tuple[int, int], bytes] = {}
        self._bytes = 0
        self._since: float | None = None

    @property
    def due(self) -> float | None:
        """When what is held back is to be shown; None if nothing is."""
        return None if self._since is None else self._since + MOMENT_S

    def add(self, rank: int, stream: int, data: bytes, now: float) -> None:
        """Take what a rank printed at `now` (seconds)."""
        if self._since is not None and now >= self._since + MOMENT_S:
            self.flush()
        data = self._partial.pop((rank, stream), b"") + data
        whole, newline, rest = data.rpartition(b"\n")
        if len(rest) > MAX_LINE:
            whole, newline, rest = data, b"\n", b""
        if rest:
            self._partial[rank, stream] = rest
        if newline:
            self._hold(rank, stream, whole.split(b"\n"), now)

    def flush(self) -> None:
        """Show what is held back."""
        groups, self._groups = self._groups, {}
        self._bytes, self._since = 0, None
        for (stream, line, _), ranks in groups.items():
            self._show(sorted(ranks), stream, line + b"\n")

    def finish(self) -> None:
        """Show all, lines that lack their end, too."""
        for (rank, stream), rest in sorted(self._partial.items()):
            self._hold(rank, stream, [rest], 0.0)
        self._partial.clear()
        self.flush()

    def _hold(self, rank: int, stream: int, lines: list[bytes], now: float) -> None:
        if self._since is None:
            self._since = now
        for line in lines:
            time = 0
            ranks = self._groups.get((stream, line, time))
            while ranks is not None and rank in ranks:
                time += 1
                ranks = self._groups.get((stream, line, time))
            if ranks is None:
                ranks = self._groups[stream, line, time] = {}
                self._bytes += len(line)
            ranks[rank] = None
            self._bytes += 8
        if self._bytes > MAX_BYTES:
            self.flush()
