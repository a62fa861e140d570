"""The network of a node: rendezvous port, listeners, routes to other nodes, and reachability."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct

from distlaunch.agent import procfs
from distlaunch.agent.messages import Dial, RouteFailed, RouteFound
from distlaunch.agent.wire import Message

LOWEST_PORT = 10000
TRIES = 64
LARGE = 9216
"""Bytes that follow a token, enough to fill packets at any common MTU."""
BACKLOG = 1024
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LINK_LOCAL = "20"
"""The scope in /proc/net/if_inet6 of link-local addresses, which every interface assigns itself."""
SIOCGIFADDR = 0x8915
"""The ioctl that returns the first IPv4 address of an interface (netdevice(7))."""


def machine() -> str:
    """Return an ID of this host that doesn't depend on its name; "" = unknown.

    The first report of an agent contains the ID, so two names of one host are detected, and so is another
    host under the name of a lost one. Containers count as separate hosts, and so do SSH servers at different
    loopback addresses. The first words are the boot ID and the network namespace.
    """
    server = os.environ.get("SSH_CONNECTION", "").split()[2:]
    try:
        parts = [procfs.boot_id(), *(os.readlink("/proc/self/ns/%s" % each) for each in ("net", "uts"))]
    except OSError:
        return ""
    return parts[0] and " ".join(parts + (server if server and server[0].startswith("127.") else []))


def claim(name: str) -> socket.socket | None:
    """Claim a name on this host until the socket returned is closed; None = another process has claimed it.

    The name is in the kernel's abstract namespace (unix(7)), of which each network namespace has its own, as
    it has of ports. Where such names are forbidden, every claim succeeds. None is also returned if no more
    files can be opened.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:
        return None
    try:
        sock.bind("\0distlaunch-" + name)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            sock.close()
            return None
    return sock


# The rendezvous port


class Hold:
    """A port bound without listening: no other program can take it, except the TCPStore of rank 0.

    An agent holds ports once it receives `HoldPort`. The TCPStore can listen on the port once both sockets
    have SO_REUSEADDR, so call `release` just before the workers start. Until then, even an explicit bind by
    another user fails. `further` free ports are held the same way.
    """

    def __init__(self, port: int | None, further: int = 0) -> None:
        """Hold `port`, or a free port if it is None. Raises OSError (EADDRINUSE) if that is impossible."""
        self.socket = _any_bound() if port is None else _bound_again(port)
        self._all = [self.socket, *[_any_bound() for _ in range(further)]]
        self.port, *self.further = [int(sock.getsockname()[1]) for sock in self._all]
        self._released = False

    def answers(self, port: int | None, further: int) -> bool:
        """Return whether this unused hold satisfies a request for `port` (None = any) and `further` ports."""
        return not self._released and port in (None, self.port) and further == len(self.further)

    def release(self) -> None:
        """Allow a socket with SO_REUSEADDR to listen on the port. Other sockets still can't bind to it."""
        self._released = True
        for sock in self._all:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def close(self) -> None:
        """Free the ports for other programs."""
        for sock in self._all:
            sock.close()


def acceptor(port: int) -> socket.socket:
    """Listen on `port` for launchers, so that rank 0's store can listen on it later. Raises OSError."""
    listener = _bound(port, reuse=True)
    try:
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _bound_again(port: int) -> socket.socket:
    try:
        return _bound(port)
    except OSError as error:
        # Connections in TIME_WAIT from an earlier run block an exclusive bind, but not a TCPStore.
        if error.errno != errno.EADDRINUSE or _listeners(port):
            raise
        return _bound(port, reuse=True)


def _any_bound() -> socket.socket:
    """Return a socket bound to a free port, which is random if possible. Raises OSError."""
    # Below the ephemeral range, because a client that connects to a port in that range could reach itself.
    limits = procfs.contents("/proc/sys/net/ipv4/ip_local_port_range").split()
    highest = int(limits[0] if limits else 32768) - 1
    if highest > LOWEST_PORT:
        for _ in range(TRIES):
            chance = int.from_bytes(os.urandom(4), "big")
            try:
                return _bound(LOWEST_PORT + chance % (highest + 1 - LOWEST_PORT))
            except OSError:
                continue
    return _bound(0)


def _bound(port: int, reuse: bool = False) -> socket.socket:
    """Bind a socket to `port` on all addresses of both families, without listening. Raises OSError."""
    try:
        sock, address = socket.socket(socket.AF_INET6, socket.SOCK_STREAM), "::"
    except OSError:  # no IPv6 on this node
        sock, address = socket.socket(socket.AF_INET, socket.SOCK_STREAM), "0.0.0.0"
    try:
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


# Listeners


def owners(port: int) -> list[Message]:
    """Return the listeners on `port` as {uid, pid, command}. pid is None if it isn't visible."""
    wanted = _listeners(port)
    found: list[Message] = []
    for pid in procfs.pids() if wanted else ():
        held = procfs.socket_inodes([pid]) & set(wanted)
        name = procfs.command_name(pid) if held else ""
        found += [{"uid": wanted.pop(inode), "pid": pid, "command": name} for inode in held]
    hidden = [{"uid": uid, "pid": None, "command": None} for uid in wanted.values()]
    return found + hidden


def strangers(port: int) -> list[Message]:
    """Return the listeners on `port` that don't descend from this process, in the format of `owners`."""
    ours = procfs.family(os.getpid())
    return [owner for owner in owners(port) if owner["pid"] not in ours]


def _listeners(port: int) -> dict[int, int]:
    """Map the inodes of the sockets that listen on `port` to UIDs."""
    listening = [found for found in procfs.sockets() if found.state == procfs.LISTEN]
    return {found.inode: found.uid for found in listening if found.local_port == port}


# Routes and interfaces


def is_address(host: str) -> bool:
    """Return whether `host` is an IP address rather than a name."""
    try:
        return bool(socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST))
    except (OSError, UnicodeError):
        return False


def route(node: int, host: str) -> RouteFound | RouteFailed:
    """Find the route to `host`, to answer `FindRoute`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)  # UDP: looks up the route, sends nothing
            source = str(sock.getsockname()[0])
    except UnicodeError:
        return RouteFailed(node, host, "not a host name")
    except OSError as error:
        return RouteFailed(node, host, error.strerror or str(error))
    named = tuple([(name, os.environ[name]) for name in VARIABLES if name in os.environ])
    return RouteFound(node, host, str(address[0]), interface_of(source), source, interfaces(), named)


def interfaces() -> tuple[tuple[str, bool], ...]:
    """Return every interface, and whether it has an address that other hosts can use."""
    ipv4 = _ipv4_addresses()
    ipv6 = {row[5] for row in _ipv6_rows() if row[3] != LINK_LOCAL}
    return tuple([(name, name in ipv4 or name in ipv6) for _, name in socket.if_nameindex()])


def interface_of(address: str) -> str | None:
    """Return the interface that carries `address`, or None if there is none."""
    if ":" in address:
        digits = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        return next((row[5] for row in _ipv6_rows() if row[0] == digits), None)
    wanted = socket.inet_aton(address)
    if wanted[0] == 127:
        return "lo"
    return next((name for name, address in _ipv4_addresses().items() if address == wanted), None)


def _ipv4_addresses() -> dict[str, bytes]:
    """Map interfaces to their first IPv4 addresses, if they have any."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            found[name] = answer[20:24]
    return found


def _ipv6_rows() -> list[list[str]]:
    return [row.split() for row in procfs.contents("/proc/net/if_inet6").decode().splitlines()]


# Reachability between nodes


def listen(port: int | None, token: bytes) -> int:
    """From now on, answer each connection to `port`; None = a free port. Return the port. Raises OSError.

    The answer is `token` in a small packet, then large packets, which a path with a smaller MTU may lose.

    This executes `Listen`, a command of the port check. It uses a thread, because `dial` in the same agent
    also waits for an answer.
    """
    import threading  # needed only for checks

    held = Hold(port)
    held.release()
    held.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * LARGE)  # sending must not block
    held.socket.listen(BACKLOG)

    def serve() -> None:
        while True:
            connection, _ = held.socket.accept()
            with connection:
                try:
                    connection.send(token)
                    connection.send(bytes(LARGE))
                except OSError:
                    continue  # the client did not wait for the answer

    threading.Thread(target=serve, daemon=True).start()
    return held.port


def dial_all(
    targets: tuple[tuple[str, int], ...], timeout_s: float, token: bytes
) -> tuple[tuple[Dial, ...], ...]:
    """Call `dial` for each (host, port), all at once, and return the results in order.

    This executes `DialAll`, a command of the port check. It blocks the agent's loop until all calls return.
    """
    from concurrent.futures import ThreadPoolExecutor  # needed only for checks

    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        answers = [pool.submit(dial, host, port, timeout_s, token) for host, port in targets]
    return tuple([answer.result() for answer in answers])


def dial(host: str, port: int, timeout_s: float, token: bytes) -> tuple[Dial, ...]:
    """Connect to every address of `host`.

    The listener must send its token, which no other service does. `dial` itself sends nothing.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a name may be too long for a host name
        why = error.strerror if isinstance(error, OSError) else "not a host name"
        return (Dial(host, "", why or str(error)),)
    return tuple([_dial_one(family, address, timeout_s, token) for family, _, _, _, address in found])


def _dial_one(family: int, address: tuple[object, ...], timeout_s: float, token: bytes) -> Dial:
    """Connect to one address, and wait for the token and for the large packets after it."""
    dialed = Dial(str(address[0]), "IPv6" if family == socket.AF_INET6 else "IPv4", None)
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        lost = "no answer within %g s (dropped by a firewall?)"
        try:
            sock.connect(address)
            with sock.makefile("rb") as answer:
                if answer.read(len(token)) != token:
                    return dialed._replace(error="another service answered")
                lost = "only small packets arrive within %g s (is the MTU smaller on the way?)"
                answer.read(LARGE)
        except socket.timeout:
            return dialed._replace(error=lost % timeout_s)
        except OSError as error:
            return dialed._replace(error=error.strerror or str(error))
    return dialed
