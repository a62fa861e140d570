"""Faults of workers: each ends the job everywhere, in time, and leaves nothing."""

import os
from pathlib import Path

import pytest

from tests.faults.conftest import Figures
from tests.harness import running, wait_gone, write_job

CPU = "nodes: 2\ngpus_per_node: 0\nprocs_per_node: 2\n"


@pytest.mark.fault(1, "a worker exits with 1", promise="1")
def test_exit_1(tmp_path: Path, figures: Figures) -> None:
    worker = """
        import os, signal
        os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
        if os.environ["RANK"] == "2":
            open("go").read()
            raise SystemExit(1)
        signal.pause()
    """
    os.mkfifo(tmp_path / "go")
    with running(write_job(tmp_path, worker, CPU)) as run:
        pids = run.wait_ready(4)
        os.close(os.open(tmp_path / "go", os.O_WRONLY))
        figures("all ranks gone", wait_gone(list(pids.values()), 60.0), at_most=2.0)
        assert run.wait() == 1
        assert "rank 2 (node1) failed first: exit status 1" in run.stderr
        assert run.holders() == []
