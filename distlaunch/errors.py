"""Every way distlaunch itself fails, each with its documented exit status.

A failing worker is no exception but data (`distlaunch.supervisor.nodes.Exited`).
"""

import errno
from collections.abc import Sequence
from enum import IntEnum

from distlaunch.agent.frozen import Frozen


class Exit(IntEnum):
    """Exit statuses of distlaunch's own failures; a worker's failure passes its own status on.

    Chosen from sysexits(3) where it has a name for it, 124 and 128+n as timeout(1) and shells use them.
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 69
    INTERNAL = 70
    NODE_LOST = 71
    PORT_TAKEN = 75
    TIMEOUT = 124
    HANGUP = 129
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


class DistlaunchError(Exception):
    """Base of all errors that are the user's or the world's, not a bug."""

    exit_status: int = Exit.FAILED


class UsageError(DistlaunchError):
    """The command line does not make sense."""

    exit_status = Exit.USAGE


def reason(error: OSError) -> str:
    """What the system says, and what to do where it is out of descriptors."""
    words = error.strerror or str(error)
    return f"{words}: raise the limit, `ulimit -n`" if error.errno in (errno.EMFILE, errno.ENFILE) else words


class Problem(Frozen):
    """One mistake in a job file: where (`line` and `column` from 1, 0 = nowhere), `path` and `text`."""

    source: str
    line: int
    column: int
    path: str
    text: str

    def __str__(self) -> str:
        place = f"{self.source}:{self.line}:{self.column}" if self.line else self.source
        return f"{place}: {self.path}: {self.text}" if self.path else f"{place}: {self.text}"


class JobError(DistlaunchError):
    """A job file, or the job it describes, is wrong; carries all problems that were found."""

    exit_status = Exit.USAGE

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))
