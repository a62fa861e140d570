"""The fault table: which fault, which promise, what was measured, what the limit is."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.harness import ROOT

FOLDER = Path(os.environ.get("DISTLAUNCH_REPORTS", ROOT / "reports"))
"""Where the table is kept: `faults.md` and `faults.json`."""


class Row(NamedTuple):
    """One figure of one fault. `limit` None = there is none, the figure is only recorded."""

    fault: int
    name: str
    promise: str
    what: str
    value: float
    limit: float | None
    unit: str
    outcome: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        limit = "" if self.limit is None else f"{self.limit:g} {self.unit}"
        value = f"{self.value:.3g} {self.unit}".strip()
        return (str(self.fault), self.name, self.promise, self.what, value, limit.strip(), self.outcome)


HEAD = ("fault", "what was done", "promise", "measured", "figure", "limit", "result")


def table(rows: Iterable[Row]) -> str:
    """The rows as Markdown, by fault."""
    cells = [HEAD, *(row.cells for row in sorted(rows, key=lambda row: row.fault))]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"
