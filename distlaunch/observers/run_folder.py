"""The run folder: the plan, every event, every rank's output, private to the user."""

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from distlaunch.observers.log_writer import LogWriter
from distlaunch.observers.output_index import Stamp
from distlaunch.supervisor.status import Status, document_of
from distlaunch.wording import json_text

STATUS, EVENTS, SUMMARY = "status.json", "events.jsonl", "summary.json"
CONTROLLER_LOG = "controller.log"
"""What a controller without a terminal writes to stderr, which only a bug makes it do."""
_in_words = json.JSONEncoder(default=str).encode
STATUS_BYTES = 4096
"""Its size: it is written over in place, so that a disk that fills up takes the end of a run, too."""


def new_run_id(name: str) -> str:
    """A name for a run that no other run has: the job's, the time, and some chance."""
    return f"{job_part(name) or 'job'}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"


def job_part(name: str) -> str:
    """What of a job's name is in the ids of its runs; "" if nothing is."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:40]


class RunFolder:
    """Writes below `parent`/`run_id`, mode 0700, files 0600; later generations have folders of their own.

    A full, broken or stalled disk never stops a job: the loss is counted in `lost_bytes`.
    """

    def __init__(self, parent: str, run_id: str) -> None:
        """Create the folder. Raises OSError."""
        _make_folders(parent)
        self.path = os.path.join(parent, run_id)
        os.mkdir(self.path, 0o700)
        self.run_id = run_id
        self._claim: int | None = None
        self._writer = LogWriter(self.path)

    def claim(self, status: Status) -> None:
        """Write the first status, and hold it: until we close this or die, others see that we live."""
        path = os.path.join(self.path, STATUS)
        self._claim = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with contextlib.suppress(OSError):  # a file system may lack either
            fcntl.flock(self._claim, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            os.pwrite(self._claim, _status_bytes(status), 0)

    def write_status(self, status: Status) -> None:
        """Put it in the place of the last one."""
        self._writer.put(STATUS, _status_bytes(status))

    @property
    def lost_bytes(self) -> int:
        """Bytes that could not be written so far."""
        return self._writer.lost_bytes

    def write_plan(self, plan: Mapping[str, Any], generation: int = 0) -> None:
        """Keep the plan that is run."""
        self._write_json(_inside(generation, "plan.json"), plan)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Keep how the run ended."""
        self._write_json(SUMMARY, summary)

    def record(self, at: float, name: str, fields: Mapping[str, Any]) -> None:
        """Append one event: its name and fields, with seconds since the run began and wall time."""
        times = {"t": at, "time": round(time.time(), 6)}
        line = _in_words({**times, "event": name, **fields})
        self._writer.append(EVENTS, line.encode() + b"\n")

    def replace(self, name: str, data: bytes) -> None:
        """Have a file hold just `data`: whoever reads it finds all of it, or all of what was there before."""
        self._writer.replace(name, data)

    def append(self, name: str, data: bytes, stamp: Stamp | None = None) -> None:
        """Append what a rank printed, byte for byte, to the file of that name."""
        self._writer.append(name, data, stamp)

    def remove(self) -> None:
        """Delete it with all that is in it: files and folders of ours, so that it takes no shutil (4 ms)."""
        for folder, _, names in os.walk(self.path, topdown=False):
            with contextlib.suppress(OSError):
                for name in names:
                    os.unlink(os.path.join(folder, name))
                os.rmdir(folder)

    def write_stack(self, rank: int, text: str, generation: int = 0) -> None:
        """Keep where a rank was blocked."""
        self._writer.append(_inside(generation, f"rank{rank}.stack"), text.encode() + b"\n")

    def append_flight(self, rank: int, data: bytes, generation: int = 0) -> None:
        """Append a piece of a rank's flight recorder's dump."""
        self._writer.append(_inside(generation, f"rank{rank}.flight"), data)

    def generation_path(self, generation: int) -> str:
        """The folder with a generation's logs."""
        return os.path.join(self.path, os.path.dirname(_inside(generation, "x")))

    def flush(self) -> bool:
        """Wait until what was appended can be read, while the disk takes something; whether all can."""
        return self._writer.flush()

    def close(self) -> None:
        """Write out what waits, and close all files."""
        self._writer.close()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def _write_json(self, name: str, document: Mapping[str, Any]) -> None:
        self._writer.append(name, json_text(document, indent=1).encode())


def _status_bytes(status: Status) -> bytes:
    """Always as long: blanks make it up."""
    text = json.dumps(document_of(status)).encode()
    return text.ljust(STATUS_BYTES - 1) + b"\n"


def _make_folders(path: str) -> None:
    """`path` and what lacks above it; only the user may write there, or others could put links in it."""
    if not os.path.isdir(path):
        _make_folders(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o755)


def _inside(generation: int, name: str) -> str:
    return f"generation{generation}/{name}" if generation else name
