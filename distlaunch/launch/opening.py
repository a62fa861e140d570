"""Opens the links to the nodes of a job: the transport's command line, the interpreters, the agent's text."""

import contextlib
import os
import sys

from distlaunch.errors import DistlaunchError, reason
from distlaunch.job.spec import JobSpec
from distlaunch.rim.bundle import bundle_for
from distlaunch.rim.here import runs_ranks
from distlaunch.rim.link import Link
from distlaunch.transport.boot import boot_text, candidates_text
from distlaunch.transport.kinds import Transport
from distlaunch.transport.local import Local

NO_RANKS_HERE = "ranks run on Linux only, and this is another system: name Linux hosts in nodes"


def open_ahead(shares_stdio: bool) -> Link | None:
    """A link to an agent on this machine, for the first node of a job that is yet to be read.

    It boots (17 ms) on another core while Typer and YAML are imported. Where the job does not need it, it
    sees the end of its link and leaves.
    """
    try:
        return _open(Local(), None, 0, shares_stdio)
    except DistlaunchError:
        return None  # who needs it is told why when it tries again


def open_link(spec: JobSpec, index: int) -> Link:
    """Start the transport to node `index`; its agent will say hello."""
    node = spec.pool[index]
    return _open(node.reach, node.python or spec.python, index, spec.invocation.shares_stdio)


def open_links(spec: JobSpec, early: Link | None = None) -> dict[int, Link]:
    """Start the transports to all nodes; the first node takes the `early` one, if it can."""
    links: dict[int, Link] = {}
    first = spec.nodes[0]
    if early and first.local and (first.python or spec.python) in (None, sys.executable):
        links[0] = early
    elif early:
        early.discard()
    return links | {index: open_link(spec, index) for index in range(len(links), len(spec.pool))}


def _open(reach: Transport, named_python: str | None, index: int, shares: bool = False) -> Link:
    if reach.here and not runs_ranks():
        raise DistlaunchError(NO_RANKS_HERE)
    interpreters = [named_python] if named_python else [sys.executable, "python3"]
    nonce = os.urandom(16).hex()

    def boot() -> bytes:
        return boot_text(
            bundle_for(same_interpreter=reach.here and named_python in (None, sys.executable)), nonce, index
        )

    if reach.folder:
        _make_folder(reach.folder)
    try:
        return Link(reach, candidates_text(interpreters), boot, nonce, (0, 1) if shares else ())
    except OSError as error:
        raise DistlaunchError(f"can't start {reach.argv()[0]}: {reason(error)}") from None


def _make_folder(path: str) -> None:
    """Make a folder of the user's; the home is that of the user database, as ssh has it."""
    from pwd import getpwuid  # few transports need one

    with contextlib.suppress(OSError, KeyError):  # the transport says what it lacks
        os.mkdir(path.replace("~", getpwuid(os.geteuid()).pw_dir, 1), 0o700)
