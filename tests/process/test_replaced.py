"""A run ends with the code that it began with, though another distlaunch is installed meanwhile."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, Going, kill, write_job
from tests.process.torchruns import free_port

WAITS = """
    import os, signal
    os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
    signal.pause()
"""
FAILS = """
    import os, signal, sys
    def fail(*_):
        raise ConnectionError("Connection closed by peer")
    signal.signal(signal.SIGTERM, fail)
    os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
    signal.pause()
"""


class Installed:
    """A copy of the package, from which commands run until it is replaced."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / "site"
        shutil.copytree(ROOT / "distlaunch", self.place / "distlaunch")

    def start(self, folder: Path, *words: str, **environ: str) -> Going:
        env = {
            **os.environ,
            "PYTHONPATH": str(self.place),
            "XDG_STATE_HOME": str(folder / "state"),
            **environ,
        }
        return Going(folder, [sys.executable, "-m", "distlaunch", *words], cwd=folder, env=env)

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


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_fails_is_explained_and_restarted(
    installed: Installed, tmp_path: Path, signum: signal.Signals
) -> None:
    job = write_job(
        tmp_path, FAILS, "procs_per_node: 2\ntimeouts: {stop: 2s}\nrestarts: {max: 1, backoff: 0s}"
    )
    run = installed.start(tmp_path, "run", str(job))
    try:
        before = run.wait_ready(2)
        installed.replace()
        kill(before[1], signum)
        run.wait_until(lambda: run.stdout.count("ready") >= 4, "a second attempt")
        kill(run.worker_pids()[1], signum)
        ended(run, 1 if signum == signal.SIGTERM else 137, "rank 1 (")
        assert "already restarted once" in run.stderr
    finally:
        run.kill()


def test_the_summary_as_json(installed: Installed, tmp_path: Path) -> None:
    run = installed.start(tmp_path, "run", "--json", str(write_job(tmp_path, WAITS, "procs_per_node: 2")))
    try:
        run.wait_until(lambda: run.stderr.count("ready") >= 2, "both ranks")
        installed.replace()
        run.process.send_signal(signal.SIGINT)
        ended(run, 130, "stopped by SIGINT")
        assert '"exit_status": 130' in run.stdout
    finally:
        run.kill()


def test_launchers_that_join(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("import os, signal\n" + WAITS.replace("    ", ""))
    where = ["torchrun", "--nnodes=2", f"--master-port={free_port()}", "--max-restarts=1"]
    runs = [installed.start(tmp_path, *where, f"--node-rank={node}", "worker.py") for node in range(2)]
    try:
        first, second = (run.wait_ready(1) for run in runs)
        assert first.keys() == {0}
        installed.replace()
        for attempt in (1, 2):
            kill(runs[1].worker_pids()[1])
            if attempt == 1:
                for run in runs:
                    run.wait_until(lambda run=run: run.stdout.count("ready") >= 2, "a second attempt")  # type: ignore[misc]
        assert second.keys() == {1}
        for run in runs:
            ended(run, 137, "rank 1 (")
    finally:
        for run in runs:
            run.kill()
