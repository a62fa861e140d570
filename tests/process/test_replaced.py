"""Runs that end with the code that they began with, although another version is installed meanwhile."""

import contextlib
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ROOT, Going, distlaunch_argv, kill, write_job
from tests.process.commands import SLEEPER, sleeper
from tests.process.torchruns import free_port

FAILS = sleeper("""
    import signal
    def fail(*_):
        raise ConnectionError("Connection closed by peer")
    signal.signal(signal.SIGTERM, fail)
""")


class Installed:
    """A copy of the package, from which commands run until it is replaced."""

    def __init__(self, directory: Path) -> None:
        self.place = directory / "site"
        shutil.copytree(ROOT / "distlaunch", self.place / "distlaunch")

    @contextlib.contextmanager
    def running(self, directory: Path, *words: str, **environ: str) -> Iterator[Going]:
        """A command of the copy that is ended with the block."""
        state = str(directory / "state")
        env = {**os.environ, "PYTHONPATH": str(self.place), "XDG_STATE_HOME": state, **environ}
        run = Going(directory, distlaunch_argv(*words), cwd=directory, env=env)
        try:
            yield run
        finally:
            run.kill()

    def replace(self) -> None:
        """Whatever is imported from now on raises."""
        for path in self.place.rglob("__pycache__"):
            shutil.rmtree(path)
        for path in self.place.rglob("*.py"):
            path.write_text("raise ImportError('another distlaunch')\n")


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    return Installed(tmp_path)


def ended(run: Going, status: int, said: str) -> None:
    assert run.wait() == status, run.stderr
    assert said in run.stderr
    assert "another distlaunch" not in run.stderr


def test_explains_and_restarts_a_rank_that_fails(installed: Installed, tmp_path: Path) -> None:
    keys = "procs_per_node: 2\ntimeouts: {stop: 2s}\nrestarts: {max: 1, backoff: 0s, requeue: 1}"
    with installed.running(tmp_path, "run", str(write_job(tmp_path, FAILS, keys))) as run:
        before = run.wait_ready(2)
        installed.replace()
        kill(before[1])
        run.wait_for("ready", times=4)
        kill(run.worker_pids()[1], signal.SIGTERM)
        ended(run, 1, "rank 1 (")
        assert "already restarted once" in run.stderr


def test_explains_why_torchrun_can_not_start_a_rank_again(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(textwrap.dedent(SLEEPER))
    with installed.running(tmp_path, "torchrun", "--max-restarts=1", "worker.py") as run:
        pids = run.wait_ready(1)
        installed.replace()
        (tmp_path / "worker.py").unlink()
        kill(pids[0])
        ended(run, 127, "could not be started")


def test_tasks_of_exec_show_errors_and_end(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(textwrap.dedent(FAILS))
    task = {"SIZE": "2", "LOCAL_SIZE": "2"}
    words = ["exec", "--", sys.executable, "worker.py"]
    with contextlib.ExitStack() as stack:
        runs = []
        for rank in ("0", "1"):
            mpi = {f"OMPI_COMM_WORLD_{k}": v for k, v in (task | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            task_run = installed.running(tmp_path, *words, PMIX_NAMESPACE=tmp_path.name, **mpi)
            runs.append(stack.enter_context(task_run))
        pids = {rank: pid for run in runs for rank, pid in run.wait_ready(1).items()}
        installed.replace()
        kill(pids[1], signal.SIGTERM)
        for run, said in zip(runs, ("rank 1 (", "ConnectionError"), strict=True):
            ended(run, 1, said)


def test_a_detached_run_restarts(installed: Installed, tmp_path: Path) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    job = str(write_job(tmp_path, SLEEPER, "restarts: {max: 1, backoff: 0s}"))
    with installed.running(tmp_path, "run", "--detach", job) as run:
        assert run.wait() == 0, run.stderr
        installed.replace()
        argv = distlaunch_argv("attach", "--all", run.stdout.strip())
        attached = Going(tmp_path, argv, cwd=ROOT, env=env)
        try:
            for attempt in (1, 2):
                attached.wait_for("ready", times=attempt)
                kill(attached.worker_pids()[0])
            ended(attached, 137, "already restarted once")
        finally:
            attached.kill()


def test_an_interrupted_run_writes_its_summary_as_json(installed: Installed, tmp_path: Path) -> None:
    with installed.running(tmp_path, "run", "--json", str(write_job(tmp_path, SLEEPER))) as run:
        run.wait_for("ready")
        installed.replace()
        run.process.send_signal(signal.SIGINT)
        ended(run, 130, "stopped by SIGINT")
        assert '"exit_status": 130' in run.stdout


def test_launchers_that_joined_restart_together(installed: Installed, tmp_path: Path) -> None:
    write_job(tmp_path, SLEEPER)
    where = ["torchrun", "--nnodes=2", f"--master-port={free_port()}", "--max-restarts=1"]
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(installed.running(tmp_path, *where, f"--node-rank={node}", "worker.py"))
            for node in range(2)
        ]
        assert [[*run.wait_ready(1)] for run in runs] == [[0], [1]]
        installed.replace()
        kill(runs[1].worker_pids()[1])
        for run in runs:
            run.wait_for("ready", times=2)
        kill(runs[1].worker_pids()[1])
        for run in runs:
            ended(run, 137, "rank 1 (")
