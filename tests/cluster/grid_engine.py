"""A real Grid Engine for tests: a testbed with its qmaster and an execd per host."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.hosts import Bed, brought_up
from tests.cluster.hosts import why_not as why_no_hosts
from tests.harness import PATIENCE_S, wait_until

NODES = 3
COMMANDS = ("qdel", "qstat", "qsub")
PROGRAMS = Path("/usr/lib/gridengine")


def why_not() -> str | None:
    """What is missing for a Grid Engine of our own, or None."""
    missing = [name for name in ("sge_qmaster", "sge_execd", "qrsh") if not (PROGRAMS / name).exists()]
    return why_no_hosts() or (f"missing: {', '.join(missing)}" if missing else None)


class GridEngine(Bed):
    """A testbed with Grid Engine."""

    def commands(self, folder: Path) -> str:
        """A PATH by which its commands are found here, as on a login node; they run on its first host."""
        folder.mkdir()
        for name in COMMANDS:
            call = " ".join(self.argv("exec", "host1", "--", f"/usr/bin/{name}"))
            (folder / name).write_text(f'#!/bin/sh\nexec {call} "$@"\n')
            (folder / name).chmod(0o755)
        return f"{folder}:{os.environ['PATH']}"

    def tool(self, *argv: str) -> str:
        """What a command has printed on the first host, whatever its status."""
        done = subprocess.run(
            self.argv("exec", "host1", "--", *argv),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.stdout + done.stderr

    def is_over(self, job: str) -> bool:
        """Whether the queue lists it no more."""
        return f"<JB_job_number>{job}<" not in self.tool("qstat", "-xml")

    def wait_over(self, job: str) -> None:
        """Wait until it is."""
        wait_until(lambda: self.is_over(job), lambda: f"job {job} does not end: {self.tool('qstat')}")

    def wait_accounted(self, job: str, status: str) -> None:
        """Wait until its accounts have that exit status; those of its tasks on other hosts come before."""
        ended = re.compile(rf"^exit_status +{status}\b", re.MULTILINE)
        asks = ("qacct", "-j", job)
        wait_until(
            lambda: bool(ended.search(self.tool(*asks))),
            lambda: f"job {job} has another status: {self.tool(*asks)}",
        )


@contextlib.contextmanager
def grid_engine_of(count: int, folder: Path) -> Iterator[GridEngine]:
    """A Grid Engine of so many hosts."""
    bed = GridEngine(folder, brought_up(count, folder, "--grid-engine"))
    try:
        yield bed
    finally:
        bed.call("down")
