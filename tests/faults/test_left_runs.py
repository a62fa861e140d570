"""Faults of runs that were left: their controller dies, their disk is full."""

import json
import signal
import time
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.cluster.hosts import parent_of
from tests.faults.disks import small_disk
from tests.faults.figures import Figures, Pace
from tests.faults.scenes import (
    CPU,
    LEAVES,
    RANKS,
    SLEEPER,
    STUBBORN,
    stop_after,
    worker,
)
from tests.harness import PATIENCE_S, Held, cookie_holders, distlaunch, held, kill, write_job
from tests.process.test_runs import beside

LOST, INTERRUPTED, AT_ONCE_S = 71, 130, 5.0


class Left:
    """A run that was left, whose ranks say `ready RANK PID`."""

    def __init__(self, job: Path, *words: str) -> None:
        self.folder = job.parent
        done = distlaunch("run", "-d", str(job), *words, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()
        follow = beside(self.folder, "logs", "-f", self.id)
        try:
            self.pids = follow.wait_ready(RANKS)
        finally:
            follow.kill()

    @property
    def controller(self) -> int:
        """Its PID."""
        return int(self.ps()["controller"]["pid"])

    def does(self, *words: str) -> CompletedProcess[str]:
        """One of the commands about it, `words` and its id."""
        return distlaunch(*words, self.id, cwd=self.folder)

    def family(self) -> set[int]:
        """Its ranks, agents, guardians and controller, as they are now."""
        agents = {parent_of(pid) for pid in self.pids.values()}
        return {*self.pids.values(), *agents, *map(parent_of, agents), self.controller}

    def all_gone(self, processes: Held, began: float, figures: Figures, within_s: float) -> None:
        """Its ranks are, in time since `began`, and then all else."""
        processes.wait_ends(self.pids.values(), began + PATIENCE_S)
        figures("all ranks gone", time.monotonic() - began, at_most=within_s)
        processes.wait_ends(processes.pids, began + within_s + AT_ONCE_S)
        assert cookie_holders(self.id) == []

    def ps(self, place: str = ".") -> dict[str, Any]:
        done = distlaunch("ps", "-a", place, "--json", cwd=self.folder)
        (run,) = json.loads(done.stdout)
        return dict(run)


@pytest.mark.fault(24, "the controller of a run that was left is killed with SIGKILL", promise="3")
def test_ranks_end_when_the_controller_is_killed(tmp_path: Path, figures: Figures, pace: Pace) -> None:
    left = Left(write_job(tmp_path, STUBBORN, CPU), *stop_after(pace.stop_s))
    controller = left.controller
    with held(left.family()) as processes:
        began = time.monotonic()
        kill(controller)
        processes.wait_ends([controller], began + PATIENCE_S)
        lost = left.ps()
        figures("ps says so", time.monotonic() - began, at_most=AT_ONCE_S)
        assert (lost["state"], f"process {controller}" in lost["why"]) == ("LOST", True)
        left.all_gone(processes, began, figures, pace.stop_s + 2.0)
    assert left.does("wait").returncode == LOST


@pytest.mark.fault(26, "the controller of a run that was left gets SIGTERM", promise="3")
def test_the_run_ends_when_the_controller_is_terminated(tmp_path: Path, figures: Figures) -> None:
    left = Left(write_job(tmp_path, SLEEPER, CPU))
    with held(left.family()) as processes:
        began = time.monotonic()
        kill(left.controller, signal.SIGTERM)
        assert left.does("wait").returncode == 128 + signal.SIGTERM
        figures("the run ended", time.monotonic() - began, at_most=AT_ONCE_S)
        left.all_gone(processes, began, figures, AT_ONCE_S)
    assert left.ps()["state"] == "CANCELLED"


@pytest.mark.fault(27, "the controller of a run that was left gets SIGHUP", promise="7")
def test_the_run_goes_on_when_the_controller_gets_sighup(tmp_path: Path, figures: Figures) -> None:
    """The ranks end with 0, each by a signal of its own that comes after the SIGHUP."""
    left = Left(write_job(tmp_path, LEAVES, CPU))
    kill(left.controller, signal.SIGHUP)
    assert left.ps()["state"] == "RUNNING"
    for pid in left.pids.values():
        kill(pid, signal.SIGUSR1)
    done = left.does("wait")
    figures("the status of the run", done.returncode, at_most=0, unit="")


@pytest.mark.fault(28, "stop, of a run that was left, with ranks that ignore SIGTERM", promise="7")
@pytest.mark.parametrize(("words", "grace_s", "within_s"), [((), 2.0, 4.0), (("--now",), 60.0, 2.0)])
def test_stop_ends_a_run_that_was_left(
    tmp_path: Path, figures: Figures, words: tuple[str, ...], grace_s: float, within_s: float
) -> None:
    """One Ctrl-C's grace, or two presses' none."""
    left = Left(write_job(tmp_path, STUBBORN, CPU), *stop_after(grace_s))
    with held(left.family()) as processes:
        began = time.monotonic()
        done = left.does("stop", *words)
        left.all_gone(processes, began, figures, within_s)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert left.does("wait").returncode == INTERRUPTED


@pytest.mark.fault(29, "`attach | head -1`: a run that was left goes on", promise="7")
def test_goes_on_when_its_readers_leave(tmp_path: Path, figures: Figures) -> None:
    prints = worker(
        "while True: os.write(1, b'more' * 20 + b'\\n'); select.select([], [], [], 0.001)", "import select"
    )
    left = Left(write_job(tmp_path, prints, CPU))
    for words in (("attach",), ("logs", "-f")):
        follow = beside(tmp_path, *words, left.id)
        follow.wait_for("more")
        assert follow.process.stdout
        follow.process.stdout.close()
        began = time.monotonic()
        assert follow.process.wait(PATIENCE_S) in (0, 141, -signal.SIGPIPE)
        figures(f"{words[0]} ended", time.monotonic() - began, at_most=AT_ONCE_S)
        follow.kill()
    assert left.ps()["state"] == "RUNNING"
    assert left.does("stop", "--now").returncode == 0


@pytest.mark.fault(32, "the disk of a run that was left is full", promise="10")
def test_its_end_is_known_although_its_disk_is_full(tmp_path: Path, figures: Figures) -> None:
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
