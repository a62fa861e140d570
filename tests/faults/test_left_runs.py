"""Faults of runs whose command has left: their controller dies, their disk is full."""

import json
import os
import signal
import time
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.cluster.hosts import parent_of
from tests.faults.conftest import Figures, Pace
from tests.faults.scenes import CPU, ONE, RANKS, SLEEPER, STUBBORN, on_hosts, stop_after, worker
from tests.faults.test_controller import MEETS
from tests.faults.test_logs import small_disk
from tests.harness import PATIENCE_S, Held, cookie_holders, distlaunch, held, kill, write_job
from tests.process.test_runs import beside

LOST, INTERRUPTED, AT_ONCE_S = 71, 130, 5.0


class Left:
    """A run that was left, of `ranks` that say `ready RANK PID`."""

    def __init__(self, job: Path, *words: str, ranks: int = RANKS) -> None:
        self.folder = job.parent
        done = distlaunch("run", "-d", str(job), *words, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()
        follow = beside(self.folder, "logs", "-f", self.id)
        try:
            self.pids = follow.wait_ready(ranks)
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


@pytest.fixture(params=["here", "hosts"])
def where(request: pytest.FixtureRequest) -> str:
    """The job file's lines that say where its ranks run."""
    return CPU if request.param == "here" else on_hosts(request.getfixturevalue("bed"))


@pytest.mark.fault(24, "the controller of a run that was left is killed with SIGKILL", promise="3")
def test_controller_of_a_left_run_killed(tmp_path: Path, where: str, figures: Figures, pace: Pace) -> None:
    left = Left(write_job(tmp_path, STUBBORN, where), *stop_after(pace.stop_s))
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
def test_controller_of_a_left_run_terminated(tmp_path: Path, where: str, figures: Figures) -> None:
    left = Left(write_job(tmp_path, SLEEPER, where))
    with held(left.family()) as processes:
        began = time.monotonic()
        kill(left.controller, signal.SIGTERM)
        assert left.does("wait").returncode == 128 + signal.SIGTERM
        figures("the run ended", time.monotonic() - began, at_most=AT_ONCE_S)
        left.all_gone(processes, began, figures, AT_ONCE_S)
    assert left.ps()["state"] == "CANCELLED"


@pytest.mark.fault(20, "an agent of a run that was left is killed with SIGKILL", promise="4")
def test_agent_of_a_left_run_killed(tmp_path: Path, where: str, figures: Figures) -> None:
    left = Left(write_job(tmp_path, SLEEPER, where))
    with held(left.family()) as processes:
        kill(parent_of(left.pids[1]))
        left.all_gone(processes, time.monotonic(), figures, 2.0)
    assert left.does("wait").returncode == LOST
    assert left.ps()["state"] == "FAILED"


@pytest.mark.fault(21, "a guardian of a run that was left is killed with SIGKILL", promise="4")
def test_guardian_of_a_left_run_killed(tmp_path: Path, where: str, figures: Figures, pace: Pace) -> None:
    left = Left(write_job(tmp_path, STUBBORN, where), *stop_after(pace.stop_s))
    with held(left.family()) as processes:
        kill(parent_of(parent_of(left.pids[1])))
        left.all_gone(processes, time.monotonic(), figures, pace.stop_s + 2.0)
    assert left.does("wait").returncode == LOST


@pytest.mark.fault(25, "the controller of a run that was left is stopped by SIGSTOP", promise="5")
def test_controller_of_a_left_run_stopped(tmp_path: Path, where: str, figures: Figures, pace: Pace) -> None:
    timeouts = f"timeouts: {json.dumps(pace.keys)}\n"
    left = Left(write_job(tmp_path, STUBBORN, where + timeouts))
    controller = left.controller
    with held(left.pids.values()) as processes:
        began = time.monotonic()
        kill(controller, signal.SIGSTOP)
        left.all_gone(processes, began, figures, pace.lease_s + pace.stop_s + 2.0)
    kill(controller, signal.SIGCONT)
    assert left.does("wait").returncode == LOST


@pytest.mark.fault(27, "the controller of a run that was left gets SIGHUP", promise="7")
def test_hangup_of_a_left_run(tmp_path: Path, where: str, figures: Figures) -> None:
    """It goes on; the ranks end with 0, each by a signal of its own that comes after the SIGHUP."""
    leaves = worker(first="signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))")
    left = Left(write_job(tmp_path, leaves, where))
    kill(left.controller, signal.SIGHUP)
    assert left.ps()["state"] == "RUNNING"
    for pid in left.pids.values():
        kill(pid, signal.SIGUSR1)
    done = left.does("wait")
    figures("the status of the run", done.returncode, at_most=0, unit="")


@pytest.mark.fault(28, "stop, of a run that was left, with ranks that ignore SIGTERM", promise="7")
@pytest.mark.parametrize("phase", ["joining", "training", "stopping"])
@pytest.mark.parametrize("now", [False, True])
def test_a_left_run_stopped(tmp_path: Path, figures: Figures, pace: Pace, phase: str, now: bool) -> None:
    """One Ctrl-C's grace, or two presses' none."""
    grace_s = 60.0 if now else pace.stop_s
    if phase == "training":
        os.mkfifo(tmp_path / "gate")
        left = Left(write_job(tmp_path, MEETS, f"{ONE}procs_per_node: 2\n"), *stop_after(grace_s), ranks=2)
    else:
        left = Left(write_job(tmp_path, STUBBORN, CPU), *stop_after(grace_s))
    failed = phase == "stopping"
    with held(left.family()) as processes:
        if failed:
            kill(left.pids.pop(3))
        began = time.monotonic()
        done = left.does("stop", "--now") if now else left.does("stop")
        left.all_gone(processes, began, figures, 2.0 + (0.0 if now else grace_s))
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    status = left.does("wait").returncode
    assert status == INTERRUPTED or (failed and status == 128 + signal.SIGKILL), done.stderr


@pytest.mark.fault(29, "`attach | head -1`: a run that was left goes on", promise="7")
def test_readers_of_a_left_run_leave(tmp_path: Path, figures: Figures) -> None:
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
