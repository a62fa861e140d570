"""What tests of jobs in any scheduler's queue have in common."""

import json
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

from tests.harness import distlaunch, wait_until

NODES = 3


def rows(*options: str) -> list[dict[str, Any]]:
    """What `ps` lists."""
    done = distlaunch("ps", "--json", *options, status=0)
    listed: list[dict[str, Any]] = json.loads(done.stdout)
    return listed


def check_stop_before_start(name: str, job: str, named: str | None = None) -> None:
    """`stop` cancels the job of that id, by which or by what it is `named`: `name` is what people call it."""
    stopped = distlaunch("stop", named or job, status=0)
    assert f"{name}: cancelled\n" in stopped.stderr
    assert rows() == []
    assert rows("--all")[0]["state"] == "CANCELLED"
    ended = distlaunch("attach", job, status=1)
    assert f"{name} ended (CANCELLED) without starting a run" in ended.stderr


class Printed:
    """What the scripts of jobs have printed that were submitted to a `scheduler` from a `directory`."""

    def __init__(self, directory: Path, scheduler: str) -> None:
        self.directory, self._scheduler = directory, scheduler

    def output(self, job: str) -> str:
        """The lines that its script has printed so far."""
        path = self.directory / "runs" / f"{self._scheduler}-{job}.out"
        text = path.read_text() if path.exists() else ""
        return text[: text.rfind("\n") + 1]  # the last line may be half written

    def wait_for(self, job: str, words: str, times: int = 1) -> None:
        """Wait until its script has printed that so often."""
        wait_until(
            lambda: self.output(job).count(words) >= times, lambda: f"no {words!r} in {self.output(job)!r}"
        )


class Queue(Printed):
    """Submits jobs on three nodes to the queue of a real scheduler, and looks at them as a user does."""

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
