"""Locks on files, among processes and, if the file system shows them there, among hosts."""

from __future__ import annotations

import errno
import fcntl
import time

LOCK_S = 2.0
"""Seconds to wait for a lock that others hold for milliseconds. A host that crashed may hold one for ever."""
_RETRY_S = 0.02


def lock(fd: int, how: int, within_s: float = 0.0) -> bool | None:
    """Lock a file with LOCK_EX or LOCK_SH, and return whether that was possible within some seconds.

    Return None if the file system doesn't support locks.
    """
    until = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return None
        if time.monotonic() >= until:
            return False
        time.sleep(_RETRY_S)  # a flock that waits has no time limit, and resumes after signals
