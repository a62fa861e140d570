"""Fixtures of the fault catalog: a pace (shortened or default settings), figures, the table at the end."""

import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from tests.cluster.hosts import Bed
from tests.faults.figures import DIRECTORY, Figures, Pace, Row, table
from tests.faults.scenes import CPU, on_hosts
from tests.harness import LateError

_rows: dict[str, list[Row]] = {}
"""Of each test, those of all its tries, as its report tells them: several processes may run the tests."""
_TOLD = "figures"
_BY = {"ssh": ", over ssh", "slurm": ", over Slurm"}


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


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> str:
    """The part of a job file for four ranks `here`, on hosts over `ssh`, or in an allocation of `slurm`."""
    if request.param == "here":
        return CPU
    if request.param == "slurm":
        request.getfixturevalue("allocation")
    return on_hosts(request.getfixturevalue("slurm" if request.param == "slurm" else "bed"))


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Iterator[Figures]:
    """Figures of the fault that the test's marker names: ``@pytest.mark.fault(NUMBER, NAME, promise=N)``."""
    marker = request.node.get_closest_marker("fault")
    assert marker is not None, "a test of the catalog needs its fault's marker"
    number, name = marker.args
    params: dict[str, Any] = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    by = _BY.get(params.get("bed") or params.get("nodes") or "", "")
    noted = Figures(number, name + by, str(marker.kwargs.get("promise", "")))
    yield noted
    outcome = request.node.stash.get(_OUTCOME, "skipped")
    assert noted.rows or outcome != "kept", "a test of the catalog notes a figure"
    rows = [row._replace(outcome=outcome)._asdict() for row in noted.rows]
    request.node.user_properties.append((_TOLD, rows))


_OUTCOME = pytest.StashKey[str]()
"""What a test came to: kept, skipped, FAILED, or late: then it is tried again, and has rows for each try."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    made = yield
    if call.when == "call":
        late = call.excinfo is not None and call.excinfo.errisinstance(LateError)
        item.stash[_OUTCOME] = (
            "late" if late else {"failed": "FAILED", "passed": "kept"}.get(made.outcome, "skipped")
        )
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
    text = table(rows)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    (DIRECTORY / "faults.md").write_text(text)
    terminalreporter.section("fault catalog")
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"{len(rows)} rows in {DIRECTORY / 'faults.md'}")
    else:
        terminalreporter.write(text)
