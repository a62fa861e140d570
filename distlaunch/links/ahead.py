"""Opens a link to an agent on this machine before anything else is known: it boots meanwhile."""

import os
import sys
from typing import TYPE_CHECKING

from distlaunch.links import process
from distlaunch.transport.boot import LOCAL, boot_text, candidates_text

if TYPE_CHECKING:
    from distlaunch.links.link import Link


def open_ahead(shares_stdio: bool) -> "Link | None":
    """A link to an agent on this machine, for the first node of a job that is not read yet, if one starts.

    It boots on another core while YAML and the supervisor are imported. If the job does not need it, it sees
    its link end and exits.
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
    from distlaunch.links.bundle import bundle_for  # its interpreter starts meanwhile

    left = _written(child.stdin, left + boot_text(bundle_for(same_interpreter=True), nonce, 0))
    from distlaunch.links.opening import link_here  # it imports what came

    return link_here(child, nonce, left)


def _written(pipe: int, data: bytes) -> bytes:
    """Write what the pipe takes now; the rest."""
    try:
        return data[os.write(pipe, data) :]
    except OSError:
        return data  # it is full; or nobody reads, which the link's end tells
