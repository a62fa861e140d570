"""One run, by its folder: where it is, whether its controller lives, how it ended."""

import contextlib
import fcntl
import json
import os
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.here import boot_id
from distlaunch.observers.run_folder import CONTROLLER_LOG, OUTPUT_INDEX, STATUS, SUMMARY
from distlaunch.supervisor.status import Controller, RunState, Status, status_of


class Run(Frozen):
    """A run as its folder has it now: `alive` if a controller holds it.

    `heard` is when ranks last printed, as long as it is not over.
    """

    folder: str
    status: Status
    alive: bool
    heard: float | None

    @property
    def id(self) -> str:
        """Its name, which no other run has."""
        return self.status.run

    @property
    def host(self) -> str:
        """Where its controller is, or was, if that is another machine."""
        host = self.status.controller.host
        return "" if host == os.uname().nodename else host


def run_in(folder: str) -> Run | None:
    """The run of that folder, or None where it is no run's."""
    document, alive = _claimed(os.path.join(folder, STATUS))
    try:
        status = status_of(document)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if not alive and not status.state.over:
        status = status._replace(state=RunState.LOST, why=_why_lost(folder, status.controller))
    return Run(folder, status, alive, None if status.state.over else heard(folder))


def summary_in(folder: str) -> dict[str, Any] | None:
    """What its summary.json says; None as long as there is none."""
    with contextlib.suppress(OSError), open(os.path.join(folder, SUMMARY), "rb") as file:
        return _parsed(file.read()) or None
    return None


def _claimed(path: str) -> tuple[dict[str, Any], bool]:
    """What a status.json says, and whether its controller lives: it holds a lock, which ends with it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return {}, False
    try:
        alive = _is_locked(fd)  # first: what is written before the end is read then
        return _parsed(os.pread(fd, 1 << 16, 0)), alive
    finally:
        os.close(fd)


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)  # a file system may lack locks
    return False


def _parsed(data: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        document = json.loads(data)
        return document if isinstance(document, dict) else {}
    return {}


def _why_lost(folder: str, controller: Controller) -> str:
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
    """When ranks last printed something."""
    with contextlib.suppress(OSError):
        return os.stat(os.path.join(folder, OUTPUT_INDEX)).st_mtime
    return None
