"""The recipe that people copy, `srun torchrun --rdzv-backend c10d …`, with one word changed."""

import contextlib
import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm
from tests.cluster.test_launchers import TRAINS
from tests.cluster.workers import worker
from tests.harness import Going, all_ended_well, distlaunch, distlaunch_argv, wait_gone

PORT = 29533
TELLS = worker("""
    names = ("RANK", "GROUP_RANK", "WORLD_SIZE", "SLURM_NODEID", "MASTER_ADDR")
    os.write(1, f"told {' '.join(os.environ[name] for name in names)}\\n".encode())
""")


@contextlib.contextmanager
def step(slurm: Slurm, directory: Path, text: str, head: str = "host1") -> Iterator[Going]:
    """As in PyTorch's sbatch file: one task for each node, and nothing that says which node it is.

    No launcher, keeper, agent or worker outlives its step.
    """
    (directory / "worker.py").write_text(textwrap.dedent(text))
    where = ["--rdzv_id", "17", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"{head}:{PORT}"]
    launcher = distlaunch_argv("torchrun", "--nnodes", "3", "--nproc_per_node", "1", *where, "worker.py")
    argv = ["srun", "--quiet", "--nodes=3", "--ntasks=3", *launcher]
    with slurm.emptied(20.0):
        run = Going(directory, argv, cwd=directory, env={**os.environ, **slurm.environ})
        try:
            yield run
        finally:
            run.process.send_signal(signal.SIGINT)
            run.process.send_signal(signal.SIGINT)  # within a second: srun ends the step
            run.kill()


def test_trains_and_numbers_nodes_as_slurm_does_after_the_endpoints(slurm: Slurm, tmp_path: Path) -> None:
    with step(slurm, tmp_path, TELLS + textwrap.dedent(TRAINS), head="host2") as run:
        all_ended_well([run], last="sum 6\n", times=3)
        told = [f"told {node} {node} 3 {'102'[node]} host2" for node in range(3)]
        assert sorted(run.stdout.splitlines()) == [*["sum 6"] * 3, *told]
        assert [line for line in run.stderr.splitlines() if not line.startswith("[W")] == []  # torch's


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_signals_of_scancel_end_all_nodes(slurm: Slurm, tmp_path: Path, name: str) -> None:
    """scancel --signal reaches all processes at once: the ranks ignore what warns of the end."""
    ignores = worker("signal.signal(signal.SIGUSR1, signal.SIG_IGN)\nready()\nwait()")
    with step(slurm, tmp_path, ignores) as run:
        pids = run.wait_ready(3)
        with contextlib.suppress(AssertionError):  # the step may end before scancel has signaled all nodes
            slurm.tool("scancel", f"--signal={name}", step_of(pids[0]))
        wait_gone(list(pids.values()), 5.0)
        assert run.wait() == 143, run.stderr
        assert "helper" not in run.stderr


def test_scancel_is_no_failure_of_a_rank_or_node(slurm: Slurm, tmp_path: Path) -> None:
    with step(slurm, tmp_path, worker("ready()\nwait()")) as run:
        job = step_of(run.wait_ready(3)[0]).partition(".")[0]
        slurm.tool("scancel", job)
        assert run.wait() == 143, run.stderr
        assert run.stderr.count(f"Slurm job {job} was cancelled") == 3, run.stderr
        assert "failed" not in run.stderr
        assert f"Slurm job {job} was cancelled" in distlaunch("why", job, status=0).stdout
        logs = distlaunch("logs", job, status=0)
        assert "the output of ranks 0-2 isn't in the run directory" in logs.stderr


def step_of(pid: int) -> str:
    """The step of a worker; Slurm may list others, which have just ended."""
    told = Path(f"/proc/{pid}/environ").read_text().split("\0")
    environ = dict(setting.split("=", 1) for setting in told if setting)
    return f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
