"""The rendezvous port, held until the workers start."""

import errno
import os

from distlaunch.agent.lean import socket
from distlaunch.agent.probes.ports import listeners

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

LOWEST_PORT = 10000
TRIES = 64


class Hold:
    """A port bound without listening: nobody else gets it, and rank 0's TCPStore can.

    The TCPStore listens on it once both sides have SO_REUSEADDR, hence `release` just before the
    workers start; until then another user's explicit bind fails as well.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._released = False
        self.port: int = sock.getsockname()[1]

    def answers(self, port: "Optional[int]") -> bool:
        """Whether it is what a request for `port` wants: not given to workers yet, and that port, or any."""
        return not self._released and port in (None, self.port)

    def release(self) -> None:
        """Let a socket with SO_REUSEADDR listen here; others still can't have the port."""
        self._released = True
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def keep(self) -> None:
        """Let the program that this process becomes hold it on."""
        os.set_inheritable(self._socket.detach(), True)

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


def hold(port: "Optional[int]") -> Hold:
    """Hold `port`, or one of our choice. Raises OSError (EADDRINUSE) when that is impossible."""
    if port is None:
        return _hold_any()
    try:
        return Hold(bound(port))
    except OSError as error:
        # Connections of an earlier run in TIME_WAIT block an exclusive bind, but not a TCPStore.
        if error.errno != errno.EADDRINUSE or listeners(port):
            raise
        return Hold(bound(port, reuse=True))


def _hold_any() -> Hold:
    # Below the ephemeral range, or a client's own connect to the port could connect to itself.
    highest = _ephemeral_start() - 1
    if highest > LOWEST_PORT:
        for _ in range(TRIES):
            chance = int.from_bytes(os.urandom(4), "big")
            try:
                return Hold(bound(LOWEST_PORT + chance % (highest + 1 - LOWEST_PORT)))
            except OSError:
                continue
    return Hold(bound(0))


def _ephemeral_start() -> int:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as limits:
            return int(limits.read().split()[0])
    except (OSError, ValueError):
        return 32768


def acceptor(port: int, backlog: int = 1024) -> socket.socket:
    """A socket that listens on `port`, which rank 0's store may do once it is closed. Raises OSError."""
    import socket as whole  # its C half does not accept

    listener = whole.socket(fileno=bound(port, reuse=True).detach())
    try:
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def bound(port: int, reuse: bool = False) -> socket.socket:
    """A socket bound to `port` on all addresses of both families, not listening. Raises OSError."""
    try:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:  # no IPv6 on this node
        return _bind(socket.socket(socket.AF_INET, socket.SOCK_STREAM), "0.0.0.0", port, reuse)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return _bind(sock, "::", port, reuse)


def _bind(sock: socket.socket, address: str, port: int, reuse: bool) -> socket.socket:
    try:
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock
