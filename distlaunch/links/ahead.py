"""Opens a link to an agent on this machine before anything else is known: it boots meanwhile."""

import os
import sys
from typing import TYPE_CHECKING

from distlaunch.links import process
from distlaunch.transport.boot import LOCAL

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
    from distlaunch.links.opening import link_here  # its interpreter starts meanwhile

    return link_here(child)
