"""Stops a run from outside, as Ctrl-C would where it was started."""

import contextlib
import os
import pwd
import signal
import time

from distlaunch.runs.folder import Run, run_in
from distlaunch.errors import DistlaunchError
from distlaunch.system.here import send_signal

ANOTHER_WISH_S = 0.2
"""Between two signals that are two wishes: of those that come closer together one counts."""


def interrupt(run: Run, at_once: bool = False) -> bool:
    """Have the run stop, `at_once` by killing its ranks; False if it is over. Raises `DistlaunchError`."""
    owner = os.stat(run.folder).st_uid
    if owner != os.getuid():
        raise DistlaunchError(f"{run.id} belongs to {_user(owner)}: only they can stop it")
    if not _signal(run):
        return False
    if at_once:
        time.sleep(ANOTHER_WISH_S)
        _signal(run)
    return True


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"uid {uid}"


def _signal(run: Run) -> bool:
    """Send its controller a SIGINT, unless it has ended: while it lives, nobody else has its number."""
    return send_signal(run.status.controller.pid, signal.SIGINT, lambda: _alive(run))


def _alive(run: Run) -> bool:
    now = run_in(run.folder)
    return now is not None and now.alive
