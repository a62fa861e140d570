"""Tests that are tried again, in a run of pytest with several processes."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.harness import ROOT, TORCHS_ABORT, TorchsAbortError, completed, distlaunch, ended_well, write_job
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
    argv += [
        "--basetemp",
        str(directory / "own"),
    ]  # else it spends minutes on removing earlier ones
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
def test_lists_late_tries_of_all_processes_and_too_many_are_a_failure(
    tmp_path: Path, late: int, status: int
) -> None:
    done = pytest_of(tmp_path, LATE_5.replace("range(4)", f"range({late})"))
    assert done.returncode == status, done.stdout
    told = {f"test_late[{i}]: tests.harness.LateError: {i}: over the limit" for i in range(late)}
    told |= {"test_aborted: tests.harness.TorchsAbortError: by torch"}
    assert {f"test_them.py::{line}" for line in told} <= set(done.stdout.splitlines())
    assert f"{late + 1} passed, {late + 1} rerun" in done.stdout
    count = f"{late + 1} tries were late or failed by others' faults, of at most {MOST_TRIES}"
    assert count in done.stdout


def test_fails_when_late_each_time_or_aborted_elsewhere_or_marked_once(tmp_path: Path) -> None:
    done = pytest_of(tmp_path, FAILING)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "3 failed, 2 rerun" in done.stdout
    assert done.stdout.count("\ntest_them.py::test_late_each_time: ") == 2


ABORTS = """
    import os
    print("begun" if {early} else "the sum is 1", flush=True)
    os.write(2, b"{words}\\n")
    os.abort()
"""


@pytest.mark.parametrize(
    ("early", "words", "torchs"),
    [(False, TORCHS_ABORT, True), (True, TORCHS_ABORT, False), (False, "free(): invalid pointer", False)],
    ids=["at its end", "before its last line", "by something else"],
)
def test_only_an_abort_at_a_workers_end_counts_as_torchs(
    tmp_path: Path, early: bool, words: str, torchs: bool
) -> None:
    job = write_job(tmp_path, ABORTS.format(early=early, words=words), "gpus_per_node: 0\n")
    done = distlaunch("run", str(job))
    with pytest.raises(AssertionError) as caught:
        ended_well(done.returncode, done.stdout, done.stderr, last="the sum is 1\n")
    assert (caught.type is TorchsAbortError) == torchs


def test_a_job_that_exits_with_0_without_its_last_line_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="was not printed"):
        ended_well(0, "begun\n", "", last="the sum is 1\n")
