"""A Slurm with slurmdbd, as most sites have it: what it writes down of our jobs is what became of them."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import brought_up, find
from tests.cluster.slurm import Slurm, why_not
from tests.harness import PATIENCE_S, distlaunch, write_job

TOOLS = ("slurmdbd", "mariadbd", "sacct")
ENDS = """
import os, sys
if os.environ["RANK"] == "1":
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    missing = [name for name in TOOLS if find(name) is None]
    if reason := why_not() or (f"missing: {', '.join(missing)}" if missing else None):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("accounts") / "bed"
    slurm = Slurm(folder, brought_up(2, folder, "--slurm", "--accounting"))
    try:
        yield slurm
    finally:
        slurm.call("down")


def test_accounts_have_the_ends_of_submitted_jobs(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    job = str(write_job(tmp_path, ENDS, "nodes: 2\ngpus_per_node: 0\nargs: ['0']\n"))
    told = {}
    for status in (0, 3):
        queued = distlaunch("submit", job, "--set", f"args=['{status}']", "--wait")
        assert queued.returncode == status, queued.stderr
        told[status] = _account(slurm, queued.stdout.strip())
    assert told[0] == ["COMPLETED", "0:0", "2"]
    assert told[3] == ["FAILED", "3:0", "2"]


def _account(slurm: Slurm, job: str) -> list[str]:
    """What is written down of a job that has ended. slurmctld tells slurmdbd when it finds the time."""
    asks = ("sacct", "--noheader", "--parsable2", "-X", "-j", job, "-o", "State,ExitCode,NNodes")
    deadline = time.monotonic() + PATIENCE_S
    while "RUNNING" in (row := slurm.tool(*asks)) or "PENDING" in row or not row:
        assert time.monotonic() < deadline, f"sacct has no end of job {job}: {row!r}"
        time.sleep(0.1)
    return row.split("|")
