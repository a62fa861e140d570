"""One of two nodes' ranks dies while the other computes: the same hosts, ours and torchrun's, in one run."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Bed
from tests.faults.conftest import Figures, Pace
from tests.harness import PATIENCE_S, held, kill, running, wait_gone, write_job

WATCHED_S = 20.0
"""torchrun's other node is watched for so long, at the default pace."""
WORKER = """
    import os
    os.nice(19)  # the other tests come first
    open(f"pid.{os.environ['RANK']}", "w").write(str(os.getpid()))
    os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
    while True:  # computes, and does not communicate
        pass
"""


@pytest.mark.fault(0, "a rank dies, the other node computes: distlaunch", promise="1")
def test_ours(tmp_path: Path, bed: Bed, figures: Figures) -> None:
    keys = f"nodes: [host1, host2]\ngpus_per_node: 0\nssh: {{config: {bed.folder}/ssh_config}}\n"
    with running(write_job(tmp_path, WORKER, keys)) as run:
        pids = run.wait_ready(2)
        kill(pids[1])
        figures("all ranks gone", wait_gone(list(pids.values()), PATIENCE_S), at_most=0.5)
        assert run.wait() == 137


@contextlib.contextmanager
def torchrun_on(bed: Bed, host: str, node_rank: int, script: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """torchrun as a person starts it by hand on each of two hosts, ended with all it started."""
    flags = ["--nnodes=2", f"--node-rank={node_rank}", f"--master-addr={bed.hosts['host1'].address}"]
    words = [sys.executable, "-m", "torch.distributed.run", *flags, "--master-port=29511", script.name]
    process = subprocess.Popen(
        bed.argv("exec", host, "--", *words),
        cwd=script.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.long
@pytest.mark.fault(0, "a rank dies, the other node computes: torchrun", promise="1")
def test_torchruns(tmp_path: Path, bed: Bed, pace: Pace, figures: Figures) -> None:
    script = write_job(tmp_path, WORKER).with_name("worker.py")
    with torchrun_on(bed, "host1", 0, script) as first, torchrun_on(bed, "host2", 1, script) as second:
        assert first.stdout is not None
        assert second.stdout is not None
        assert b"ready 0" in first.stdout.readline()
        assert b"ready 1" in second.stdout.readline()
        survivor, victim = (int((tmp_path / f"pid.{rank}").read_text()) for rank in (0, 1))
        kill(victim)
        with held([survivor]) as processes:
            began = time.monotonic()
            gone = processes.has_ended(survivor, began + (3.0 if pace.keys else WATCHED_S))
            what = "gone" if gone else "still computes after"
            figures(f"the other node's rank {what}", time.monotonic() - began)
        if not gone:
            kill(survivor)
        wait_gone([survivor], PATIENCE_S)
