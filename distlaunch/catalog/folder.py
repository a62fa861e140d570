"""One run, by its folder: where it is, whether its controller lives, how it ended."""

import contextlib
import fcntl
import json
import os
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.observers.run_folder import CONTROLLER_LOG, EVENTS, OUTPUT_INDEX, STATUS, SUMMARY
from distlaunch.state.status import Controller, RunState, Status, status_of
from distlaunch.system.here import boot_id


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
        status = status_of(document) if document else _older(folder)
    except (KeyError, TypeError, ValueError, AttributeError):
        status = _older(folder)
    if status is None:
        return None
    if not alive and not status.state.over:
        status = status._replace(state=RunState.LOST, why=_why_lost(folder, status.controller))
    return Run(folder, status, alive, None if status.state.over else heard(folder))


def summary_in(folder: str) -> dict[str, Any] | None:
    """What its summary.json says; None as long as there is none."""
    return _document(os.path.join(folder, SUMMARY))


def _claimed(path: str) -> tuple[dict[str, Any] | None, bool]:
    """What a status.json says, and whether its controller lives: it holds a lock, which ends with it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None, False
    try:
        alive = not _lockable(fd)  # first: what is written before the end is read then
        return _parsed(os.pread(fd, 1 << 16, 0)), alive
    finally:
        os.close(fd)


def _lockable(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _parsed(data: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        document = json.loads(data)
        return document if isinstance(document, dict) else None
    return None


def _document(path: str) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            return _parsed(file.read())
    except OSError:
        return None


def _older(folder: str) -> Status | None:
    """What the folder of a distlaunch that kept no status.json tells."""
    try:
        with open(os.path.join(folder, EVENTS), "rb") as file:
            first = json.loads(file.readline())
            ended = os.fstat(file.fileno()).st_mtime
        job = first.get("spec", {}).get("name", "")
        began = float(first["time"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    summary = summary_in(folder)
    run = os.path.basename(os.path.normpath(folder))
    status = Status(run, job, RunState.LOST, ended, began, Controller("", 0))
    return _with_summary(status, summary) if summary else status


def _with_summary(status: Status, summary: dict[str, Any]) -> Status:
    cause, ended = summary.get("cause"), summary.get("exit_status")
    return status._replace(
        state=RunState.FAILED if cause else RunState.SUCCEEDED,
        exit_status=ended if isinstance(ended, int) else None,
        ranks=summary.get("world_size", 0),
        restarts=len(summary.get("restarts", ())),
        why=cause.get("text", "") if isinstance(cause, dict) else "",
    )


def _why_lost(folder: str, controller: Controller) -> str:
    process = f", process {controller.pid} on {controller.host}," if controller.pid else ""
    who = f"its controller{process}"
    known = bool(controller.boot) and controller.host == os.uname().nodename
    if known and controller.boot != boot_id():
        return f"{who} ended when the machine restarted"
    down = "" if known else ", or its machine went down"
    log = f"; see {CONTROLLER_LOG} in the run folder" if _size(folder, CONTROLLER_LOG) else ""
    return f"{who} ended without reporting a result (it crashed or was killed{down}){log}"


def _size(folder: str, name: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(os.path.join(folder, name)).st_size
    return 0


def heard(folder: str) -> float | None:
    """When ranks last printed something."""
    with contextlib.suppress(OSError):
        return os.stat(os.path.join(folder, OUTPUT_INDEX)).st_mtime
    return None
