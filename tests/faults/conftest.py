"""Fixtures of the fault catalogue: a pace (shortened or default settings), figures, the table at the end."""

import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.cluster.hosts import Bed
from tests.faults import report
from tests.faults.report import Row
from tests.harness import LateError, on_time

_rows: dict[str, list[Row]] = {}
"""Of each test, those of all its tries, as its report tells them: several processes may run the tests."""
_TOLD = "figures"


class Pace(NamedTuple):
    """The settings under which faults are injected: seconds, and the job-file keys that set them."""

    stop_s: float
    lease_s: float
    keys: dict[str, Any]

    @property
    def fence_s(self) -> float:
        """After so long a lost node is taken to be empty."""
        return self.lease_s + self.stop_s + 5.0


@pytest.fixture(scope="session")
def pace() -> Pace:
    """Shortened settings, or the defaults with FAULT_PACE=default; `pace.keys` are for a job's `timeouts`."""
    if os.environ.get("FAULT_PACE") == "default":
        return Pace(10.0, 30.0, {})
    return Pace(2.0, 6.0, {"stop": "2s", "lease": "6s"})


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that is marked `everywhere` has its hosts by each transport."""
    marked = metafunc.definition.get_closest_marker("everywhere")
    if marked and "bed" in metafunc.fixturenames:
        marks = [pytest.mark.alone] if marked.kwargs.get("alone") == "slurm" else []
        metafunc.parametrize("bed", ["ssh", pytest.param("slurm", marks=marks)], indirect=True)


@pytest.fixture
def bed(request: pytest.FixtureRequest, bed: Bed) -> Bed:
    """Hosts over ssh, or an allocation of Slurm's, in which this test then is."""
    if getattr(request, "param", "ssh") == "ssh":
        return bed
    request.getfixturevalue("allocation")
    slurm: Bed = request.getfixturevalue("slurm")
    return slurm


class Figures:
    """Takes the figures of one fault; each must keep its limit."""

    def __init__(self, fault: int, name: str, promise: str) -> None:
        self._fault, self._name, self._promise = fault, name, promise
        self.rows: list[Row] = []

    def __call__(self, what: str, value: float, at_most: float | None = None, unit: str = "s") -> None:
        """Note that `what` was measured as `value`; fails when it is more than `at_most`."""
        self.rows.append(Row(self._fault, self._name, self._promise, what, value, at_most, unit))
        if at_most is not None and unit in ("s", "ms"):
            on_time(what, value, at_most, unit)
        assert at_most is None or value <= at_most, f"{what}: {value:g} {unit}, over the limit of {at_most:g}"


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Iterator[Figures]:
    """Figures of the fault that the test's marker names: ``@pytest.mark.fault(NUMBER, NAME, promise=N)``."""
    marker = request.node.get_closest_marker("fault")
    assert marker is not None, "a test of the catalogue needs its fault's marker"
    number, name = marker.args
    if "bed" in request.fixturenames and "launcher" in request.getfixturevalue("bed").launcher:
        name += ", over Slurm"
    noted = Figures(number, name, str(marker.kwargs.get("promise", "")))
    yield noted
    outcome = request.node.stash.get(_OUTCOME, "kept")
    assert noted.rows or outcome != "kept", "a test of the catalogue notes a figure"
    rows = [row._replace(outcome=outcome)._asdict() for row in noted.rows]
    request.node.user_properties.append((_TOLD, rows))


_OUTCOME = pytest.StashKey[str]()
"""What a test came to: kept, FAILED, or late: then it is tried again, and has rows for each try."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    made = yield
    if call.when == "call":
        late = call.excinfo is not None and call.excinfo.errisinstance(LateError)
        failed = call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception)
        item.stash[_OUTCOME] = "late" if late else "FAILED" if failed else "kept"
    return made


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Take the figures of a test that is over; a try has its own and those of the tries before."""
    properties: list[tuple[str, Any]] = list(report.user_properties)
    told = [row for name, rows in properties if name == _TOLD for row in rows]
    if report.when == "teardown" and told:
        _rows[report.nodeid] = [Row(**row) for row in told]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Keep the table, and print it, but not between failures and whoever reads them."""
    rows = [row for each in _rows.values() for row in each]
    if not rows:
        return
    text = report.table(rows)
    report.FOLDER.mkdir(parents=True, exist_ok=True)
    (report.FOLDER / "faults.md").write_text(text)
    (report.FOLDER / "faults.json").write_text(json.dumps([row._asdict() for row in rows], indent=1))
    terminalreporter.section("fault catalogue")
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"{len(rows)} rows in {report.FOLDER / 'faults.md'}")
    else:
        terminalreporter.write(text)
