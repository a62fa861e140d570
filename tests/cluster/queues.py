"""Jobs on three nodes that tests submit to the queue of a real scheduler."""

import json
import re
from pathlib import Path
from textwrap import dedent

from tests.harness import distlaunch
from tests.queued import Printed

NODES = 3


class Queue(Printed):
    """Submits jobs from a directory, and looks at them as a user does."""

    def __init__(self, directory: Path, scheduler: str, keys: str) -> None:
        super().__init__(directory, scheduler)
        self.scheduler, self.keys = scheduler, keys
        self.known: list[str] = []

    def job(self, worker: str, keys: str = "") -> Path:
        """A job file with the keys that all jobs here have, and with more."""
        (self.directory / "worker.py").write_text(dedent(worker))
        path = self.directory / "train.yaml"
        path.write_text(f"script: worker.py\ngpus_per_node: 0\nnodes: {NODES}\n{self.keys}\n{keys}\n")
        return path

    def submit(self, worker: str, keys: str = "") -> str:
        """Submit it; the job's id, which is all that is printed."""
        done = distlaunch("submit", str(self.job(worker, keys)))
        assert (done.returncode, done.stderr) == (0, "")
        assert re.fullmatch(r"\d+\n", done.stdout), done.stdout
        self.known.append(done.stdout.strip())
        return self.known[-1]

    def starts(self, job: str) -> list[str]:
        """The runs that it has become."""
        lines = (self.directory / "runs" / f"{self.scheduler}-{job}.jsonl").read_text().splitlines()
        return [line["run"] for line in map(json.loads, lines) if "run" in line]
