"""Starts an agent on this machine before the job is read, which takes as long as an agent takes to boot."""

import os
import sys

from distlaunch.transports import process
from distlaunch.transports.boot import LOCAL, boot_text, candidates_text

TYPE_CHECKING = False
if TYPE_CHECKING:  # the sooner an agent starts the better
    from distlaunch.transports.link import Link


def open_ahead(shares_stdio: bool) -> "Link | None":
    """Start an agent on this machine, for the first node of a job; None if that fails.

    It boots on another core while YAML and the supervisor are imported. If the job doesn't need it, `discard`
    the link.
    """
    if sys.platform != "linux":
        return None
    try:
        child = process.start(LOCAL, os.environ, (0, 1) if shares_stdio else ())
    except OSError:
        return None  # if the job needs it, opening it again says why
    os.set_blocking(child.stdin, False)
    nonce = os.urandom(16).hex()
    left = _written(child.stdin, candidates_text([sys.executable, "python3"]))
    from distlaunch.transports.bundle import bundle_for  # its interpreter starts meanwhile

    left = _written(child.stdin, left + boot_text(bundle_for(same_interpreter=True), nonce, 0))
    from distlaunch.transports.link import Link  # it imports what came
    from distlaunch.transports.local import Local
    from distlaunch.transports.streams import OneStream

    link = Link(Local(), child, OneStream([b""], nonce), lambda: left)
    link.flush()
    return link


def _written(pipe: int, data: bytes) -> bytes:
    """Write what the pipe takes now; the rest."""
    try:
        return data[os.write(pipe, data) :]
    except OSError:
        return data  # it is full; or nobody reads, which the link's end tells
