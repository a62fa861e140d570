"""The rendezvous port on this node: held, tested, its owners named."""

import errno
import os
import socket

from distlaunch.agent.probes import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Optional, Tuple

    from distlaunch.agent.wire import Message

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

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


def hold(port: "Optional[int]") -> Hold:
    """Hold `port`, or one of our choice. Raises OSError (EADDRINUSE) when that is impossible."""
    if port is None:
        return _hold_any()
    try:
        return Hold(_bound(port))
    except OSError as error:
        # Connections of an earlier run in TIME_WAIT block an exclusive bind, but not a TCPStore.
        if error.errno != errno.EADDRINUSE or _listening_inodes(port):
            raise
        return Hold(_bound(port, reuse=True))


def _hold_any() -> Hold:
    # Below the ephemeral range, or a client's own connect to the port could connect to itself.
    highest = _ephemeral_start() - 1
    if highest > LOWEST_PORT:
        for _ in range(TRIES):
            chance = int.from_bytes(os.urandom(4), "big")
            try:
                return Hold(_bound(LOWEST_PORT + chance % (highest + 1 - LOWEST_PORT)))
            except OSError:
                continue
    return Hold(_bound(0))


def _ephemeral_start() -> int:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as limits:
            return int(limits.read().split()[0])
    except (OSError, ValueError):
        return 32768


def _bound(port: int, reuse: bool = False) -> socket.socket:
    """A socket bound to `port` on all addresses of both families, not listening."""
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


def _listening_inodes(port: int) -> "Dict[int, int]":
    """inode → uid of the sockets that listen on `port`."""
    return {
        found.inode: found.uid
        for found in procfs.sockets()
        if found.local_port == port and found.state == procfs.LISTEN
    }


def owners(port: int) -> "List[Message]":
    """Who listens on `port`: {uid, pid, command}; pid is None where we may not look."""
    wanted = _listening_inodes(port)
    found: "List[Message]" = []
    for pid in procfs.pids() if wanted else ():
        for inode in procfs.socket_inodes(pid) & set(wanted):
            found.append({"uid": wanted.pop(inode), "pid": pid, "command": procfs.command_name(pid)})
    hidden = [{"uid": uid, "pid": None, "command": None} for uid in wanted.values()]
    return found + hidden


def strangers(port: int) -> "List[Message]":
    """Who listens on `port` that does not descend from this process, as `owners` names them."""
    ours = {os.getpid(), *procfs.descendants(os.getpid())}
    return [owner for owner in owners(port) if owner["pid"] not in ours]


class Listener:
    """A listener for reachability tests: answers each connection with `token` and closes it.

    Served from a thread, since the agent's own `dial` waits for an answer too.
    """

    def __init__(self, port: "Optional[int]", token: bytes) -> None:
        """Listen on `port`, or on one of our choice. Raises OSError when that is impossible."""
        import threading  # only checks listen

        held = hold(port)
        self.port = held.port
        held.release()
        try:
            self._socket = _bound(held.port, reuse=True)
        finally:
            held.close()
        self._socket.listen(128)
        self._token = token
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                try:
                    connection.send(self._token)
                except OSError:
                    continue  # it did not wait for an answer


def dial_all(targets: "List[Tuple[str, int]]", timeout_s: float, token: bytes) -> "List[List[Message]]":
    """`dial` to each (host, port), all at once."""
    import threading  # only checks dial

    results: "List[List[Message]]" = [[] for _ in targets]

    def one(index: int, host: str, port: int) -> None:
        results[index] = dial(host, port, timeout_s, token)

    threads = [threading.Thread(target=one, args=(i, *target)) for i, target in enumerate(targets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def dial(host: str, port: int, timeout_s: float, token: bytes) -> "List[Message]":
    """Connect to every address of `host`: [{family, address, ok, error}].

    ``ok`` needs the listener's token, so that a stranger's service is never taken for ours; nothing
    is ever sent.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return [{"family": "", "address": host, "ok": False, "error": error.strerror or str(error)}]
    return [_dial_one(family, address, timeout_s, token) for family, _, _, _, address in found]


def _dial_one(family: int, address: "Tuple[object, ...]", timeout_s: float, token: bytes) -> "Message":
    result: "Message" = {"family": "IPv6" if family == socket.AF_INET6 else "IPv4", "address": address[0]}
    sock = socket.socket(family, socket.SOCK_STREAM)
    with sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(address)
            ours = _receive(sock, len(token)) == token
            result.update(ok=ours, error=None if ours else "another service answers there")
        except socket.timeout:
            result.update(ok=False, error="no answer in %g s (a firewall drops it?)" % timeout_s)
        except OSError as error:
            result.update(ok=False, error=error.strerror or str(error))
    return result


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            break
        data += piece
    return data
