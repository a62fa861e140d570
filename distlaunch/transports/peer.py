"""What carries a link that its far end, a launcher that joined, has opened."""

import os
import socket

SILENT_S = 15
"""Seconds without an answer after which a connection counts as dead, as over ssh."""


class Peer:
    """A connection in the place of a link's process; None = one that never was.

    Its far end tells the `status`.
    """

    def __init__(self, sock: socket.socket | None) -> None:
        self.status: int | None = None
        # Nothing comes here: stderr is at its end.
        self.stderr, write = os.pipe()
        os.close(write)
        if sock is None:
            self.stdout, self.stdin = os.dup(self.stderr), os.open(os.devnull, os.O_WRONLY)
            return
        watch_for_silence(sock)
        self.stdout = sock.detach()
        self.stdin = os.dup(self.stdout)  # each is watched by itself

    def poll(self) -> int | None:
        """The status of its far end's agent, once that has ended."""
        return self.status

    def wait(self) -> None:
        """There is no process."""

    def signal(self, signum: int) -> None:
        """End it, whatever the signal."""
        self.kill()

    def signal_group(self, signum: int) -> None:
        """The same."""
        self.kill()

    def kill(self) -> None:
        """Close the connection both ways: its far end stops what it has, and leaves."""
        try:
            with socket.socket(fileno=os.dup(self.stdout)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is gone

    def exit_descriptor(self) -> int:
        """Readable at once: nothing more is told after the end of the connection."""
        return os.dup(self.stderr)

    def close_stdin(self) -> None:
        """Close our half of it."""
        self.kill()

    def close(self) -> None:
        """Let go of it."""
        for fd in (self.stdin, self.stdout, self.stderr):
            os.close(fd)


def watch_for_silence(sock: socket.socket) -> None:
    """Have the kernel end a connection whose other side is gone, and send what is written at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_USER_TIMEOUT", SILENT_S * 1000),
        ("TCP_KEEPIDLE", SILENT_S // 3),
        ("TCP_KEEPINTVL", SILENT_S // 3),
        ("TCP_KEEPCNT", 2),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
