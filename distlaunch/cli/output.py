"""Prints results on stdout and messages on stderr."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

from distlaunch.errors import DistlaunchError, Exit
from distlaunch.here import reaches_terminal
from distlaunch.wording import json_text


class ReaderLeftError(DistlaunchError):
    """Stdout is a pipe that its reader has closed, so nothing is left to do or to report."""

    exit_status = Exit.BROKEN_PIPE


class UnwritableError(DistlaunchError):
    """Stdout isn't writable, for example because the disk is full."""


@contextlib.contextmanager
def while_read() -> Iterator[None]:
    """Raise `ReaderLeftError` if stdout's reader closes the pipe, and `UnwritableError` if the disk is full.

    Buffered output is dropped.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 1)
        if isinstance(error, BrokenPipeError):
            raise ReaderLeftError from None
        raise UnwritableError(f"can't write to stdout: {error.strerror}") from None


def fill_standard_descriptors() -> None:
    """Open /dev/null for each closed standard stream. Otherwise, a pipe would get the stream's number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    # Python sets its own streams to None.
    sys.stdin, sys.stdout = sys.stdin or os.fdopen(0), sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def print_json(document: object) -> None:
    """Print a JSON document on stdout."""
    print_text(json_text(document, indent=2))


def print_text(text: str) -> None:
    """Print `text` on stdout; escaped on a terminal, because results may contain text from files.

    If the reader closes the pipe, the command exits with the status that shells use.
    """
    text = _shown(text, 1)
    with while_read():
        sys.stdout.write(text)
        sys.stdout.flush()


def print_raw(data: bytes) -> None:
    """Print `data` on stdout unchanged."""
    with while_read():
        sys.stdout.buffer.write(data)
        sys.stdout.flush()


def print_run(run: str) -> None:
    """Print the ID of a run that continues in the background; on stderr, if stdout can't be written."""
    try:
        print_text(f"{run}\n")
    except UnwritableError:
        say(f"{run} runs in the background")
        raise


def say(text: str) -> None:
    """Print a message on stderr, if possible; escaped on a terminal, because messages may quote files."""
    with contextlib.suppress(OSError):  # a full disk must not stop a job, or change an exit status
        for line in _shown(text, 2).splitlines():
            print(f"distlaunch: {line}", file=sys.stderr)


def _shown(text: str, fd: int) -> str:
    if not reaches_terminal(fd):
        return text
    from distlaunch.observers.console import escape

    return escape(text)
