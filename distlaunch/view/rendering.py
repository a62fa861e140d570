"""Renders the contents of the screen as lines of text for a terminal of any size, and handles keys."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from rich.console import ConsoleDimensions as Size
from rich.text import Text

from distlaunch.agent.frozen import Frozen
from distlaunch.observers.console import escape
from distlaunch.observers.model import LogLine, Row, RunModel, shape
from distlaunch.supervisor.status import RunState, run_state
from distlaunch.wording import age_words, counted, spans

Part = TypeVar("Part")
BARS = "▁▂▃▄▅▆▇█"
HEADER, FOOTER, LEAST_LOG = 2, 1, 3
PAGE = 10
GRID_SHARE = 0.6
"""Maximum share of the height."""
_STATES = {
    **dict.fromkeys((RunState.RUNNING, RunState.SUCCEEDED), "bold green"),
    **dict.fromkeys((RunState.FAILED, RunState.LOST), "bold red"),
}
_BAD = ("failed", "stalled", "not started", "lost with its node")


class Wish(Frozen):
    """The user's choice: the `history`, or a `rank`'s log (None = all) filtered by `find`; how far `back`."""

    history: bool = False
    rank: int | None = None
    cursor: int = 0
    back: int = 0
    find: str = ""
    typing: bool = False


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


# The header


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
    """Render the watched number: its value, its rate, and its course."""
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

    If there are too many ranks, only conspicuous ones have a line of their own, followed by one per node.
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
    """Return the cells of a rank's line, or of several ranks of a node."""
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
    more = f", lines containing {wish.find!r}" if wish.find else ""
    more += f", {wish.back} lines back" if wish.back else ""
    title = f"── {name}{more} "
    return Text(title + "─" * max(0, width - len(title)), "dim")


def _pane(model: RunModel, wish: Wish, height: int) -> list[Text]:
    """Return what is below the grid: the history, or a log."""
    if wish.history:
        messages = [
            Text.assemble((f"{age_words(at):>6}  ", "dim"), (escape(text), _LEVELS.get(message.level, "")))
            for at, message in model.history
            for text in message.text.splitlines()
        ]
        return _window(messages, wish.back, height)
    logged = model.lines if wish.rank is None else model.of_rank.get(wish.rank, ())
    wanted = [line for line in logged if wish.find.lower() in line.text.lower()]
    return [_log_line(line) for line in _window(wanted, wish.back, height)]


_LEVELS = {"warning": "yellow", "error": "red"}


def _window(every: Sequence[Part], back: int, height: int) -> list[Part]:
    """Return the last items that fit, or those `back` items earlier."""
    end = max(min(height, len(every)), len(every) - back)
    return list(every[max(0, end - height) : end])


def _log_line(line: LogLine) -> Text:
    when = time.strftime("%H:%M:%S ", time.localtime(line.at))
    text = Text.assemble((when, "dim"), (f"{line.rank:>4} ", "cyan"))
    return text.append_text(Text.from_ansi(escape(line.text), style="" if not line.stream else "italic"))


_KEYS = "↑↓ select  Enter rank's log  a all ranks  / filter  PgUp/PgDn scroll  h history"
_KEYS_IN_SHORT = "↑↓ select  Enter log  a all  / filter  PgUp/PgDn  h history"


def _footer(wish: Wish, width: int, leaving: str) -> Text:
    if wish.typing:
        return Text(f"/{wish.find}▏  Enter apply  Esc clear", "bold")
    keys = f"{_KEYS}  q {leaving}"
    return Text(keys if len(keys) <= width else f"{_KEYS_IN_SHORT}  q {leaving}", "dim")


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
    """Return the choice after a key of the filter's text."""
    match key:
        case "enter":
            return wish._replace(typing=False)
        case "escape":
            return wish._replace(typing=False, find="")
        case "backspace":
            return wish._replace(find=wish.find[:-1])
    return wish._replace(find=wish.find + key) if len(key) == 1 and key.isprintable() else wish
