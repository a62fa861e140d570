"""A real Slurm for tests: a testbed with slurmctld and a slurmd per host, and allocations in it."""

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Bed, bed_up, find, missing
from tests.cluster.hosts import why_not as why_no_hosts
from tests.harness import PATIENCE_S, Done, completed, kill, wait_gone, wait_until

NODES, SLURMD_PORT = 3, 6818
TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")


def why_not() -> str | None:
    """What is missing for a Slurm of our own, or None."""
    return why_no_hosts() or missing(*TOOLS)


class Slurm(Bed):
    """A testbed with Slurm; its tools work from here, too."""

    def __init__(self, directory: Path, info: Mapping[str, Any]) -> None:
        super().__init__(directory, info)
        self.launcher, self.port = {"launcher": "slurm"}, SLURMD_PORT

    @property
    def environ(self) -> dict[str, str]:
        """What makes Slurm's tools, and distlaunch, mean this one."""
        return {"SLURM_CONF": str(self.directory / "slurm/slurm.conf")}

    def run(self, *argv: str, **options: str) -> Done:
        """Run a command that finds this Slurm, with more variables."""
        return completed(argv, env={**os.environ, **self.environ, **options})

    def tool(self, *argv: str, status: int | None = 0, **options: str) -> str:
        """What one of Slurm's tools printed, which must end with that status."""
        done = self.run(*argv, **options)
        assert status in (None, done.returncode), done.stderr
        return done.stdout.strip()

    def salloc(self, *options: str) -> str:
        """Allocate nodes without a shell; the job's id."""
        told = self.run("salloc", "--no-shell", "--nodes", str(NODES), *options).stderr
        return told.split("Granted job allocation ")[1].split()[0]

    def daemon(self, name: str, host: str) -> int:
        """The PID of one of Slurm's daemons."""
        network = os.stat(f"/proc/{self.hosts[host].pid}/ns/net").st_ino
        for pid in self.processes():
            with contextlib.suppress(OSError):
                same = os.stat(f"/proc/{pid}/ns/net").st_ino == network
                if same and Path(f"/proc/{pid}/comm").read_text().strip() == name:
                    return pid
        raise AssertionError(f"no {name} on {host}")

    def restart(self, name: str, host: str) -> None:
        """End a daemon and start it again; it answers then. slurmctld keeps what it knows at its end."""
        pid = self.daemon(name, host)
        kill(pid, signal.SIGTERM if name == "slurmctld" else signal.SIGKILL)
        wait_gone([pid], PATIENCE_S)
        more = ["-N", host] if name == "slurmd" else []
        done = self.inside(host, str(find(name)), *more)
        assert done.returncode == 0, done.stderr
        look = ("sinfo", "-h", "-n", host, "-o", "%T")
        wait_until(
            lambda: self.tool(*look, status=None).split("\n")[0] in ("idle", "mixed", "allocated"),
            lambda: f"{host} does not come back",
        )

    def state(self, job: str) -> str:
        """The job's state in Slurm's words."""
        shown = self.tool("scontrol", "show", "job", job, "--oneliner")
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)["JobState"]

    def wait_state(self, job: str, *wanted: str) -> None:
        """Wait until the job is in one of these states."""
        wait_until(lambda: self.state(job) in wanted, lambda: f"job {job} is {self.state(job)}, not {wanted}")


OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def slurm_of(
    count: int, directory: Path, nodes: int | None = None
) -> contextlib.AbstractContextManager[Slurm]:
    """A Slurm of so many hosts; with `nodes`, of so many nodes that share them."""
    return bed_up(Slurm, count, directory, "--slurm", *([] if nodes is None else [str(nodes)]))


@contextlib.contextmanager
def inside(slurm: Slurm, patch: pytest.MonkeyPatch, *options: str) -> Iterator[str]:
    """An allocation of which this process, and what it starts, is inside; the job's id."""
    job = slurm.salloc(*options)
    where = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": slurm.tool("squeue", "-j", job, "-h", "-o", "%N")}
    for name, value in (slurm.environ | where).items():
        patch.setenv(name, value)
    try:
        yield job
    finally:
        slurm.tool("scancel", job, status=None)
        slurm.wait_state(job, *OVER)
        # Slurm frees the nodes only when all processes of the job are gone.
        slurm.tool("squeue", "--noheader", "--states=all", "--jobs", job, status=None)
