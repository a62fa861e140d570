"""Shows the output of ranks as whole lines with their origin, and messages from distlaunch."""

import errno
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable

from distlaunch.here import reaches_terminal
from distlaunch.observers.outlet import Outlet
from distlaunch.wording import counted, spans

Stream = tuple[int, ...]
"""A rank, and 0 for its stdout or 1 for its stderr; preceded by the attempt where that matters."""
MAX_LINE = 1 << 16
"""Maximum bytes of an incomplete line held back. A longer line is shown in pieces."""
MAX_RECENT = 200
"""Maximum lines on the terminal whose rank and stream are remembered."""
PROGRESS_S = 1.0
"""Minimum seconds between two displays of a progress bar, which rewrites its line with carriage returns."""
FOLD_S = 0.2
"""Seconds for which lines are held back to find identical ones."""
MAX_FOLDED = 1 << 20
"""Maximum bytes of output to hold back while looking for identical lines."""
_LEVEL_COLORS = {"warning": 33, "error": 31}
RANK_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
# Everything a terminal acts on, except tabs and colors (SGR), which training scripts use.
_BIDI = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_CONTROLS = re.compile(f"\x1b\\[[0-9;:]*m|[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI}]")

_COLOR_ARGUMENTS = re.compile(r"[345]8(?::[0-9:]*|;5;[0-9]*|;2(?:;[0-9]*){3})")


def wants_color(stream_is_terminal: bool) -> bool:
    """Return whether to print colors: only on a terminal that supports them, and not if NO_COLOR is set."""
    return stream_is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


class Lines:
    """Incomplete lines of several streams; `held` maps each stream to its incomplete line."""

    def __init__(self) -> None:
        self.held: dict[Stream, bytes] = {}

    def whole(self, stream: Stream, data: bytes) -> bytes | None:
        """Return the lines that `data` completes, without the last newline; None if it completes none."""
        whole, newline, rest = (self.held.pop(stream, b"") + data).rpartition(b"\n")
        if len(rest) > MAX_LINE:
            whole, newline, rest = whole + newline + rest, b"\n", b""
        if rest:
            self.held[stream] = rest
        return whole if newline else None

    def rest(self, rank: int | None = None) -> list[tuple[Stream, bytes]]:
        """Return and forget the incomplete lines of a rank, or of all ranks, with their streams."""
        streams = [stream for stream in sorted(self.held) if rank in (None, stream[-2])]
        return [(stream, self.held.pop(stream)) for stream in streams]


class Console:
    """The printer of ranks' output and messages to stdout and stderr."""

    def __init__(
        self,
        on_reader_left: Callable[[], None],
        output_fd: int = 1,
        waits: Callable[[], bool] = lambda: False,
    ) -> None:
        """Call `on_reader_left` when a reader closes its pipe. `waits` is as in `Outlet`."""
        self._on_reader_left = on_reader_left
        # If both streams go to one place, their lines are interleaved.
        self._together = os.path.sameopenfile(output_fd, 2)
        errors = Outlet(2, lambda error: self._broken("stderr", 0, error), waits)
        output = errors  # two writers for one place would write in any order
        if not self._together:
            output = Outlet(1, lambda error: self._broken("stdout", 1, error), waits)
        self._outlets = (output, errors)
        self._terminal = (reaches_terminal(output_fd), reaches_terminal(2))
        self.has_terminal = os.isatty(2)
        """Whether messages go to a terminal of this machine."""
        self._colored = (wants_color(os.isatty(output_fd)), wants_color(self.has_terminal))
        self._recent: deque[Stream] = deque(maxlen=MAX_RECENT)
        self._progress_shown: dict[Stream, float] = {}
        self._lines = Lines()
        self._prefixes: dict[Stream, str] = {}
        self.said: set[str] = set()
        """The lines of messages since the last output from ranks."""
        self._in_line = [False, False]
        self._live = ""

    def live(self, text: str) -> None:
        """Show a line that is removed or replaced as soon as there is something else to show."""
        width = os.get_terminal_size(2).columns or 80 if self.has_terminal else 0  # 0 = unknown
        shown = escape(text)[: max(0, width - 1)]
        if shown == self._live:
            return
        self._live = shown
        self._outlets[1].write(b"\r\x1b[K" + shown.encode(errors="backslashreplace"), ours=True)

    def _end_live(self) -> None:
        """Remove the live line before anything else is written, even to the other stream."""
        if self._live:
            self.live("")
            if not self._together:
                self._outlets[1].settle()

    def output(self, rank: int, stream: int, data: bytes, prefix: str | None) -> None:
        """Show output from a rank, each line after `prefix`. Hold back an incomplete line.

        Without a prefix, bytes are shown as they arrive.
        """
        self._end_live()
        if prefix is None:
            self._came_between(stream)
            self._in_line[stream] = not data.endswith(b"\n")
            self._outlets[stream].write(data)
            return
        key = (rank, stream)
        self._prefixes[key] = prefix
        if (whole := self._lines.whole(key, data)) is not None:
            self._show(rank, stream, whole)
        if b"\r" in (rest := self._lines.held.get(key, b"")):
            self._show_progress(rank, stream, rest)

    def _show_progress(self, rank: int, stream: int, rest: bytes) -> None:
        """Show the current state of a progress bar, or keep it for later if one was shown recently."""
        key, now = (rank, stream), time.monotonic()
        if now - self._progress_shown.get(key, 0.0) < PROGRESS_S:
            self._lines.held[key] = latest(rest) + (b"\r" if rest.endswith(b"\r") else b"")
            return
        self._progress_shown[key] = now
        del self._lines.held[key]
        self._show(rank, stream, latest(rest))

    def above(self, rank: int, stream: int, count: int) -> tuple[int, str] | None:
        """Return the number of other lines after the first of a stream's last `count` lines, and the prefix.

        Return None if there is no prefix, not all output goes to one terminal, or too many lines followed.
        """
        mark, others = self._prefixes.get((rank, stream), "").strip(), 0
        if not mark or any(outlet.dropped_lines for outlet in self._outlets):
            return None
        for shown in reversed(self._recent):
            if shown != (rank, stream):
                others += 1
            elif count == 1:
                return others, mark
            else:
                count -= 1
        return None

    def finish_lines(self, of_rank: int | None = None) -> None:
        """Show the incomplete lines of a rank, or of all ranks."""
        for (rank, stream), rest in self._lines.rest(of_rank):
            self._show(rank, stream, rest)

    def is_within_line(self, rank: int) -> bool:
        """Return whether a rank has printed an incomplete line that isn't a progress bar."""
        return any(stream[0] == rank and b"\r" not in rest for stream, rest in self._lines.held.items())

    def say(self, text: str, level: str = "info") -> None:
        """Print a message to stderr; `level` is info, warning or error."""
        self._end_live()
        for said in text.splitlines():
            self.said.add(said)
            line = f"distlaunch: {escape(said) if self._terminal[1] else said}"
            if self._colored[1] and level in _LEVEL_COLORS:
                line = f"\x1b[{_LEVEL_COLORS[level]}m{line}\x1b[0m"
            begin = b"\n" if self._in_line[1] else b""  # not in the middle of a worker's line
            self._in_line[1] = False
            self._outlets[1].write(begin + line.encode(errors="backslashreplace") + b"\n", ours=True)

    def close(self, patient: Callable[[float], bool]) -> None:
        """Write queued output, and report lines not shown. `patient` is as in `Outlet.close`."""
        self._end_live()
        output, errors = self._outlets
        if output is not errors:
            output.close(patient)
        dropped = sum(outlet.dropped_lines for outlet in {output, errors} if not outlet.broken)
        if dropped:
            self.say(f"{counted(dropped, 'line')} not shown: the terminal or pipe was too slow")
        errors.close(patient)

    def _broken(self, name: str, other: int, error: OSError) -> None:
        """End the job if the reader has exited, as in a pipeline. A full disk doesn't end the job.

        `other` is the index of the outlet that can still report the error.
        """
        if error.errno == errno.EPIPE:
            self._on_reader_left()
        elif not self._outlets[other].broken:
            rest = "the job continues, and its log files, if any, contain its output"
            text = f"distlaunch: can't write to {name}: {error.strerror}; {rest}\n"
            self._outlets[other].write(text.encode())

    def _came_between(self, stream: int) -> None:
        if stream == 1 or self._together:
            self.said.clear()

    def _show(self, rank: int, stream: int, whole: bytes) -> None:
        """Write lines of a rank, each after the prefix of the rank."""
        self._came_between(stream)
        prefix = self._prefixes[rank, stream].encode()
        if self._colored[stream]:
            prefix = colored(prefix, rank)
        if self._terminal[stream]:
            whole = harmless(whole)
        if self._together and all(self._terminal):
            self._recent += [(rank, stream)] * min(whole.count(b"\n") + 1, MAX_RECENT)
        self._outlets[stream].write(b"".join((prefix, whole.replace(b"\n", b"\n" + prefix), b"\n")))


class Folding:
    """A filter that shows a line once if several ranks print it at about the same time.

    `show` takes the lowest of these ranks, the stream, the line with its end, and a tag that names all ranks.
    Lines stay in the order of their first arrival. If a rank repeats a line, every repetition is shown.
    """

    def __init__(self, show: Callable[[int, int, bytes, str], object], hold_s: float = FOLD_S) -> None:
        """Hold lines back for `hold_s` seconds; with 0, show each immediately."""
        self._show, self._hold_s = show, hold_s
        self._tags: dict[int, str] = {}
        self._groups: dict[tuple[int, bytes, int], set[int]] = {}
        self._repeated = Counter[tuple[int, int, bytes]]()
        self._lines = Lines()
        self._bytes = 0
        self._since: float | None = None

    @property
    def due(self) -> float | None:
        """Return the time at which to show the lines held back; None if there are none."""
        return None if self._since is None else self._since + self._hold_s

    def add(self, rank: int, stream: int, data: bytes, tag: str, now: float) -> None:
        """Add output that a rank printed at `now` (seconds). `tag` marks lines from this rank alone."""
        self._tags[rank] = tag
        if self.due is not None and now >= self.due:
            self.flush()
        if (whole := self._lines.whole((rank, stream), data)) is not None:
            self._hold(rank, stream, whole.split(b"\n"), now)

    def flush(self) -> None:
        """Show the lines held back."""
        groups, self._groups = self._groups, {}
        self._repeated.clear()
        self._bytes, self._since = 0, None
        for (stream, line, _), ranks in groups.items():
            first = min(ranks)
            tag = self._tags[first] if len(ranks) == 1 else f"[{spans(sorted(ranks))}] "
            self._show(first, stream, line + b"\n", tag)

    def finish(self) -> None:
        """Show all lines, including incomplete ones."""
        for (rank, stream), rest in self._lines.rest():
            self._hold(rank, stream, [rest], 0.0)
        self.flush()

    def _hold(self, rank: int, stream: int, lines: list[bytes], now: float) -> None:
        """Add lines to their groups. A line that a rank repeats starts another group."""
        if self._since is None:
            self._since = now
        for line in lines:
            ranks = self._groups.setdefault((stream, line, self._repeated[rank, stream, line]), set())
            self._repeated[rank, stream, line] += 1
            self._bytes += 8 if ranks else 8 + len(line)
            ranks.add(rank)
        if self._bytes > MAX_FOLDED or not self._hold_s:
            self.flush()


def colored(tag: bytes, rank: int) -> bytes:
    """Return the tag of a rank's lines in the rank's color."""
    return b"\x1b[%dm%s\x1b[0m" % (RANK_COLORS[rank % len(RANK_COLORS)], tag)


def harmless(lines: bytes) -> bytes:
    """Return a rank's lines without terminal control sequences other than colors."""
    text = escape(b"\n".join(map(latest, lines.split(b"\n"))).decode(errors="backslashreplace"))
    # A color that a worker leaves on would run into the next lines.
    return (text + "\x1b[0m" if "\x1b[" in text else text).encode(errors="backslashreplace")


def latest(line: bytes) -> bytes:
    """Return the current state of a progress bar, which rewrites its line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def escape(text: str) -> str:
    """Return `text` with control sequences escaped, except tabs, line ends and visible colors."""

    def shown(found: re.Match[str]) -> str:
        is_color = found[0].startswith("\x1b[") and not _conceals(found[0])
        return found[0] if is_color else f"\\x{ord(found[0][0]):02x}{found[0][1:]}"

    return _CONTROLS.sub(shown, text)


def _conceals(colors: str) -> bool:
    """Return whether a sequence of colors hides the text after it (SGR 8)."""
    attributes = _COLOR_ARGUMENTS.sub("", colors[2:-1]).split(";")
    return any(number.partition(":")[0].lstrip("0") == "8" for number in attributes)
