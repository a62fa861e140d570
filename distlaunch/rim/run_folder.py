"""The run folder: the plan, every event, every rank's output, private to the user."""

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

MAX_OPEN = 200
"""Log files kept open at once: two per rank would pass the usual limit of 1024 descriptors."""


def new_run_id(name: str) -> str:
    """A name for a run that no other run has: the job's, the time, and some chance."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:40] or "job"
    return f"{safe}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"


class RunFolder:
    """Writes below `parent`/`run_id`, mode 0700, files 0600.

    A full or broken disk never stops a job: the loss is counted in `lost_bytes`.
    """

    def __init__(self, parent: str, run_id: str) -> None:
        """Create the folder. Raises OSError."""
        os.makedirs(parent, exist_ok=True)
        self.path = os.path.join(parent, run_id)
        os.mkdir(self.path, 0o700)
        self.run_id = run_id
        self.lost_bytes = 0
        self._open: dict[str, int] = {}
        self._generations: set[int] = set()
        self._began = time.monotonic()

    def write_plan(self, plan: Mapping[str, Any], generation: int = 0) -> None:
        """Keep the plan that is run."""
        self._append(self._inside(generation, "plan.json"), (json.dumps(plan, indent=1) + "\n").encode())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Keep how the run ended."""
        self._append("summary.json", (json.dumps(summary, indent=1) + "\n").encode())

    def record(self, name: str, fields: Mapping[str, Any]) -> None:
        """Append one event: its name and fields, with seconds since the start and wall time."""
        times = {"t": round(time.monotonic() - self._began, 6), "time": round(time.time(), 6)}
        self._append(
            "events.jsonl", json.dumps({**times, "event": name, **fields}, default=str).encode() + b"\n"
        )

    def append_output(self, rank: int, stream: int, data: bytes, generation: int = 0) -> None:
        """Append what a rank printed, byte for byte."""
        self._append(self._inside(generation, _log_name(rank, stream)), data)

    def write_stack(self, rank: int | None, text: str, generation: int) -> None:
        """Keep where a rank stood."""
        if rank is not None:
            self._append(self._inside(generation, f"rank{rank}.stack"), text.encode() + b"\n")

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _append(self, name: str, data: bytes) -> None:
        try:
            fd = self._descriptor(name)
            while data:
                data = data[os.write(fd, data) :]
        except OSError:
            self.lost_bytes += len(data)

    def _inside(self, generation: int, name: str) -> str:
        """`name` for the first generation; later ones have folders of their own."""
        if generation == 0:
            return name
        folder = f"generation{generation}"
        if generation not in self._generations:
            self._generations.add(generation)
            with contextlib.suppress(OSError):  # if it can't be made, the loss is counted
                os.mkdir(os.path.join(self.path, folder), 0o700)
        return os.path.join(folder, name)

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) >= MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._open[name] = os.open(os.path.join(self.path, name), flags, 0o600)
        return self._open[name]


def _log_name(rank: int, stream: int) -> str:
    return f"rank{rank}.{'err' if stream else 'out'}"
