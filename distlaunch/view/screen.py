"""A picture of a run as lines of text, as many and as wide as a terminal has."""

import time
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TypeVar

from rich.text import Text

from distlaunch.agent.frozen import Frozen
from distlaunch.observers.console import escape
from distlaunch.runs.listing import age_words
from distlaunch.supervisor.status import RunState, run_state
from distlaunch.view.picture import Picture, Row, Said
from distlaunch.wording import counted, spans

Part = TypeVar("Part")
Node = tuple[str, Sequence[Row]]
BARS = "▁▂▃▄▅▆▇█"
HEADER, FOOTER, LEAST_LOG = 2, 1, 3
GRID_SHARE = 0.6
"""Of the height, at most."""
_STATES = {
    RunState.RUNNING: "bold green",
    RunState.SUCCEEDED: "bold green",
    RunState.FAILED: "bold red",
    RunState.LOST: "bold red",
    RunState.CANCELLED: "bold yellow",
}
_BAD = ("failed", "stalled", "not started", "lost with its node")


class Pane(Enum):
    """What is shown below the grid."""

    log = "log"
    history = "history"


class Wish(Frozen):
    """What the user wants to see: which `rank`'s log (None = of all), how far `back`, lines with `find`."""

    pane: Pane = Pane.log
    rank: int | None = None
    cursor: int = 0
    back: int = 0
    find: str = ""
    typing: bool = False


class Size(Frozen):
    """Of a terminal."""

    width: int
    height: int


def lines(picture: Picture, wish: Wish, size: Size, leaving: str = "quit") -> list[Text]:
    """Exactly `height` lines, none wider than `width`. `leaving` is what q does, in words."""
    grid = _grid(picture.rows(), wish, _most(size), bool(picture.values))
    shown = [*_header(picture), *grid, _rule(wish, size.width)]
    shown += _pane(picture, wish, max(0, size.height - len(shown) - FOOTER))
    shown = shown[: size.height - FOOTER]
    shown += [Text("")] * (size.height - FOOTER - len(shown))
    return [_cut(line, size.width) for line in (*shown, _footer(wish, size.width, leaving))][-size.height :]


def _most(size: Size) -> int:
    """Lines of the grid."""
    room = max(0, size.height - HEADER - FOOTER - 1)
    return max(1, min(room - LEAST_LOG, int(room * GRID_SHARE)))


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line


# The header


def _header(picture: Picture) -> list[Text]:
    state = picture.state
    if state is None:
        return [Text("connecting …"), Text("")]
    where = run_state(state)
    size = f"{state.counted(len(state.workers))} on {counted(len(state.members), 'node')}"
    first = Text.assemble((state.spec.name, "bold"), "  ", (where.value, _STATES.get(where, "bold yellow")))
    first.append(f"  {age_words(picture.elapsed_s)}  {size}")
    if state.restarts:
        first.append(f"  {counted(len(state.restarts), 'restart')}", "yellow")
    return [first, _trend(picture)]


def _trend(picture: Picture) -> Text:
    """The number that is watched: its value, its rate, how it went."""
    if not picture.trend:
        cause = picture.state.cause if picture.state else None
        return Text(escape(cause.text), "red") if cause else Text("")
    line = Text.assemble((f"{picture.trend[-1][1]:.6g}", "bold cyan"))
    if (rate := picture.rate()) is not None:
        line.append(f"  {rate:+.3g}/s")
    return line.append("  " + sparkline([value for _, value in picture.trend], 40), "cyan")


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as bars, the latest last; several values share a bar where there are more than that."""
    known = [value / 4 for value in values if abs(value) < float("inf")]  # sums of them are finite, too
    if not known:
        return ""
    step = max(1, -(-len(known) // width))
    parts = [known[at : at + step] for at in range(0, len(known), step)]
    means = [sum(value / len(part) for value in part) for part in parts]
    least, span = min(means), max(means) - min(means)
    return "".join(BARS[round((mean - least) / span * (len(BARS) - 1)) if span else 0] for mean in means)


# The grid


def _grid(rows: Sequence[Row], wish: Wish, most: int, valued: bool) -> list[Text]:
    if not rows:
        return []
    ranks, nodes, hidden = _folded(rows, most)
    cells = [_heads("RANK", "NODE", valued), *(_rank_cells(row, valued) for row in ranks)]
    cells += [_node_cells(node, of_node, valued) for node, of_node in nodes]
    grid = _columns(cells, wish.cursor)
    if hidden:
        rest = counted(sum(len(of_node) for _, of_node in hidden), "rank")
        grid.append(Text(f"and {counted(len(hidden), 'more node')} ({rest})", "dim"))
    return grid


def _folded(rows: Sequence[Row], most: int) -> tuple[Sequence[Row], Sequence[Node], Sequence[Node]]:
    """What has a line: ranks, then nodes; and the nodes without one.

    If there are too many ranks, only those that stand out have a line of their own.
    """
    if len(rows) + 1 <= most:
        return rows, (), ()
    marked = [row for row in rows if row.marks][: max(0, (most - 2) // 2)]
    nodes: dict[str, list[Row]] = {}
    for row in rows:
        nodes.setdefault(row.node, []).append(row)
    room = most - 1 - len(marked)
    listed = list(nodes.items())
    shown = len(listed) if len(listed) <= room else max(0, room - 1)
    return marked, listed[:shown], listed[shown:]


def _heads(first: str, second: str, valued: bool) -> list[Text]:
    heads = [first, second, "STATE", "CPU", "MEM", "GPU", "GMEM", "LAST", *(["VALUE"] if valued else []), ""]
    return [Text(head, "dim") for head in heads]


def _rank_cells(row: Row, valued: bool) -> list[Text]:
    style = "red" if any(mark in _BAD for mark in row.marks) else "yellow" if row.marks else ""
    use = row.use
    cells = [
        *(str(row.rank), escape(row.node), row.doing),
        *(_percent(use and use.cpu), _size(use and use.memory)),
        *(_percent(use and use.gpu), _size(use and use.gpu_memory)),
        "-" if row.age_s is None else age_words(row.age_s),
        *([_number(row.value)] if valued else []),
        ", ".join(mark for mark in row.marks if mark != row.doing),
    ]
    return [Text(cell, style) for cell in cells]


def _node_cells(node: str, rows: Sequence[Row], valued: bool) -> list[Text]:
    uses = [row.use for row in rows if row.use]
    ages = [row.age_s for row in rows if row.age_s is not None]
    values = [row.value for row in rows if row.value is not None]
    marked = sorted({mark for row in rows for mark in row.marks})
    cells = [
        spans(sorted(row.rank for row in rows)),
        escape(node),
        _counted_doings(rows),
        _percent(_mean(use.cpu for use in uses)),
        _size(sum(use.memory for use in uses) if uses else None),
        _percent(_mean(use.gpu for use in uses)),
        _size(_total(use.gpu_memory for use in uses)),
        age_words(max(ages)) if ages else "-",
        *([_number(_mean(values))] if valued else []),
        ", ".join(marked),
    ]
    return [Text(cell, "yellow" if marked else "") for cell in cells]


def _counted_doings(rows: Sequence[Row]) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.doing] = counts.get(row.doing, 0) + 1
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {doing}" for doing, count in sorted(counts.items(), key=lambda each: -each[1]))


_RIGHT = range(3, 9)
"""Columns of numbers."""
MAX_CELL = 28


def _columns(cells: Sequence[Sequence[Text]], cursor: int) -> list[Text]:
    widths = [min(MAX_CELL, max(len(row[column]) for row in cells)) for column in range(len(cells[0]))]
    made = []
    for index, row in enumerate(cells):
        line = Text()
        for column, (cell, most) in enumerate(zip(row, widths, strict=True)):
            cell.truncate(most, overflow="ellipsis")
            pad = " " * (most - len(cell))
            line.append(pad if column in _RIGHT else "").append_text(cell)
            line.append(("" if column in _RIGHT else pad) + "  ")
        if index and index - 1 == min(cursor, len(cells) - 2):
            line.stylize("reverse")
        made.append(line)
    return made


def row_at(picture: Picture, wish: Wish, size: Size) -> int | None:
    """The rank on which the cursor stands; of a node, its first."""
    ranks, nodes, _ = _folded(picture.rows(), _most(size))
    lines_of = [*(row.rank for row in ranks), *(min(row.rank for row in of_node) for _, of_node in nodes)]
    return lines_of[min(wish.cursor, len(lines_of) - 1)] if lines_of else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _size(value: int | None) -> str:
    if value is None:
        return "-"
    size = float(value)
    for unit in "BKMG":
        if size < 1000:
            return f"{size:.3g}{unit}"
        size /= 1024
    return f"{size:.3g}T"


# What is below


def _rule(wish: Wish, width: int) -> Text:
    name = (
        "history" if wish.pane is Pane.history else "all ranks" if wish.rank is None else f"rank {wish.rank}"
    )
    more = f", lines containing {wish.find!r}" if wish.find else ""
    more += f", {wish.back} lines back" if wish.back else ""
    title = f"── {name}{more} "
    return Text(title + "─" * max(0, width - len(title)), "dim")


def _pane(picture: Picture, wish: Wish, height: int) -> list[Text]:
    if wish.pane is Pane.history:
        told = [
            Text.assemble((f"{age_words(each.at):>6}  ", "dim"), (escape(text), _LEVELS.get(each.level, "")))
            for each in picture.told_all
            for text in each.text.splitlines()
        ]
        return _window(told, wish.back, height)
    said = picture.lines if wish.rank is None else picture.of_rank.get(wish.rank, ())
    wanted = [each for each in said if wish.find.lower() in each.text.lower()] if wish.find else list(said)
    return _window([_said(each) for each in _window(wanted, wish.back, height)], 0, height)


_LEVELS = {"warning": "yellow", "error": "red"}


def _window(every: Sequence[Part], back: int, height: int) -> list[Part]:
    end = max(min(height, len(every)), len(every) - back)
    return list(every[max(0, end - height) : end])


def _said(said: Said) -> Text:
    when = time.strftime("%H:%M:%S ", time.localtime(said.at))
    text = Text.assemble((when, "dim"), (f"{said.rank:>4} ", "cyan"))
    return text.append_text(Text.from_ansi(escape(said.text), style="" if not said.stream else "italic"))


_KEYS = "↑↓ select  Enter rank's log  a all ranks  / filter  PgUp/PgDn scroll  h history"
_KEYS_IN_SHORT = "↑↓ select  Enter log  a all  / filter  PgUp/PgDn  h history"


def _footer(wish: Wish, width: int, leaving: str) -> Text:
    if wish.typing:
        return Text(f"/{wish.find}▏  Enter apply  Esc clear", "bold")
    keys = f"{_KEYS}  q {leaving}"
    return Text(keys if len(keys) <= width else f"{_KEYS_IN_SHORT}  q {leaving}", "dim")
