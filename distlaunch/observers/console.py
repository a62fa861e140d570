"""Shows the ranks' output as whole lines with their origin, and distlaunch's own words."""

import errno
import os
import re
import time
from collections import deque
from collections.abc import Callable

from distlaunch.observers.outlet import Outlet
from distlaunch.wording import counted

MAX_LINE = 1 << 16
"""Bytes of a line without its end that are held back; more is shown in pieces."""
MAX_PIECES = 32
"""Of a rank's output between that of others, in which its last lines are looked for."""
PROGRESS_S = 1.0
"""A progress bar, which rewrites its line with carriage returns, is shown at most this often."""
RANK_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RESET = b"\x1b[0m"
# Everything a terminal obeys, but for tab, and colours (SGR), which training scripts use.
_BIDI = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_CONTROLS = re.compile(f"\x1b\\[[0-9;:]*m|[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI}]")


def wants_colour(stream_is_terminal: bool) -> bool:
    """Colours only on a terminal that has them, and not where NO_COLOR asks for none."""
    return stream_is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


class Console:
    """Prints to stdout and stderr."""

    def __init__(
        self,
        on_reader_left: Callable[[], None],
        output_fd: int = 1,
        waits: Callable[[], bool] = lambda: False,
    ) -> None:
        """For `waits` see `Outlet`."""
        self._on_reader_left = on_reader_left
        self._together = _same_file(output_fd, 2)
        errors = Outlet(2, lambda error: self._broken("stderr", 0, error), waits)
        output = errors  # one writer for what goes to one place: two would write in any order
        if not self._together:
            output = Outlet(1, lambda error: self._broken("stdout", 1, error), waits)
        self._outlets = (output, errors)
        self._terminal = (os.isatty(output_fd), os.isatty(2))
        self._one_terminal = self._together and all(self._terminal)
        self._shown_lines = 0
        self._pieces: dict[tuple[int, int], deque[tuple[int, int]]] = {}
        self._progress_shown: dict[tuple[int, int], float] = {}
        self._partial: dict[tuple[int, int], bytes] = {}
        self._prefixes: dict[tuple[int, int], str] = {}
        self.last_said = ""
        """Our own words, if nothing was shown after them."""
        self._in_line = [False, False]
        self._live = ""

    @property
    def has_terminal(self) -> bool:
        """Whether our own words go to a terminal."""
        return self._terminal[1]

    def live(self, text: str) -> None:
        """Show a line that is gone, or is another, as soon as there is something else to show."""
        width = os.get_terminal_size(2).columns or 80 if self._terminal[1] else 0  # 0 = it does not know
        shown = escape(text)[: max(0, width - 1)]
        if shown == self._live:
            return
        self._live = shown
        self._outlets[1].write(b"\r\x1b[K" + shown.encode(errors="backslashreplace"), ours=True)

    def _end_live(self) -> None:
        """Take it away before anything else comes there, be it by the other stream."""
        if self._live:
            self._live = ""
            self._outlets[1].write(b"\r\x1b[K", ours=True)
            if not self._together:
                self._outlets[1].settle()

    def output(self, rank: int, stream: int, data: bytes, prefix: str | None) -> None:
        """Show what a rank printed, line by line behind `prefix`; the rest of a line waits for its end.

        Without a prefix bytes are shown as they come.
        """
        self._end_live()
        if prefix is None:
            self._came_between(stream)
            self._in_line[stream] = not data.endswith(b"\n")
            self._shown_lines += data.count(b"\n")
            self._outlets[stream].write(data)
            return
        key = (rank, stream)
        self._prefixes[key] = prefix
        held, end = self._partial.pop(key, b""), data.rfind(b"\n")
        rest = data[end + 1 :] if end >= 0 else held + data
        if len(rest) > MAX_LINE:
            end, rest = len(data), b""
        if end >= 0:
            self._lines(rank, stream, b"".join((held, memoryview(data)[:end])))  # in one copy: it may be long
        if b"\r" in rest:
            rest = self._progress(rank, stream, rest)
        if rest:
            self._partial[key] = rest

    def _progress(self, rank: int, stream: int, rest: bytes) -> bytes:
        """Show where a progress bar stands, now and then; what of it is still to be completed."""
        now = time.monotonic()
        stands = latest(rest)
        if now - self._progress_shown.get((rank, stream), 0.0) < PROGRESS_S:
            return stands + b"\r" if rest.endswith(b"\r") else stands
        self._progress_shown[rank, stream] = now
        self._lines(rank, stream, stands)
        return b""

    def lines_since(self, rank: int, stream: int, count: int) -> int | None:
        """Lines of others after and between the last `count` of a rank.

        None where not all goes to one terminal, or these are in more pieces than are remembered.
        """
        whole = not any(outlet.dropped_lines for outlet in self._outlets)
        own = 0
        for end, lines in reversed(self._pieces.get((rank, stream), ()) if whole else ()):
            own += lines
            if own >= count:
                return self._shown_lines - (end - lines) - own
        return None

    def prefix(self, rank: int, stream: int) -> str:
        """What stands before a rank's lines, if they have been shown with something there."""
        return self._prefixes.get((rank, stream), "")

    def finish_lines(self) -> None:
        """Show the last lines that lack their end."""
        for (rank, stream), rest in sorted(self._partial.items()):
            self._lines(rank, stream, rest)
        self._partial.clear()

    def say(self, text: str, colour: int | None = None) -> None:
        """Print distlaunch's own words to stderr."""
        self._end_live()
        self.last_said = text
        if self._terminal[1]:
            text = escape(text)
        if colour and wants_colour(self._terminal[1]):
            text = f"\x1b[{colour}m{text}\x1b[0m"
        begin = b"\n" if self._in_line[1] else b""  # not in the middle of a worker's line
        self._in_line[1] = False
        self._outlets[1].write(begin + text.encode(errors="backslashreplace") + b"\n", ours=True)

    def close(self, patient: Callable[[float], bool]) -> None:
        """Write out what is queued, and say what was not shown; for `patient` see `Outlet.close`."""
        self._end_live()
        output, errors = self._outlets
        if output is not errors:
            output.close(patient)
        dropped = sum(outlet.dropped_lines for outlet in {output, errors} if not outlet.broken)
        if dropped:
            self.say(f"distlaunch: {counted(dropped, 'line')} not shown: the reader was too slow")
        errors.close(patient)

    def _broken(self, name: str, other: int, error: OSError) -> None:
        """A reader that leaves ends the job, as it ends a pipeline; a full disk does not: the logs go on."""
        if error.errno == errno.EPIPE:
            self._on_reader_left()
        elif not self._outlets[other].broken:
            text = f"distlaunch: can't write to {name}: {error.strerror}; the job continues, see its logs\n"
            self._outlets[other].write(text.encode())

    def _came_between(self, stream: int) -> None:
        if stream == 1 or self._together:
            self.last_said = ""

    def _lines(self, rank: int, stream: int, whole: bytes) -> None:
        self._came_between(stream)
        prefix = self._coloured_prefix(rank, stream)
        if self._terminal[stream]:
            text = escape(b"\n".join(map(latest, whole.split(b"\n"))).decode(errors="backslashreplace"))
            # A colour that a worker leaves on would run into our own lines.
            whole = (text + "\x1b[0m" if "\x1b[" in text else text).encode(errors="backslashreplace")
        if self._one_terminal:
            self._count(rank, stream, whole.count(b"\n") + 1)
        self._outlets[stream].write(b"".join((prefix, whole.replace(b"\n", b"\n" + prefix), b"\n")))

    def _count(self, rank: int, stream: int, lines: int) -> None:
        pieces = self._pieces.setdefault((rank, stream), deque(maxlen=MAX_PIECES))
        goes_on = pieces and pieces[-1][0] == self._shown_lines  # nobody else spoke since
        before = pieces.pop()[1] if goes_on else 0
        self._shown_lines += lines
        pieces.append((self._shown_lines, before + lines))

    def _coloured_prefix(self, rank: int, stream: int) -> bytes:
        text = self._prefixes[rank, stream].encode()
        if wants_colour(self._terminal[stream]):
            return b"\x1b[%dm%s%s" % (RANK_COLOURS[rank % len(RANK_COLOURS)], text, _RESET)
        return text


def _same_file(one: int, other: int) -> bool:
    """Whether two descriptors lead to the same place, so that what goes to one stands between the other's."""
    return os.path.sameopenfile(one, other)


def latest(line: bytes) -> bytes:
    """Where a progress bar stands, which rewrites its line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def escape(text: str) -> str:
    """`text` without what a terminal would obey, but for tabs, line ends and colours."""

    def shown(found: re.Match[str]) -> str:
        return found[0] if found[0].startswith("\x1b[") else f"\\x{ord(found[0]):02x}"

    return _CONTROLS.sub(shown, text)
