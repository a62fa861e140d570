"""Faults of runs whose command has left: their controller dies, their disk is full."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Figures, Pace
from tests.faults.scenes import CPU, RANKS, SLEEPER, STUBBORN, on_hosts, stop_after
from tests.faults.test_logs import small_disk
from tests.harness import PATIENCE_S, distlaunch, held, kill, write_job
from tests.process.test_runs import beside

LOST, AT_ONCE_S = 71, 5.0


class Left:
    """A run that was left, of RANKS ranks that say `ready RANK PID`."""

    def __init__(self, job: Path, *words: str) -> None:
        self.folder = job.parent
        done = distlaunch("run", "-d", str(job), *words, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()
        follow = beside(self.folder, "logs", "-f", self.id)
        try:
            self.pids = list(follow.wait_ready(RANKS).values())
        finally:
            follow.kill()

    def ps(self, place: str = ".") -> dict[str, Any]:
        done = distlaunch("ps", "-a", place, "--json", cwd=self.folder)
        (run,) = json.loads(done.stdout)
        return dict(run)


@pytest.fixture(params=["here", "hosts"])
def where(request: pytest.FixtureRequest) -> str:
    """The job file's lines that say where its ranks run."""
    return CPU if request.param == "here" else on_hosts(request.getfixturevalue("bed"))


@pytest.mark.fault(24, "the controller of a run that was left is killed with SIGKILL", promise="3")
def test_controller_of_a_left_run_killed(tmp_path: Path, where: str, figures: Figures, pace: Pace) -> None:
    left = Left(write_job(tmp_path, STUBBORN, where), *stop_after(pace.stop_s))
    controller = left.ps()["controller"]["pid"]
    with held(left.pids) as processes:
        began = time.monotonic()
        kill(controller)
        lost = left.ps()
        figures("ps says so", time.monotonic() - began, at_most=AT_ONCE_S)
        assert (lost["state"], f"process {controller}" in lost["why"]) == ("LOST", True)
        processes.wait_ends(left.pids, began + PATIENCE_S)
        figures("all ranks gone", time.monotonic() - began, at_most=pace.stop_s + 2.0)
    assert distlaunch("wait", left.id, cwd=tmp_path).returncode == LOST


@pytest.mark.fault(26, "the controller of a run that was left gets SIGTERM", promise="3")
def test_controller_of_a_left_run_terminated(tmp_path: Path, where: str, figures: Figures) -> None:
    left = Left(write_job(tmp_path, SLEEPER, where))
    with held(left.pids) as processes:
        began = time.monotonic()
        kill(left.ps()["controller"]["pid"], signal.SIGTERM)
        assert distlaunch("wait", left.id, cwd=tmp_path).returncode == 128 + signal.SIGTERM
        figures("the run ended", time.monotonic() - began, at_most=AT_ONCE_S)
        processes.wait_ends(left.pids, began + PATIENCE_S)
    assert left.ps()["state"] == "CANCELLED"


@pytest.mark.fault(32, "the disk of a run that was left is full", promise="10")
def test_disk_of_a_left_run_full(tmp_path: Path, figures: Figures) -> None:
    """What `ps` has said stays true, and the end is known, though nothing else of it could be kept."""
    worker = """
        import os, sys, time
        os.write(1, b"ready %s %d\\n" % (os.environ["RANK"].encode(), os.getpid()))
        while not os.path.exists("gate"):
            time.sleep(0.05)
        for _ in range(100):
            os.write(1, b"." * 9999 + b"\\n")
        sys.exit(7)
    """
    with small_disk(tmp_path / "small", "size=300k"):
        left = Left(write_job(tmp_path, worker, f"{CPU}logs: {{dir: small}}\n"))
        assert left.ps("small")["state"] == "RUNNING"
        (tmp_path / "gate").touch()
        assert distlaunch("wait", left.id, cwd=tmp_path).returncode == 7
        run = left.ps("small")
        assert (run["state"], run["exit_status"]) == ("FAILED", 7)
        kept = sum(path.stat().st_size for path in (tmp_path / "small").rglob("*") if path.is_file())
        figures("KiB that were kept", kept / 1024, at_most=300, unit="KiB")
        shown = distlaunch("logs", left.id, cwd=tmp_path)
        assert (shown.returncode, "Traceback" in shown.stderr) == (0, False)
