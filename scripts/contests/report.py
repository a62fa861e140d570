"""Formats outcomes as a table, a picture, or JSON."""

import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from html import escape

from .contest import Outcome

_ROW, _LEFT, _WIDTH = 18, 230, 480


def table(outcomes: Sequence[Outcome]) -> str:
    """Return medians, spread, and ratios with their limits."""
    lines = []
    for outcome in outcomes:
        lines.append(outcome.contest.title)
        lines += _figures(outcome)
        for row in outcome.document()["ratios"]:
            kept = "kept" if row["ratio"] <= row["at_most"] else "NOT kept"
            limit = f"at most {row['at_most']:.3g}: {kept}"
            lines.append(f"  {row['ours']} ÷ {row['other']} = {row['ratio']:.3g}   ({limit})")
        if outcome.contest.missing:
            lines.append(f"  not installed: {', '.join(outcome.contest.missing)}")
        lines.append("")
    return "\n".join(lines)


def _figures(outcome: Outcome) -> Iterator[str]:
    """Yield the median and spread of each competitor, and whether it is within its limit."""
    timed = outcome.contest.unit == "s"
    scale, unit, digits = (1000, "ms", 0) if timed else (1, outcome.contest.unit, 2)
    limits = dict(zip(outcome.seconds, outcome.contest.limits, strict=False))
    for name, each in outcome.seconds.items():
        low, median, high = (
            f"{scale * value:.{digits}f}" for value in (min(each), statistics.median(each), max(each))
        )
        line = f"  {name:<32} {median:>8} {unit:<3}  ({low} to {high})"
        if name in limits:
            kept = "kept" if statistics.median(each) <= limits[name] else "NOT kept"
            line += f"   (at most {scale * limits[name]:g}: {kept})"
        yield line


def document(outcomes: Sequence[Outcome], runs: int) -> str:
    """Return all figures as JSON, with the machine and the date."""
    machine = {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    made = {"date": time.strftime("%Y-%m-%d"), "runs": runs, "machine": machine}
    return json.dumps({**made, "contests": [each.document() for each in outcomes]}, indent=2) + "\n"


def picture(outcomes: Sequence[Outcome]) -> str:
    """Return a bar chart as SVG. The longest bar of each contest is as wide as the picture."""
    shapes, y = [], 20
    for outcome in outcomes:
        shapes.append(f'<text x="8" y="{y}" font-weight="bold">{escape(outcome.contest.title)}</text>')
        longest = max(outcome.median(name) for name in outcome.seconds)
        for name in outcome.seconds:
            y += _ROW
            width = max(1.0, outcome.median(name) / longest * _WIDTH)
            color = "#4c78a8" if name.startswith(("distlaunch", "with", "stuck", "dry")) else "#bab0ac"
            shapes.append(f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">{escape(name)}</text>')
            shapes.append(f'<rect x="{_LEFT}" y="{y - 11}" width="{width:.0f}" height="13" fill="{color}"/>')
            shown = f"{outcome.median(name) * 1000:,.0f} ms"
            shapes.append(f'<text x="{_LEFT + width + 6:.0f}" y="{y}">{shown}</text>')
        y += 2 * _ROW
    size = f'width="{_LEFT + _WIDTH + 100}" height="{y}"'
    style = 'font-family="sans-serif" font-size="12" fill="#333"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(shapes) + "\n</svg>\n"
