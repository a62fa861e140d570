"""Renders a report as one HTML page without scripts. Everything that came from a node is escaped."""

import re
import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from itertools import accumulate, groupby, islice
from typing import Any

from distlaunch.observers.model import Row
from distlaunch.observers.recording import SAMPLE_S, SAMPLE_SHARE
from distlaunch.observers.run_directory import file_of
from distlaunch.runs.report import End, Report, stands_out
from distlaunch.runs.run import document_in, replace_older
from distlaunch.runs.timeline import ALL_KINDS, Span, ledger
from distlaunch.runs.why import clock
from distlaunch.supervisor.status import RunState
from distlaunch.wording import counted, cut, listed, rank_list, size_words, spans

MAX_TEXT, MAX_LINE = 20_000, 2_000
"""Maximum characters shown of a text and of a line of output."""
MAX_LANES = 24
"""Maximum lanes shown. If there are more, nodes whose lanes look almost the same share a lane."""
MAX_POINTS = 120
"""Maximum values shown of a node's use over time."""
MAX_ROWS = 2_000
"""Maximum ranks in the table of ranks."""
MAX_MESSAGES, MAX_EVIDENCE = 300, 400
"""Maximum messages and lines of evidence shown."""
WIDTH = 1000
"""The width of drawings in their own units. On the page, they are as wide as the column."""
FOLDED = 16
"""Rows beyond which a table is folded."""
STYLE = "report.css"
"""The style sheet. It becomes part of the page."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
MARK = '<meta name="distlaunch-run" content="{}">'
"""Identifies the run in the head of its report."""

_ANSI = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b]*(?:\x07|\x1b\\\\)?|[ -/]*[0-~])")
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


def plain(value: Any, most: int = MAX_TEXT) -> str:
    """Return text that may have come from a node as HTML, without terminal control sequences."""
    text = cut(str(value), most)
    return escape(_CONTROLS.sub("", _ANSI.sub("", text)))


def is_page_of(head: bytes, run_id: str) -> bool:
    """Return whether a file that begins with `head` is a page about the run."""
    return MARK.format(plain(run_id)).encode() in head


def write_page(path: str, text: str, run_id: str) -> None:
    """Write the page about a run. Raises `DistlaunchError` if `path` is some other existing file."""
    replace_older(path, text.encode(errors="replace"), lambda head: is_page_of(head, run_id))


def page(report: Report) -> str:
    """Return the page."""
    status = report.run.status
    title = f"{plain(status.job)}: {status.state.value}"
    style = files("distlaunch.runs").joinpath(STYLE).read_text()
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"{MARK.format(plain(report.run.id))}"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{title}</title><style>{style}</style></head>\n<body>"
    )
    body = "\n".join(section(report) for section in SECTIONS)
    foot = f"<p>Created by distlaunch on {_when(time.time())} from {plain(report.run.directory)}</p>"
    return f"{head}{_header(report)}<main>{body}</main><footer>{foot}</footer></body></html>\n"


def _header(report: Report) -> str:
    status, state = report.run.status, report.state
    kinds = {RunState.SUCCEEDED: "good", RunState.FAILED: "bad", RunState.LOST: "bad"}
    facts = [
        state.plan.size_words if state and state.plan else "",
        counted(status.restarts, "restart") if status.restarts else "",
        f"exit status {status.exit_status}" if status.exit_status else "",
        _span(report.seconds) + ("" if status.state.over else " so far"),
        f"began {_when(status.began)}",
    ]
    items = "".join(f"<li>{plain(fact)}</li>" for fact in facts if fact)
    word = f'<span class="state {kinds.get(status.state, "other")}">{status.state.value}</span>'
    return (
        f"<header><h1>{plain(status.job)} {word}</h1><p>{plain(report.run.id)}</p><ul>{items}</ul></header>\n"
    )


def _section(title: str, body: str) -> str:
    """Return a section of the page; "" without a `body`."""
    name = title.lower().replace(" ", "-")
    head = f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>'
    return f"{head}\n{body}</section>" if body else ""


def _table(
    name: str, heads: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Sequence[int] = ()
) -> str:
    """Return a table. Rows are HTML cells, the first of which is a heading. `numbers` are numeric columns."""
    of = [' class="n"' if column in numbers else "" for column in range(len(heads))]
    top = "".join(f'<th scope="col"{of[i]}>{head}</th>' for i, head in enumerate(heads))
    body = "\n".join(
        f'<tr><th scope="row"{of[0]}>{row[0]}</th>'
        + "".join(f"<td{of[i]}>{cell}</td>" for i, cell in enumerate(row) if i)
        + "</tr>"
        for row in rows
    )
    table = f'<table aria-label="{name}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{name}">{table}</div>'


def _lanes(name: str, rows: str) -> str:
    return f'<table class="lanes" aria-label="{name}"><tbody>{rows}</tbody></table>'


def _folded(what: str, body: str, unfolded: bool = False) -> str:
    return f"<details{' open' if unfolded else ''}><summary>{what}</summary>{body}</details>" if body else ""


def _drawing(title: str, height: float, inner: str, kind: str = "") -> str:
    """Return an SVG drawing as wide as its column; `title` describes it."""
    box = f'viewBox="0 0 {WIDTH} {height:g}" preserveAspectRatio="none" height="{height:g}"'
    return f'<svg class="{kind}" role="img" {box}><title>{title}</title>{inner}</svg>'


# What happened


def _verdict(report: Report) -> str:
    """Return the root cause with its evidence and consequences, and what to do."""
    found, status = report.explanation, report.run.status
    if not found.cause:
        goes = "The run succeeded." if status.state is RunState.SUCCEEDED else "The run is active."
        parts = [f'<p class="lead">{goes}</p>']
    else:
        lead = found.lead.capitalize()
        when = f' <span class="dim">at {clock(found.at)}</span>' if found.at else ""
        parts = [f'<p class="lead"><strong>{lead}:</strong> {plain(found.cause)}{when}</p>']
    if found.error:
        parts.append(_pre(found.error))
    if found.advice:
        parts.append(f"<p><strong>What to do:</strong> {plain(found.advice)}</p>")
    facts = [
        *(("Evidence", sign) for sign in found.signs),
        *(("Waiting", line) for line in found.waiting),
        *(("Then", line) for line in found.then),
        *(("Before", line) for line in found.restarts),
        *((f"Since {found.other}, the last good run", change) for change in found.changes()),
        *([("Incomplete", found.incomplete)] if found.incomplete else []),
    ]
    records = [*islice((line for record in found.evidence for line in record.lines()), MAX_EVIDENCE)]
    parts += [_facts(facts), _folded("State of the workers, as collected", _pre(records) if records else "")]
    return _section("What happened", "".join(parts))


def _facts(pairs: Iterable[tuple[str, Any]]) -> str:
    """Return a list of facts. Consecutive facts with the same name are grouped."""
    items = "".join(
        f"<dt>{plain(name)}</dt>" + "".join(f"<dd>{plain(text)}</dd>" for _, text in group)
        for name, group in groupby(pairs, key=lambda fact: fact[0])
    )
    return f"<dl>{items}</dl>" if items else ""


def _pre(lines: Iterable[str]) -> str:
    text = "\n".join(plain(line, MAX_LINE) for line in lines)
    return f'<pre tabindex="0">{text}\n</pre>'


# Where the time went


def _ledger(report: Report) -> str:
    """Return the run's seconds by class, as a bar and a table."""
    found = ledger(report.spans, report.queue_s)
    whole = sum(found.values())
    if not whole:
        return ""
    ends = [*accumulate(found.values())]
    spans = [Span((), kind, end - found[kind], end, 0) for kind, end in zip(found, ends, strict=True)]
    words = "; ".join(f"{ALL_KINDS[kind]} {seconds / whole:.1%}" for kind, seconds in found.items())
    bar = _drawing(f"Time by phase: {words}", 28, _bars(spans, WIDTH / whole, 28), "bar")
    rows = [
        (_key(f"k-{kind}") + ALL_KINDS[kind], _span(seconds), f"{seconds / whole:.1%}")
        for kind, seconds in found.items()
    ]
    return _section("Where the time went", bar + _table("Ledger", ("class", "time", "share"), rows, (1, 2)))


def _key(color: str) -> str:
    box = '<svg class="key" viewBox="0 0 1 1" aria-hidden="true">'
    return f'{box}<rect class="{color}" width="1" height="1"/></svg>'


# When it happened


def _timeline(report: Report) -> str:
    """Return a lane for the job and one for each node. If there are many nodes, similar ones share a lane."""
    of_lanes = {lane: list(group) for lane, group in groupby(report.spans, key=lambda span: span.lane)}
    scale = WIDTH / (report.seconds or 1.0)
    alike: dict[tuple[Any, ...], list[int]] = {}
    many = sum(len(lane) == 1 for lane in of_lanes) > MAX_LANES
    for lane, found in of_lanes.items():
        if len(lane) == 1:
            alike.setdefault(_looks(found, scale) if many else lane, []).append(lane[0])
    if not of_lanes.get(()):
        return ""
    labels, failed = report.labels, report.explanation.node
    spares = range(len(report.state.spec.nodes) if report.state else 0, len(labels))
    ordered = sorted(alike.values(), key=lambda nodes: failed not in [labels[node] for node in nodes])
    rows = [_lane("job", of_lanes[()], scale)]
    for group in sorted(ordered[:MAX_LANES]):
        nodes = sorted(group, key=lambda node: labels[node] != failed)
        name = labels[nodes[0]] + (f" and {len(nodes) - 1} similar" if len(nodes) > 1 else "")
        rows.append(_lane(name + (" (spare)" if nodes[0] in spares else ""), of_lanes[nodes[0],], scale))
    kinds = {span.kind for span in report.spans if len(span.lane) < 2}
    legend = "".join(
        f"<li>{_key(f'k-{kind}')}{words}</li>" for kind, words in ALL_KINDS.items() if kind in kinds
    )
    rest = sum(map(len, ordered[MAX_LANES:]))
    more = f"<p>{counted(rest, 'other node')} not shown.</p>" if rest else ""
    table = _lanes("Job and nodes over time", "".join(rows))
    axis = _time_axis(report)
    body = f'<ul class="legend">{legend}</ul>{table}{axis}{more}{_attempts(report)}'
    return _section("Timeline", body)


def _looks(found: Sequence[Span], scale: float) -> tuple[Any, ...]:
    """Return a key that is equal for lanes that look almost the same."""
    return tuple(
        (span.kind, round(span.began * scale / 20), round(span.ended * scale / 20)) for span in found
    )


def _bars(found: Iterable[Span], scale: float, height: int) -> str:
    return "".join(
        f'<rect class="k-{span.kind}" x="{span.began * scale:.1f}" y="0" '
        f'width="{max(1.0, span.seconds * scale):.1f}" height="{height}"/>'
        for span in found
    )


def _lane(name: str, found: Sequence[Span], scale: float) -> str:
    words = "; ".join(f"{_span(span.began)}: {ALL_KINDS[span.kind]}" for span in found[:40])
    return _row(name, _drawing(f"{plain(name)}: {words}", 16, _bars(found, scale, 16)))


def _row(name: str, svg: str) -> str:
    return f'<tr><th scope="row">{plain(name)}</th><td>{svg}</td></tr>'


def _axis(*ticks: str) -> str:
    return f'<div class="axis" aria-hidden="true">{"".join(f"<span>{tick}</span>" for tick in ticks)}</div>'


def _time_axis(report: Report) -> str:
    return _axis(*(_span(report.seconds * part / 4) for part in range(5)))


def _attempts(report: Report) -> str:
    """Return the table of attempts, or "" if there was only one."""
    if len(report.attempts) < 2:
        return ""
    rows = [
        (
            each.number,
            "-" if each.started is None else _span(each.started),
            "-" if each.ended is None else _span(each.ended),
            plain(", ".join(each.nodes), 200),
            plain(each.cause, 300),
        )
        for each in report.attempts
    ]
    return _table("Attempts", ("attempt", "started", "ended", "nodes", "why it ended"), rows, (1, 2))


def _uses(report: Report) -> str:
    """Return strips of the least busy nodes' resource use, on the scale of the timeline."""
    tables, every = [], len(report.samples) // MAX_POINTS + 1
    for column, name in ((2, "GPU"), (0, "CPU"), (1, "Memory"), (3, "GPU memory")):
        strips: dict[str, list[tuple[float, float]]] = {}
        for sample in report.samples[::every]:
            for label, use in sample.nodes.items():
                if (value := use[column]) is not None:
                    strips.setdefault(label, []).append((sample.at, value))
        if strips:
            most = max(value for strip in strips.values() for _, value in strip) or 1.0
            most = 100.0 if name == "GPU" else most
            shown = sorted(strips, key=lambda label: _mean(strips[label]))[:MAX_LANES]
            rows = "".join(
                _strip(label, name, strip, most, report.seconds, every)
                for label, strip in strips.items()
                if label in shown
            )
            hidden = len(strips) - len(shown)
            rest = f"; {counted(hidden, 'more node')} not shown" if hidden else ""
            title = f"{name} (full height: {_used(name, most)}{rest})"
            tables.append(f"<h3>{title}</h3>{_lanes(f'{name} usage of nodes over time', rows)}")
    axis = _time_axis(report)
    return _section("Use of nodes", "".join(f"{table}{axis}" for table in tables))


def _strip(
    label: str, name: str, strip: Sequence[tuple[float, float]], most: float, seconds: float, every: int
) -> str:
    """Return the row of a node. `strip` contains (time, value) of every `every`-th sample."""
    scale, height, path = WIDTH / (seconds or 1.0), 24, ""
    for (at, value), (following, _) in zip(strip, [*strip[1:], (seconds, 0.0)], strict=True):
        most_s = 1.5 * every * max(SAMPLE_S, SAMPLE_SHARE * at)  # a node may have been lost for a while
        end = min(following, at + most_s)
        top = height - value / most * height
        path += f"M{at * scale:.1f} {height}V{top:.1f}H{max(at, end) * scale:.1f}V{height}z"
    peak = _used(name, max(value for _, value in strip))
    words = f"{plain(label)}: {name} {_used(name, _mean(strip))} on average, at most {peak}"
    return _row(label, _drawing(words, height, f'<path class="e-use" d="{path}"/>'))


def _mean(strip: Sequence[tuple[float, float]]) -> float:
    return sum(value for _, value in strip) / len(strip)


def _used(name: str, value: float) -> str:
    return f"{value:.0f}%" if name in ("CPU", "GPU") else _size(int(value))


def _ripple(report: Report) -> str:
    """Show when and how the ranks ended after the first failure: a drawing, and a row for each kind."""
    ends = report.ripple()
    if len(ends) < 2:
        return ""
    first, last = min(0.0, *(each.after_s for each in ends)), max(each.after_s for each in ends)
    height = min(240.0, max(48.0, 3.0 * len(ends)))
    scale, step = (WIDTH - 4) / ((last - first) or 1.0), height / len(ends)
    groups: dict[str, list[tuple[int, End]]] = {}
    for number, each in enumerate(ends):
        groups.setdefault(_end_kind(each), []).append((number, each))
    drawn, rows = [], []
    for kind, group in groups.items():
        after = [each.after_s for _, each in group]
        path = "".join(
            f"M{(each.after_s - first) * scale:.0f} {number * step:.1f}h4v{max(1.0, step):.1f}h-4z"
            for number, each in group
        )
        drawn.append(f'<path class="{_class(kind)}" d="{path}"/>')
        ranks = plain(rank_list([each.rank for _, each in group]), 300)
        how = plain("; ".join(dict.fromkeys(each.how for _, each in group)), 300)
        rows.append((_key(_class(kind)) + kind, f"{min(after):.3f} s", f"{max(after):.3f} s", ranks, how))
    what = "When each rank ended after the first failure: ranks from top to bottom, time from left to right"
    axis = _axis(*(f"{first + (last - first) * part / 4:.2f} s" for part in range(5)))
    table = _table("Ends of ranks", ("end", "first", "last", "ranks", "how"), rows, (1, 2))
    svg = _drawing(what, height, "".join(drawn), "ripple")
    return _section("After the first failure", f"{svg}{axis}{table}")


def _end_kind(end: End) -> str:
    """Return the key in `_ENDS` for how a rank ended."""
    word = "root cause" if end.first else end.how.split(" ")[0]
    return word if word in _ENDS else "failed"


# Ranks


def _output(report: Report) -> str:
    """Return a bar chart of the number of bytes printed by each rank."""
    volume, ranks = report.volume, report.state.workers if report.state else ()
    most = max(volume.values(), default=0)
    if not most:
        return ""
    count = max(len(ranks), max(volume) + 1)
    step, height = WIDTH / count, 80
    path = "".join(
        f"M{rank * step:.1f} {height}V{height - size / most * height:.1f}h{step * 0.8:.2f}V{height}z"
        for rank, size in sorted(volume.items())
    )
    what = f"Bytes printed by each rank, at most {_size(most)}"
    svg = _drawing(what, height, f'<path class="e-volume" d="{path}"/>')
    over = " in all attempts" if len(report.attempts) > 1 else ""
    silent = [worker.rank for worker in ranks if not volume[worker.rank]]
    nothing = f"; nothing by {plain(rank_list(silent), 300)}" if silent else ""
    words = f"{_size(sum(volume.values()))} printed{over}; most by rank {max(volume, key=volume.__getitem__)}"
    axis = _axis("rank 0", f"rank {count - 1}")
    return _section("Output", f"{svg}{axis}<p>{words}: {_size(most)}{nothing}.</p>")


def _ranks(report: Report) -> str:
    """Return the table of ranks, folded if there are many."""
    rows = report.rows()
    if not rows:
        return ""
    heads = ["rank", "printed", "last output", *_USE] if report.uses else ["rank", "printed", "last output"]
    ends = {end.rank: end.how for end in report.ripple()} if report.explanation.summary else {}
    table = _table(
        "Ranks",
        (*heads, "node", "state"),
        [_rank_cells(report, row, ends.get(row.rank, "")) for row in rows[:MAX_ROWS]],
        range(len(heads)),
    )
    note = "<p>CPU, GPU and memory use are the last values that were measured.</p>" if report.uses else ""
    rest = f"<p>{counted(len(rows) - MAX_ROWS, 'more rank')} not shown.</p>" if len(rows) > MAX_ROWS else ""
    marked = plain(spans(sorted(row.rank for row in rows if stands_out(row))), 200)
    words = counted(len(rows), "rank") + (f"; conspicuous: {marked}" if marked else "")
    folded = _folded(words, table + rest, len(rows) <= FOLDED)
    return _section("Ranks", folded + note)


_USE = ("CPU", "memory", "GPU", "GPU memory")


def _rank_cells(report: Report, row: Row, end: str) -> list[Any]:
    """Return the cells of a rank; `end` is how it ended, or ""."""
    state = plain(end or ", ".join(dict.fromkeys([row.doing, *row.marks])))
    flag = ' class="mark"' if stands_out(row) else ""
    when = "before the end" if report.run.status.state.over else "ago"
    age = "-" if row.age_s is None else f"{_span(row.age_s)} {when}"
    use: list[Any] = [*(row.use or [None] * 4)] if report.uses else []
    used = ["-" if value is None else _used(name, value) for name, value in zip(_USE, use, strict=False)]
    size = _size(report.volume[row.rank])
    return [row.rank, size, age, *used, plain(row.node), f"<span{flag}>{state}</span>"]


def _tails(report: Report) -> str:
    parts: list[str] = []
    for rank, streams in report.tails.items():
        for stream, lines in streams.items():
            parts.append(_folded(f"rank {rank}, {stream}", _pre(lines), len(parts) < 2))
    return _section("Last output", "".join(parts))


def _messages(report: Report) -> str:
    shown = report.history[-MAX_MESSAGES:]
    rows = [(_span(at), message.level, plain(message.text, 1000)) for at, message in shown]
    table = _table("Messages", ("time", "level", "message"), rows, (0,)) if rows else ""
    return _section("Messages", _folded(counted(len(report.history), "message"), table, len(rows) <= FOLDED))


# What ran


def _code(report: Report) -> str:
    """Return the facts about what ran: code, backend, interpreters, versions and controller."""
    state, status = report.state, report.run.status
    if state is None:
        return ""
    tree, plan, facts = state.spec.tree, state.plan, [("job file", status.file or "none")]
    facts.append(("code", tree.words if tree else "as it was on the nodes"))
    if plan:
        facts += [("backend", plan.backend), ("rendezvous", plan.meeting_place)]
        for python, group in groupby(plan.nodes, key=lambda part: part.python):
            facts.append(("Python", f"{python} on {listed([part.label for part in group])}"))
    facts += report.versions()
    facts.append(("controller", f"process {status.controller.pid} on {status.controller.host}"))
    return _section("Versions and code", _facts(facts))


def _plan(report: Report) -> str:
    """Return the plan of the last attempt, with the command and variables of rank 0."""
    if report.state is None or (plan := report.state.plan) is None:
        return ""
    rows = [
        (
            part.node_rank,
            plain(part.label),
            spans(part.ranks),
            part.reach.name,
            part.gpus,
            plain(part.program.workdir),
        )
        for part in plan.nodes[:MAX_ROWS]
    ]
    heads = ("node rank", "node", "ranks", "transport", "GPUs", "directory")
    table = _table("Nodes", heads, rows, (0, 4))
    parts = [_folded(plain(plan.size_words), table, len(rows) <= FOLDED)]
    try:
        recorded = document_in(report.run.directory, file_of(report.state.attempt, "plan.json"))
        worker = recorded["nodes"][0]["workers"][0]
        lines = [
            f"{name}={'(not recorded)' if value is None else value}" for name, value in worker["env"].items()
        ]
        parts.append(_folded("Command and variables of rank 0", _pre([" ".join(worker["argv"]), "", *lines])))
    except (KeyError, IndexError, TypeError, AttributeError):
        pass  # no attempt has started, or the file is damaged
    return _section("Plan", "".join(parts))


# Words


def _class(end: str) -> str:
    return f"e-{end.replace(' ', '-')}"


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{minutes} min {seconds % 60:.0f} s" if seconds < 7200 else f"{hours} h {minutes % 60} min"


def _size(size: int) -> str:
    return f"{size} B" if size < 1024 else size_words(size)


_ENDS = ("root cause", "failed", "stopped", "finished")
"""How ranks ended."""
SECTIONS = (
    *(_verdict, _ledger, _timeline, _uses, _ripple, _output),
    *(_ranks, _tails, _messages, _code, _plan),
)
"""The sections of the page. Each function returns its section, or "" if the report has nothing for it."""
