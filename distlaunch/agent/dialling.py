"""Tests which nodes can connect to which: a listener, and connections to others' listeners."""

import socket

from distlaunch.agent.port import acceptor, hold

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Optional, Tuple

    from distlaunch.agent.wire import Message


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
            self._socket = acceptor(held.port)
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
    except (OSError, UnicodeError) as error:  # a name may be too long to be one
        why = error.strerror if isinstance(error, OSError) else "not a host name"
        return [{"family": "", "address": host, "ok": False, "error": why or str(error)}]
    return [_dial_one(family, address, timeout_s, token) for family, _, _, _, address in found]


def _dial_one(family: int, address: "Tuple[object, ...]", timeout_s: float, token: bytes) -> "Message":
    result: "Message" = {"family": "IPv6" if family == socket.AF_INET6 else "IPv4", "address": address[0]}
    sock = socket.socket(family, socket.SOCK_STREAM)
    with sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(address)
            ours = _receive(sock, len(token)) == token
            result.update(ok=ours, error=None if ours else "another service answered")
        except socket.timeout:
            result.update(ok=False, error="no answer within %g s (dropped by a firewall?)" % timeout_s)
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
