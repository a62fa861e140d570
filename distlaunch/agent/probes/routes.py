"""The route from this node to an address, and the interfaces here."""

import fcntl
import os
import struct

from distlaunch.agent.lean import socket
from distlaunch.agent.messages import RouteFailed, RouteFound

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Tuple, Union

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LINK_LOCAL = "20"
"""The scope of addresses that each interface gives itself, in /proc/net/if_inet6."""
SIOCGIFADDR = 0x8915
"""ioctl that gives an interface's first IPv4 address (netdevice(7))."""


def route(host: str) -> "Union[RouteFound, RouteFailed]":
    """The way to `host`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        source = _source(family, address)
    except UnicodeError:
        return RouteFailed(host, "not a host name")
    except OSError as error:
        return RouteFailed(host, error.strerror or str(error))
    named = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return RouteFound(host, str(address[0]), source, interface_of(source), interfaces(), named)


def _source(family: int, address: "Tuple[Any, ...]") -> str:
    """The address from which this node reaches another."""
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.connect(address)  # UDP: looks the route up, sends nothing
        return str(sock.getsockname()[0])
    finally:
        sock.close()


def interfaces() -> "Dict[str, bool]":
    """Every interface, with whether it has an address that other machines could know."""
    ipv4 = _ipv4_addresses()
    ipv6 = {row[5] for row in _ipv6_rows() if row[3] != LINK_LOCAL}
    return {name: name in ipv4 or name in ipv6 for _, name in socket.if_nameindex()}


def interface_of(address: str) -> "Optional[str]":
    """The interface that carries `address`, or None."""
    if ":" in address:
        return _interface_of_ipv6(address)
    wanted = socket.inet_aton(address)
    if wanted[0] == 127:
        return "lo"
    return next((name for name, address in _ipv4_addresses().items() if address == wanted), None)


def _ipv4_addresses() -> "Dict[str, bytes]":
    """Interface → its first IPv4 address, where it has one."""
    found = {}
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _, name in socket.if_nameindex():
        try:
            answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            continue  # no IPv4 address
        found[name] = answer[20:24]
    sock.close()
    return found


def _interface_of_ipv6(address: str) -> "Optional[str]":
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    return next((row[5] for row in _ipv6_rows() if row[0] == wanted), None)


def _ipv6_rows() -> "List[List[str]]":
    try:
        with open("/proc/net/if_inet6") as table:
            return [row.split() for row in table]
    except OSError:
        return []
