"""Tests that are tried again, in a run of pytest with several processes."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.harness import ROOT, TORCHS_ABORT, TorchsAbortError, completed, ended_well
from tests.tries import MOST_TRIES

LATE = """
    import pytest
    from tests.harness import LateError, TorchsAbortError

    tried = set()

    def once(name, error):
        if name not in tried:
            tried.add(name)
            raise error
"""


def pytest_of(directory: Path, tests: str) -> "subprocess.CompletedProcess[str]":
    """Run these tests in two processes, under our rules."""
    (directory / "test_them.py").write_text(textwrap.dedent(LATE) + textwrap.dedent(tests))
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = once\n")
    argv = [sys.executable, "-m", "pytest", "-p", "tests.tries", "-n2", "-c", "pytest.ini", "test_them.py"]
    argv += ["--basetemp", str(directory / "own")]  # else it spends minutes on removing earlier ones
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    return completed(argv, cwd=directory, env=kept | {"PYTHONPATH": str(ROOT)})


LATE_5 = """
    @pytest.mark.parametrize("number", range(4))
    def test_late(number):
        once(number, LateError(f"{number}: over the limit"))

    def test_aborted():
        once("aborted", TorchsAbortError("by torch"))
"""
FAILING = f"""
    def test_an_abort_that_is_not_torchs():
        once(1, AssertionError({TORCHS_ABORT!r}))

    @pytest.mark.once
    def test_that_measures():
        once(2, LateError("late"))

    def test_late_each_time():
        raise LateError("late")
"""


@pytest.mark.parametrize(("late", "status"), [(4, pytest.ExitCode.OK), (5, pytest.ExitCode.TESTS_FAILED)])
def test_lists_late_tries_of_all_processes_and_limits_them(tmp_path: Path, late: int, status: int) -> None:
    done = pytest_of(tmp_path, LATE_5.replace("range(4)", f"range({late})"))
    assert done.returncode == status, done.stdout
    told = [f"late[{i}]: tests.harness.LateError: {i}: over the limit" for i in range(late)]
    for line in (*told, "aborted: tests.harness.TorchsAbortError: by torch"):
        assert f"\ntest_them.py::test_{line}\n" in done.stdout
    assert f"{late + 1} passed, {late + 1} rerun" in done.stdout
    count = f"{late + 1} tries were late or failed by others' faults, of at most {MOST_TRIES}"
    assert count in done.stdout


def test_fails_when_late_each_time_or_aborted_elsewhere_or_marked_once(tmp_path: Path) -> None:
    done = pytest_of(tmp_path, FAILING)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "3 failed, 2 rerun" in done.stdout
    assert done.stdout.count("\ntest_them.py::test_late_each_time: ") == 2


def test_only_an_abort_at_a_workers_end_counts_as_torchs() -> None:
    last, died = "the sum is 1\n", "\nkilled by signal 6 (SIGABRT)\n"
    with pytest.raises(TorchsAbortError):
        ended_well(134, last, TORCHS_ABORT + died, last)
    for out, words in (("begun\n", TORCHS_ABORT), (last, "free(): invalid pointer")):
        with pytest.raises(AssertionError) as caught:
            ended_well(134, out, words + died, last)
        assert caught.type is AssertionError
    with pytest.raises(AssertionError, match="was not printed"):
        ended_well(0, "begun\n", "", last)
