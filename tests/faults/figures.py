"""The figures of the fault catalog: the pace of the faults, what was measured, and the table of all."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness import ROOT, on_time

DIRECTORY = Path(os.environ.get("DISTLAUNCH_REPORTS", ROOT / "reports"))
"""Where the table is kept, as `faults.md`."""


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


def fault(number: int, name: str, promise: str, *values: Any, alone: bool = False) -> Any:
    """A row of a table of faults of the catalog: the values of its test's parameters."""
    marks = [pytest.mark.fault(number, name, promise=promise), *([pytest.mark.alone] if alone else [])]
    return pytest.param(*values, id=name, marks=marks)


class Pace(NamedTuple):
    """The settings under which faults are injected: seconds, and the job-file keys that set them."""

    stop_s: float
    lease_s: float
    keys: dict[str, Any]

    @property
    def fence_s(self) -> float:
        """After so long a lost node is taken to be empty."""
        return self.lease_s + self.stop_s + 5.0


class Figures:
    """Takes the figures of one fault; each must keep its limit."""

    def __init__(self, fault: int, name: str, promise: str) -> None:
        self._fault, self._name, self._promise = fault, name, promise
        self.rows: list[Row] = []

    def __call__(self, what: str, value: float, at_most: float | None = None, unit: str = "s") -> None:
        """Note that `what` was measured as `value`; fails when it is more than `at_most`."""
        self.rows.append(Row(self._fault, self._name, self._promise, what, value, at_most, unit))
        if at_most is not None and unit == "s":
            on_time(what, value, at_most)
        elif at_most is not None:
            assert value <= at_most, f"{what}: {value:g} {unit}, over the limit of {at_most:g}"


def table(rows: Iterable[Row]) -> str:
    """The rows as Markdown, by fault."""
    head = ("fault", "what was done", "promise", "measured", "figure", "limit", "result")
    return markdown(head, (row.cells for row in sorted(rows, key=lambda row: row.fault)))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    cells = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)
