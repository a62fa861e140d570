"""A real Slurm for tests: a testbed with slurmctld and a slurmd per host, and allocations in it."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Bed, bed_up, find, missing, network_of, program_of
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

    def run(self, *argv: str, status: int | None = None) -> Done:
        """Run a command that finds this Slurm, and ends with that status, if one is given."""
        return completed(argv, status, env={**os.environ, **self.environ})

    def tool(self, *argv: str, status: int | None = 0) -> str:
        """What one of Slurm's tools printed, which must end with that status."""
        return self.run(*argv, status=status).stdout.strip()

    def daemon(self, name: str, host: str) -> int:
        """The PID of one of Slurm's daemons."""
        network = network_of(self.hosts[host].pid)
        return next(pid for pid in self.processes() if network_of(pid) == network and program_of(pid) == name)

    def restart(self, name: str, host: str) -> None:
        """End a daemon and start it again; it answers then. slurmctld keeps what it knows at its end."""
        pid = self.daemon(name, host)
        kill(pid, signal.SIGTERM if name == "slurmctld" else signal.SIGKILL)
        wait_gone([pid], PATIENCE_S)
        more = ["-N", host] if name == "slurmd" else []
        self.inside(host, str(find(name)), *more, status=0)
        look = ("sinfo", "-h", "-n", host, "-o", "%T")
        wait_until(
            lambda: self.tool(*look, status=None).split("\n")[0] in ("idle", "mixed", "allocated"),
            lambda: f"{host} does not come back",
        )

    def wait_state(self, job: str, *wanted: str) -> None:
        """Wait until the job is in one of these states, in Slurm's words."""
        show, states = ("scontrol", "show", "job", job, "--oneliner"), "|".join(wanted)
        wait_until(
            lambda: bool(re.search(rf" JobState=({states}) ", self.tool(*show))), lambda: self.tool(*show)
        )


OVER = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def slurm_of(count: int, directory: Path, nodes: int = 0) -> contextlib.AbstractContextManager[Slurm]:
    """A Slurm of so many hosts; with `nodes`, of so many nodes that share them."""
    return bed_up(Slurm, count, directory, "--slurm", *([str(nodes)] if nodes else []))


@contextlib.contextmanager
def inside(slurm: Slurm, patch: pytest.MonkeyPatch, *options: str) -> Iterator[str]:
    """An allocation of which this process, and what it starts, is inside; the job's id."""
    told = slurm.run("salloc", "--no-shell", "--nodes", str(NODES), *options).stderr
    job = told.split("Granted job allocation ")[1].split()[0]
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
