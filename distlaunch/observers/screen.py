"""The full-screen view of a run, on the terminal's alternate screen: its lines and keys.

The run belongs to this process or to another one. `observers.model` contains the data that the screen shows.
"""

import contextlib
import io
import os
import select
import signal
import subprocess
import termios
import time
import tty
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console, Group
from rich.console import ConsoleDimensions as Size
from rich.live import Live
from rich.text import Text

from distlaunch.agent.frozen import Frozen
from distlaunch.observers.console import escape
from distlaunch.observers.model import LogLine, Row, RunModel, shape, uses_in
from distlaunch.observers.observer import Observed
from distlaunch.observers.outlet import Outlet
from distlaunch.observers.recording import USE_REQUEST, request
from distlaunch.observers.terminal import PATIENCE_S, Terminal
from distlaunch.signals import Interrupts
from distlaunch.supervisor.actions import ShowMessage
from distlaunch.supervisor.nodes import Use
from distlaunch.supervisor.status import RunState, run_state
from distlaunch.supervisor.summary import Summary
from distlaunch.wording import age_words, counted, spans

LOOK_S = 0.1
"""Seconds between two checks for keys."""
TOUCH_S = 2.0
"""Seconds between two requests to the controller for the ranks' resource use."""
DRAW_S = 1.0
"""Seconds between two redraws if no key is pressed."""
Part = TypeVar("Part")
BARS = "▁▂▃▄▅▆▇█"
HEADER, FOOTER, LEAST_LOG = 2, 1, 3
PAGE = 10
GRID_SHARE = 0.6
"""Maximum share of the screen's height for the table of ranks."""
_STATES = {
    **dict.fromkeys((RunState.RUNNING, RunState.SUCCEEDED), "bold green"),
    **dict.fromkeys((RunState.FAILED, RunState.LOST), "bold red"),
}
_BAD = ("failed", "stalled", "not started", "lost with its node")


class Wish(Frozen):
    """The user's choice: the `history`, or the log of a `rank` (None = all ranks).

    `find` filters the log. `back` is the number of lines scrolled back.
    """

    history: bool = False
    rank: int | None = None
    cursor: int = 0
    back: int = 0
    find: str = ""
    typing: bool = False


class Screen(RunModel):
    """The terminal's alternate screen, for a run of this process or for another run, in `directory`.

    `q` stops a run of this process, but only quits the screen of any other. `close` returns to the main
    screen, where the `terminal` shows how the run ended.
    """

    def __init__(
        self, terminal: Terminal, interrupts: Interrupts, directory: str = "", began: float | None = None
    ) -> None:
        super().__init__(time.time() if began is None else began)
        self._terminal, self._interrupts, self._directory = terminal, interrupts, directory
        self._messages: list[tuple[ShowMessage, float]] = []
        self._wish, self._drawn_at, self._touched_at, self._size = Wish(), 0.0, 0.0, Size(0, 0)
        self._drawn, self._output = io.StringIO(), Outlet(1, lambda error: None)
        with contextlib.ExitStack() as stack:
            console = Console(file=self._drawn, force_terminal=True, highlight=False)
            live = Live(
                console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            stack.enter_context(_rescued(self._output))
            self._keys = stack.enter_context(_keyboard())
            stack.callback(self._leave)
            self._live = stack.enter_context(live)
            self._draw()
            self.close = stack.pop_all().close
        self.wake_at = 0.0

    @classmethod
    def of(cls, run: Observed) -> "Screen":
        """Make the screen of a run of this process."""
        return cls(Terminal(run.shown.interrupts, run.shown.output_fd), run.shown.interrupts)

    def woken(self) -> None:
        """Handle keys, and redraw if anything may have changed."""
        now = time.monotonic()
        self.wake_at = now + LOOK_S
        if self._directory and now - self._touched_at > TOUCH_S:
            self._touched_at = now
            self.used(_watched_uses(self._directory), 0.0)
        wish = self._wish
        for key in _pressed(self._keys):
            wanted = after(self._wish, key, row_at(self, self._wish, self._size))
            if wanted is None:
                self._interrupts.send(0 if self._directory else signal.SIGINT)
            self._wish = within(self, wanted or self._wish, self._size)
        late = now - self._drawn_at >= DRAW_S
        if late or wish != self._wish or self._live.console.size != self._size:
            self._draw()

    def message(self, message: ShowMessage, at: float) -> None:
        """Store the message for the history and for the end."""
        super().message(message, at)
        self._messages.append((message, at))

    def ended(self, summary: Summary) -> None:
        """Close the screen and show how the run ended; for a run of this process, also show its messages."""
        self.wake_at = None
        self.close()
        for message, at in () if self._directory else self._messages:
            self._terminal.message(message, at)
        self._terminal.ended(summary)

    def _draw(self) -> None:
        """Redraw; try again at the next wake if the terminal hasn't taken the last frame yet."""
        if self._output.waiting:
            self._drawn_at = 0.0
            return
        self._drawn_at, self._size = time.monotonic(), self._live.console.size
        shown = lines(self, self._wish, self._size, "quit" if self._directory else "stop the run")
        self._live.update(Group(*shown), refresh=True)
        self._send()

    def _send(self) -> None:
        """Write what was drawn, from a thread: the terminal may take no output for hours."""
        self._output.write(self._drawn.getvalue().encode(errors="replace"), ours=True)
        self._drawn.seek(0)
        self._drawn.truncate()

    def _leave(self) -> None:
        self._send()
        self._output.close(lambda silent_s: silent_s < PATIENCE_S)


def _watched_uses(directory: str) -> Mapping[int, Use]:
    """Request the ranks' resource use from the controller, and return the values it has written so far."""
    with contextlib.suppress(OSError):  # without write access, show the existing values
        request(directory, USE_REQUEST)
    return uses_in(directory)


# The lines, from the top


def lines(model: RunModel, wish: Wish, size: Size, leaving: str = "quit") -> list[Text]:
    """Return exactly `height` lines, none wider than `width`. `leaving` describes what q does."""
    grid = _grid(model.rows(), wish, _most(size), bool(model.values))
    shown = [*_header(model), *grid, _rule(wish, size.width)]
    shown += _pane(model, wish, max(0, size.height - len(shown) - FOOTER))
    shown = shown[: size.height - FOOTER]
    shown += [Text("")] * (size.height - FOOTER - len(shown))
    return [_cut(line, size.width) for line in (*shown, _footer(wish, size.width, leaving))][-size.height :]


def _most(size: Size) -> int:
    """Return the maximum number of lines of the grid."""
    room = max(0, size.height - HEADER - FOOTER - 1)
    return max(1, min(room - LEAST_LOG, int(room * GRID_SHARE)))


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line


def _header(model: RunModel) -> list[Text]:
    state = model.state
    if state is None:
        return [Text("connecting …"), Text("")]
    where = run_state(state)
    first = Text.assemble((state.spec.name, "bold"), "  ", (where.value, _STATES.get(where, "bold yellow")))
    first.append(f"  {age_words(model.elapsed_s)}  {shape(state)}")
    if state.restarts:
        first.append(f"  {counted(len(state.restarts), 'restart')}", "yellow")
    return [first, _trend(model)]


def _trend(model: RunModel) -> Text:
    """Render the watched number: its value, its rate, and its recent values."""
    if not model.trend:
        cause = model.state.cause if model.state else None
        return Text(escape(cause.text), "red") if cause else Text("")
    line = Text.assemble((f"{model.trend[-1][1]:.6g}", "bold cyan"))
    if (rate := model.rate()) is not None:
        line.append(f"  {rate:+.3g}/s")
    return line.append("  " + sparkline([value for _, value in model.trend], 40), "cyan")


def sparkline(values: Sequence[float], width: int) -> str:
    """Render values as bars, the latest last. If there are too many, several share a bar."""
    known = [value / 4 for value in values if abs(value) < float("inf")]  # so that their sums are finite, too
    if not known:
        return ""
    step = max(1, -(-len(known) // width))
    parts = [known[at : at + step] for at in range(0, len(known), step)]
    means = [sum(value / len(part) for value in part) for part in parts]
    least, span = min(means), max(means) - min(means)
    return "".join(BARS[round((mean - least) / span * (len(BARS) - 1)) if span else 0] for mean in means)


# The grid


def _grid(rows: Sequence[Row], wish: Wish, most: int, valued: bool) -> list[Text]:
    """Return the table of ranks in at most `most` lines, with a column of watched numbers if `valued`."""
    if not rows:
        return []
    lines_of, hidden = _folded(rows, most)
    heads = ["RANK", "NODE", "STATE", "CPU", "MEM", "GPU", "GMEM", "LAST", *(["VALUE"] if valued else []), ""]
    cells = [[Text(head, "dim") for head in heads], *(_cells(ranks, valued) for ranks in lines_of)]
    grid = _columns(cells, wish.cursor)
    if hidden:
        rest = counted(sum(map(len, hidden)), "rank")
        grid.append(Text(f"and {counted(len(hidden), 'more node')} ({rest})", "dim"))
    return grid


def _folded(rows: Sequence[Row], most: int) -> tuple[list[list[Row]], list[list[Row]]]:
    """Return the ranks of each line, and those of each node without a line.

    If there are too many ranks, only conspicuous ones have their own lines. One line per node follows.
    """
    if len(rows) + 1 <= most:
        return [[row] for row in rows], []
    marked = [[row] for row in rows if row.marks][: max(0, (most - 2) // 2)]
    by_node: dict[str, list[Row]] = {}
    for row in rows:
        by_node.setdefault(row.node, []).append(row)
    nodes, room = list(by_node.values()), most - 1 - len(marked)
    shown = len(nodes) if len(nodes) <= room else max(0, room - 1)
    return [*marked, *nodes[:shown]], nodes[shown:]


def _cells(ranks: Sequence[Row], valued: bool) -> list[Text]:
    """Return the cells of a line for one rank, or for several ranks of a node."""
    uses = [row.use for row in ranks if row.use]
    age_s = max((row.age_s for row in ranks if row.age_s is not None), default=None)
    doing = _counted_doings(ranks)
    marks = dict.fromkeys(mark for row in ranks for mark in row.marks)
    bad = len(ranks) == 1 and not marks.keys().isdisjoint(_BAD)
    cells = [
        *(spans(sorted(row.rank for row in ranks)), escape(ranks[0].node), doing),
        *(_mean((use.cpu for use in uses), "{:.0f}%"), _total_size(use.memory for use in uses)),
        *(_mean((use.gpu for use in uses), "{:.0f}%"), _total_size(use.gpu_memory for use in uses)),
        "-" if age_s is None else age_words(age_s),
        *([_mean((row.value for row in ranks), "{:.5g}")] if valued else []),
        ", ".join(mark for mark in marks if mark != doing),
    ]
    style = "red" if bad else "yellow" if marks else ""
    return [Text(cell, style) for cell in cells]


def _counted_doings(ranks: Sequence[Row]) -> str:
    counts = Counter(row.doing for row in ranks)
    if len(counts) == 1:
        return ranks[0].doing
    return ", ".join(f"{count} {doing}" for doing, count in counts.most_common())


_RIGHT = range(3, 9)
"""Columns of numbers, aligned to the right."""
MAX_CELL = 28


def _columns(cells: Sequence[Sequence[Text]], cursor: int) -> list[Text]:
    """Align the cells of all rows. The first row is the header; `cursor` counts the rows below it."""
    for column, of_column in enumerate(zip(*cells, strict=True)):
        width = min(MAX_CELL, max(map(len, of_column)))
        for cell in of_column:
            cell.truncate(width, overflow="ellipsis")
            cell.align("right" if column in _RIGHT else "left", width)
    made = [Text("  ").join(row) for row in cells]
    made[1 + min(cursor, len(cells) - 2)].stylize("reverse")
    return made


def row_at(model: RunModel, wish: Wish, size: Size) -> int | None:
    """Return the rank at the cursor; for a node, its first rank."""
    lines_of, _ = _folded(model.rows(), _most(size))
    there = lines_of[wish.cursor : wish.cursor + 1] or lines_of[-1:]
    return min((row.rank for ranks in there for row in ranks), default=None)


def within(model: RunModel, wish: Wish, size: Size) -> Wish:
    """Return the choice with its cursor in the grid, and scrolled back no further than there are lines."""
    lines_of, _ = _folded(model.rows(), _most(size))
    back = min(wish.back, max(0, len(_entries(model, wish)) - 1))
    return wish._replace(cursor=min(wish.cursor, max(0, len(lines_of) - 1)), back=back)


def _mean(values: Iterable[float | None], form: str) -> str:
    """Format the mean of the known values; "-" if there are none."""
    known = [value for value in values if value is not None]
    return form.format(sum(known) / len(known)) if known else "-"


def _total_size(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    size = float(sum(known))
    for unit in "BKMG":
        if size < 1000:
            return f"{size:.3g}{unit}"
        size /= 1024
    return f"{size:.3g}T"


# Below the grid


def _rule(wish: Wish, width: int) -> Text:
    name = "history" if wish.history else "all ranks" if wish.rank is None else f"rank {wish.rank}"
    more = f", lines containing {wish.find!r}" if wish.find and not wish.history else ""
    more += f", {wish.back} lines back" if wish.back else ""
    title = f"── {name}{more} "
    return Text(title + "─" * max(0, width - len(title)), "dim")


def _pane(model: RunModel, wish: Wish, height: int) -> list[Text]:
    """Return the lines below the grid."""
    window = _window(_entries(model, wish), wish.back, height)
    return [_log_line(each) if isinstance(each, LogLine) else _history_line(*each) for each in window]


def _entries(model: RunModel, wish: Wish) -> list[LogLine | tuple[float, str, str]]:
    """Return all lines of the history, as time, level and text, or of a log."""
    if wish.history:
        return [(at, each.level, text) for at, each in model.history for text in each.text.splitlines()]
    logged = model.lines if wish.rank is None else model.of_rank.get(wish.rank, ())
    return [line for line in logged if wish.find.lower() in line.text.lower()]


_LEVELS = {"warning": "yellow", "error": "red"}


def _window(every: Sequence[Part], back: int, height: int) -> list[Part]:
    """Return the last items that fit, or those `back` items earlier."""
    end = max(min(height, len(every)), len(every) - back)
    return list(every[max(0, end - height) : end])


def _history_line(at: float, level: str, text: str) -> Text:
    return Text.assemble((f"{age_words(at):>6}  ", "dim"), (escape(text), _LEVELS.get(level, "")))


def _log_line(line: LogLine) -> Text:
    when = time.strftime("%H:%M:%S ", time.localtime(line.at))
    text = Text.assemble((when, "dim"), (f"{line.rank:>4} ", "cyan"))
    return text.append_text(Text.from_ansi(escape(line.text), style="" if not line.stream else "italic"))


_HELP = "↑↓ select  Enter rank's log  a all ranks  / filter  PgUp/PgDn scroll  h history"
_HELP_IN_SHORT = "↑↓ select  Enter log  a all  / filter  PgUp/PgDn  h history"


def _footer(wish: Wish, width: int, leaving: str) -> Text:
    if wish.typing:
        return Text(f"/{wish.find}▏  Enter apply  Esc clear", "bold")
    keys = f"{_HELP}  q {leaving}"
    return Text(keys if len(keys) <= width else f"{_HELP_IN_SHORT}  q {leaving}", "dim")


# Keys


def after(wish: Wish, key: str, rank_there: int | None) -> Wish | None:
    """Return the user's choice after a key; None = quit. `rank_there` is the rank at the cursor."""
    if wish.typing:
        return _typed(wish, key)
    if key == "q":
        return None
    changes: dict[str, dict[str, Any]] = {
        "enter": {"rank": rank_there, "history": False, "back": 0},
        "a": {"rank": None, "history": False, "back": 0, "find": ""},
        "up": {"cursor": max(0, wish.cursor - 1)},
        "down": {"cursor": wish.cursor + 1},
        "h": {"history": not wish.history, "back": 0},
        "/": {"typing": True, "find": "", "history": False, "back": 0},
        "page up": {"back": wish.back + PAGE},
        "page down": {"back": max(0, wish.back - PAGE)},
    }
    return wish._replace(**changes.get(_SAME.get(key, key), {}))


_SAME = {"k": "up", "j": "down", "escape": "a"}


def _typed(wish: Wish, key: str) -> Wish:
    """Return the choice after a key typed into the filter."""
    match key:
        case "enter":
            return wish._replace(typing=False)
        case "escape":
            return wish._replace(typing=False, find="")
        case "backspace":
            return wish._replace(find=wish.find[:-1])
    return wish._replace(find=wish.find + key) if len(key) == 1 and key.isprintable() else wish


_KEYS = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\r": "enter", b"\n": "enter", b"\x1b": "escape",
    b"\x7f": "backspace", b"\x08": "backspace",
}  # fmt: skip


@contextlib.contextmanager
def _keyboard(fd: int = 0) -> Iterator[int | None]:
    """Yield a descriptor from which keys can be read one by one, without echo; None without a terminal."""
    if not os.isatty(fd):
        yield None
        return
    before = termios.tcgetattr(fd)
    # TCSADRAIN would wait for a terminal that takes no output.
    tty.setcbreak(fd, termios.TCSANOW)  # Ctrl-C still sends a signal
    try:
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)


def _pressed(fd: int | None) -> Iterator[str]:
    """Yield the keys pressed since the last call: names, or the characters themselves."""
    data = b""
    if fd is not None and select.select([fd], [], [], 0)[0]:
        with contextlib.suppress(OSError):
            data = os.read(fd, 1024)
    while data:
        size = next((n for n in (4, 3, 1) if data[:n] in _KEYS), 0)
        if size == 1 and data[:1] == b"\x1b" and len(data) > 1:  # an unknown sequence
            return
        character = data.decode(errors="surrogateescape")[:1]
        yield _KEYS.get(data[:size], character)
        data = data[size or len(character.encode(errors="surrogateescape")) :]


# The terminal

# Restores the terminal even if this process is killed. Stdout is the terminal. Only this process has the
# other end of stdin: if stdin ends without a line, this process is dead.
_RESCUER = (
    "exec 3>&1; was=$(stty -g <&3) || exit; echo ready >&2; exec 2>/dev/null; "
    r"""read word || { stty "$was" <&3; printf '\033[?1049l\033[?25h\033[0m'; }"""
)


@contextlib.contextmanager
def _rescued(output: Outlet) -> Iterator[None]:
    """Make a shell restore the terminal if this process is killed while the body is running.

    It also does so if the terminal takes no `output` at the end of the body, once it takes output again.
    """
    # In another session, so that it survives a signal to all processes of the terminal.
    rescuer = subprocess.Popen(
        ["/bin/sh", "-c", _RESCUER],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    assert rescuer.stderr is not None
    rescuer.stderr.read(1)  # it has saved the terminal's state, or has exited
    try:
        yield
    finally:
        if not output.waiting:
            rescuer.communicate(b"left\n")
