"""The route from this node to an address, and the interfaces on the way."""

import fcntl
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from distlaunch.agent.wire import Message

SIOCGIFADDR = 0x8915
"""ioctl that gives an interface's first IPv4 address (netdevice(7))."""


def route(host: str) -> "Message":
    """{address, source, interface} of the route to `host`, or {error} when it can't be resolved."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)  # UDP: looks the route up, sends nothing
            source = str(sock.getsockname()[0])
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"address": address[0], "source": source, "interface": interface_of(source)}


def interface_of(address: str) -> "Optional[str]":
    """The interface that carries `address`, or None."""
    if ":" in address:
        return _interface_of_ipv6(address)
    wanted = socket.inet_aton(address)
    if wanted[0] == 127:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # no IPv4 address
            if answer[20:24] == wanted:
                return name
    return None


def _interface_of_ipv6(address: str) -> "Optional[str]":
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    try:
        with open("/proc/net/if_inet6") as table:
            rows = [row.split() for row in table]
    except OSError:
        return None
    return next((row[5] for row in rows if row[0] == wanted), None)
