"""What is begun before a job is read, which takes as long as an agent takes to boot, or ssh to log in.

For a job on this machine that is an agent. For one on others it is what the same command began the last time,
if the job file has not changed since; its command lines are kept in the user's cache. What the job turns out
not to need is ended: its hosts were only logged in to.
"""

import os
import sys
from collections.abc import Sequence

from distlaunch.links import process
from distlaunch.transport.boot import LOCAL, boot_text, candidates_text

TYPE_CHECKING = False
if TYPE_CHECKING:  # the sooner an agent starts the better
    from distlaunch.links.begun import Ahead


def begin_again(words: Sequence[str], job: str) -> "Ahead":
    """Begin what the command line `words` began the last time, for the job file of that path."""
    from distlaunch.links.begun import Ahead, Memory

    try:
        state, here = os.stat(job), os.getcwd()
    except OSError:
        return Ahead()  # it is told when the job is read
    key = [here, list(words), state.st_mtime_ns, state.st_size, state.st_ino]
    return Ahead(memory=Memory(repr((here, words)), key))


def open_ahead(shares_stdio: bool) -> "Ahead | None":
    """An agent on this machine, for the first node of a job, if one starts.

    It boots on another core while YAML and the supervisor are imported.
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
    from distlaunch.links.begun import Ahead  # it imports what came
    from distlaunch.links.opening import link_here

    return Ahead(link_here(child, nonce, left))


def _written(pipe: int, data: bytes) -> bytes:
    """Write what the pipe takes now; the rest."""
    try:
        return data[os.write(pipe, data) :]
    except OSError:
        return data  # it is full; or nobody reads, which the link's end tells
