"""The state of a run according to its directory: its status, and whether its controller is alive."""

import contextlib
import fcntl
import json
import os
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.here import boot_id
from distlaunch.observers.run_directory import CONTROLLER_LOG, OUTPUT_INDEX, STATUS, SUMMARY
from distlaunch.supervisor.status import ControllerProcess, RunState, Status, status_of


class Run(Frozen):
    """A run according to its directory; `alive` if a controller holds its lock.

    `heard` is when ranks last printed, in seconds since the epoch; None once the run is over.
    """

    folder: str
    status: Status
    alive: bool
    heard: float | None

    @property
    def id(self) -> str:
        """Return its unique ID."""
        return self.status.run

    @property
    def host(self) -> str:
        """Return the host of its controller; "" if that is this one."""
        host = self.status.controller.host
        return "" if host == os.uname().nodename else host


def run_in(folder: str) -> Run | None:
    """Return the run in that directory; None if there is none."""
    document, alive = _claimed(os.path.join(folder, STATUS))
    try:
        status = status_of(document)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if not alive and not status.state.over:
        status = status._replace(state=RunState.LOST, why=_why_lost(folder, status.controller))
    elif alive and _is_stopped(status.controller):
        resume = f"`kill -CONT {status.controller.pid}` resumes it"
        status = status._replace(state=RunState.SUSPENDED, why=f"a signal stopped its controller; {resume}")
    return Run(folder, status, alive, None if status.state.over else heard(folder))


def summary_in(folder: str) -> dict[str, Any] | None:
    """Read its summary.json; None if there is none yet."""
    with contextlib.suppress(OSError), open(os.path.join(folder, SUMMARY), "rb") as file:
        return _parsed(file.read()) or None
    return None


def _claimed(path: str) -> tuple[dict[str, Any], bool]:
    """Read a status.json; return it, and whether its controller is alive and thus holds the lock."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return {}, False
    try:
        alive = _is_locked(fd)  # first: then the read sees what was written before the end
        return _parsed(os.pread(fd, 1 << 16, 0)), alive
    finally:
        os.close(fd)


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)  # not every file system supports locks
    return False


def _parsed(data: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        document = json.loads(data)
        return document if isinstance(document, dict) else {}
    return {}


def _is_stopped(controller: ControllerProcess) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{controller.pid}/stat", "rb") as file:
        state = file.read().rpartition(b")")[2].split()[0]
        return state == b"T" and controller.host == os.uname().nodename
    return False


def _why_lost(folder: str, controller: ControllerProcess) -> str:
    who = f"its controller, process {controller.pid} on {controller.host},"
    known = bool(controller.boot) and controller.host == os.uname().nodename
    if known and controller.boot != boot_id():
        return f"{who} ended when the machine restarted"
    down = "" if known else ", or its machine went down"
    log = ""
    with contextlib.suppress(OSError):
        if os.path.getsize(os.path.join(folder, CONTROLLER_LOG)) > 0:
            log = f"; see {CONTROLLER_LOG} in the run directory"
    return f"{who} ended without reporting a result (it crashed or was killed{down}){log}"


def heard(folder: str) -> float | None:
    """Return when ranks last printed, in seconds since the epoch."""
    with contextlib.suppress(OSError):
        return os.stat(os.path.join(folder, OUTPUT_INDEX)).st_mtime
    return None
