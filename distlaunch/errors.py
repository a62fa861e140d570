"""The errors of distlaunch itself, each with its documented exit status.

A worker's failure is recorded as data (`distlaunch.supervisor.nodes.Exited`), not raised as an exception.
"""

import copyreg
import errno
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from distlaunch.agent.frozen import Frozen


class Exit(IntEnum):
    """Exit statuses of distlaunch's own failures. A failed worker's status is passed on.

    Statuses follow sysexits(3) where it defines one; 124 follows timeout(1), and 128+n follows shells.
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 69
    INTERNAL = 70
    NODE_LOST = 71
    PORT_TAKEN = 75
    TIMEOUT = 124
    BROKEN_PIPE = 141


class DistlaunchError(Exception):
    """The base of all errors caused by the user or the environment, not by a bug."""

    exit_status: int = Exit.FAILED

    def __reduce__(self) -> tuple[Any, ...]:
        """Make errors survive pickling, for a process pool; by default, `__init__` would get their text."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class UsageError(DistlaunchError):
    """A command line that doesn't make sense."""

    exit_status = Exit.USAGE


def reason(error: OSError) -> str:
    """Return the system's error message, with advice if the process has run out of file descriptors."""
    words = error.strerror or str(error)
    return f"{words}: raise `ulimit -n`" if error.errno in (errno.EMFILE, errno.ENFILE) else words


class Problem(Frozen):
    """A mistake in a job file: its `line` and `column` from 1 (0 = none), the key's `path`, and `text`."""

    source: str
    line: int
    column: int
    path: str
    text: str

    def __str__(self) -> str:
        place = f"{self.source}:{self.line}:{self.column}" if self.line else self.source
        twice = not self.path or place == f"--set {self.path}"
        return f"{place}: {self.text}" if twice else f"{place}: {self.path}: {self.text}"


class JobError(DistlaunchError):
    """An invalid job file, or an invalid job in it. `problems` contains all problems found."""

    exit_status = Exit.USAGE

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))
