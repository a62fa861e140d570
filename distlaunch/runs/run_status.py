"""The state of a run according to its directory: its status, and whether its controller is alive."""

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Mapping
from glob import iglob
from typing import Any

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.procfs import boot_id, state
from distlaunch.observers.run_directory import CONTROLLER_LOG, FRESH_S, OUTPUT_INDEX, STATUS, SUMMARY, fd_of
from distlaunch.observers.run_list import is_stopped, listed, starts_in, starts_path
from distlaunch.schedulers import title_of
from distlaunch.supervisor.allocation_end import STATUS as CANCELLED_STATUS
from distlaunch.supervisor.status import ControllerProcess, RunState, Status, status_of

MAX_SUMMARY = 1 << 26
"""Maximum bytes to read of a summary.json."""


class Run(Frozen):
    """A run according to its directory; `alive` if its controller is, as far as can be known.

    `heard` is the time when ranks last printed, in seconds since the epoch; None once the run has ended.
    """

    folder: str
    status: Status
    alive: bool
    heard: float | None

    @property
    def id(self) -> str:
        """Return the run's unique ID."""
        return self.status.run

    @property
    def host(self) -> str:
        """Return the controller's host; "" if that is this host."""
        return "" if _is_here(self.status.controller) else self.status.controller.host


def run_in(folder: str) -> Run | None:
    """Return the run in that directory; None if there is none."""
    try:
        document, locked, saved = _claimed(fd_of(folder, STATUS))
    except OSError:
        return None
    run = _run_of(folder, document, locked, saved)
    return living(os.path.basename(folder)) if locked and run is None else run


def living(run: str, pid: int | None = None) -> Run | None:
    """Return an active run on this machine by its ID, from the files that its controller has open.

    This finds a run even if its directory was removed or renamed, or if its status can't be read. `pid` is
    the controller's PID, if known.
    """
    for link in iglob(f"/proc/{pid or '[0-9]*'}/fd/*"):
        with contextlib.suppress(OSError):
            folder, name = os.path.split(os.readlink(link).removesuffix(" (deleted)"))
            if name != STATUS or not os.lstat(link).st_mode & stat.S_IWUSR:  # a reader's
                continue
            document, _, at = _claimed(os.open(link, os.O_RDONLY | os.O_CLOEXEC))
            name, holder = os.path.basename(folder), ControllerProcess("", int(link.split("/")[2]))
            status = Status(name, name.rsplit("-", 3)[0], RunState.RUNNING, at, at, holder)
            unread = Run(folder, status._replace(where="unreadable"), alive=True, heard=None)
            if (found := _run_of(folder, document, True, at) or unread).id == run:
                return found
    return None


def _run_of(folder: str, document: Mapping[str, Any], locked: bool | None, saved: float) -> Run | None:
    """Return the run with this status, corrected by what is known of its controller; None = damaged.

    `locked` and `saved` are as returned by `_claimed`.
    """
    try:
        status = status_of(document)
    except (KeyError, TypeError, ValueError):
        return None
    hidden = locked is None or not _is_here(status.controller)
    alive = locked or (hidden and not status.state.over and time.time() - saved < FRESH_S)
    if not alive and not status.state.over:
        status = _ended_unseen(folder, status)
    elif alive and state(status.controller.pid) == "T" and status.controller.host == os.uname().nodename:
        resume = f"`kill -CONT {status.controller.pid}` resumes it"
        status = status._replace(state=RunState.SUSPENDED, why=f"a signal stopped its controller; {resume}")
    return Run(folder, status, alive, None if status.state.over else heard(folder))


def _is_here(controller: ControllerProcess) -> bool:
    return controller.host in ("", os.uname().nodename)


def summary_in(folder: str) -> dict[str, Any] | None:
    """Read the run's summary.json; None if there is none yet."""
    with contextlib.suppress(OSError), open(fd_of(folder, SUMMARY), "rb") as file:
        return _parsed(file.read(MAX_SUMMARY)) or None
    return None


def _claimed(fd: int) -> tuple[dict[str, Any], bool | None, float]:
    """Read and close a status.json.

    Return it, whether a live controller holds its lock, and when it was saved, in seconds since the epoch.
    """
    with open(fd, "rb", buffering=0) as file:
        locked = _is_locked(fd)  # first: then the read sees what was written before the end
        document = _parsed(file.read(1 << 16).partition(b"\n")[0])  # the rest is of an earlier, longer one
        return document, locked, os.fstat(fd).st_mtime


def _is_locked(fd: int) -> bool | None:
    """Return whether a process has locked a file; None if the file system doesn't support locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if isinstance(error, BlockingIOError) else None
    return False


def _parsed(data: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(data)
        return document if isinstance(document, dict) else {}
    return {}


def _ended_unseen(folder: str, status: Status) -> Status:
    """Return the status of a run whose controller is gone: LOST, unless its job in a queue was cancelled."""
    entry = listed().get(status.run)
    if entry and (job := entry.queued):
        path = starts_path(os.path.dirname(folder), job.id, job.scheduler)
        if is_stopped(path) and [each.run for each in starts_in(path)[-1:]] == [status.run]:
            why = f"{title_of(job.scheduler)} job {job.id} was cancelled"
            return status._replace(state=RunState.CANCELLED, exit_status=CANCELLED_STATUS, why=why)
    return status._replace(state=RunState.LOST, why=_why_lost(folder, status.controller))


def _why_lost(folder: str, controller: ControllerProcess) -> str:
    """Describe how a controller that left no final status may have ended."""
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
