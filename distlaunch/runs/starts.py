"""The starts of a job that a scheduler queues: a line for each, beside the run folders."""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from distlaunch.agent.frozen import Frozen


class Begun(Frozen):
    """A start: its run, of which job, and how often the scheduler had started that before."""

    run: str
    job: str
    starts: int


class Starts:
    """Those of the job `queued`, of that scheduler's queue, whose run folders are in `folder`."""

    def __init__(self, folder: str, queued: str, scheduler: str = "slurm") -> None:
        self.path = os.path.join(folder, f"{scheduler}-{queued}.jsonl")

    def note(self, begun: Begun) -> None:
        """Another start; where it can't be noted, the next one knows nothing of it."""
        self._append(begun._asdict())

    def note_requeue(self) -> None:
        """Another start has been asked for."""
        self._append({"requeue": True})

    @property
    def requeues(self) -> int:
        """How often one has been asked for."""
        return sum("requeue" in line for line in self._lines())

    def begun(self) -> list[Begun]:
        """The oldest first."""
        fields = Begun._fields
        return [
            Begun(**{name: line[name] for name in fields})
            for line in self._lines()
            if line.keys() >= {*fields}
        ]

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self.path, encoding="utf-8") as file:
                lines = file.read().splitlines()
        except OSError:
            return
        for line in lines:
            with contextlib.suppress(ValueError):
                document = json.loads(line)
                if isinstance(document, dict):
                    yield document

    def _append(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(fd, json.dumps(line).encode() + b"\n")
            finally:
                os.close(fd)
