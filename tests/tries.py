"""Which tests are tried again, and how that is told: a plug-in of pytest, loaded by tests/conftest.py."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness import TRIED_AGAIN

MOST_TRIES = 5
"""In a whole run, over all processes that run tests."""
TRIES_OF_A_TEST = 3
UNIT = Path(__file__).parent / "unit"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The machine may stand still for a second: only who is late three times in a row has failed.

    Nothing else is tried again, but for two faults of others (`TRIED_AGAIN`); and a test that is marked
    `once` is not, because a second try would hide what it measures. Unit tests start no process: none can be
    late, and with several processes the plug-in asks 40 ms of each that is marked.
    """
    again = pytest.mark.flaky(reruns=TRIES_OF_A_TEST - 1, only_rerun=[*TRIED_AGAIN])
    for item in items:
        if not item.get_closest_marker("once") and UNIT not in item.path.parents:
            item.add_marker(again)


def _tried_again(config: pytest.Config) -> list[pytest.TestReport]:
    """Those of all processes are reported to the one that has a terminal."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    return list(reporter.stats.get("rerun", ())) if reporter else []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What was tried again: what is late now and then is the machine, what often is, is ours."""
    if tries := _tried_again(config):
        terminalreporter.section("tried again")
        for report in tries:
            terminalreporter.write_line(f"{report.nodeid}: {_why(report)}")
        terminalreporter.write_line(
            f"{len(tries)} tries were late or failed by others' faults, of at most {MOST_TRIES}"
        )


def _why(report: pytest.TestReport) -> str:
    """The error in one line, without the values of its expression."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash else report.longreprtext).partition("\nassert ")[0]
    return "; ".join(text.splitlines())[:600]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """More tries than may be are a failure."""
    if len(_tried_again(session.config)) > MOST_TRIES:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
