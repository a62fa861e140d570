"""Pipes that hold more than the usual 64 KiB."""

import fcntl

F_SETPIPE_SZ = 1031
"""Of Linux; fcntl has its name since Python 3.10."""
SIZE = 1 << 20
"""Bytes that the pipes of a link hold, where it has some."""


def widen(pipe: int, size: int = SIZE) -> None:
    """Have a pipe hold so many bytes, where that is allowed."""
    try:
        fcntl.fcntl(pipe, F_SETPIPE_SZ, size)
    except OSError:
        pass  # not more than /proc/sys/fs/pipe-max-size; or it is a socket
