"""Pipes that hold more than the usual 64 KiB and never block, and memory for what passes through them."""

import fcntl
import io
import os
import sys

F_SETPIPE_SZ = 1031
"""Of Linux; fcntl has its name since Python 3.10."""
SIZE = 1 << 20
"""Bytes that the pipes of a link hold, where it has some."""
KEPT = 8 << 20
"""Bytes: more than one block of output by far, and less than glibc still takes for a hint, 32 MiB."""


def keep_memory() -> None:
    """Have this process keep up to twice KEPT of what it frees: output comes in blocks that are soon gone.

    glibc's malloc gives back what is free beyond twice the largest block it has unmapped so far. The next
    blocks then have their pages zeroed and faulted in again: a fifth of the time it takes to pass output on.
    Elsewhere this does nothing.
    """
    try:
        bytes(KEPT)  # mapped, unmapped at once, and never touched
    except MemoryError:
        pass  # a limit on address space: it was but a hint


def widen(pipe: int, size: int = SIZE) -> None:
    """Have a pipe hold so many bytes, where that is allowed."""
    try:
        fcntl.fcntl(pipe, F_SETPIPE_SZ, size)
    except OSError:
        pass  # not more than /proc/sys/fs/pipe-max-size; or it is a socket


def read_ahead() -> bytes:
    """What stdin has behind that from which we were booted: some of it may have been read with that."""
    os.set_blocking(0, False)
    stdin = sys.stdin.buffer
    assert isinstance(stdin, io.BufferedReader)
    return stdin.read1(SIZE) or b""


def written(pipe: int, unsent: bytearray) -> bool:
    """Write what the pipe takes now, which is then gone from `unsent`; whether that was all.

    Raises OSError when nobody reads any more.
    """
    try:
        while unsent:
            del unsent[: os.write(pipe, unsent)]
    except BlockingIOError:
        return False
    return True
