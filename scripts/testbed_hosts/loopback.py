"""Hosts that are sshds on loopback addresses, used if namespaces aren't available.

They share this machine's name and network, so they can't be cut off and can't resolve each other's names.
"""

import contextlib
import socket
from collections.abc import Iterator

from .state import Host

MOST_HOSTS = 250


@contextlib.contextmanager
def held_hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """Plan hosts on free ports, host1 at 127.0.0.1, host2 at 127.0.0.2 …, and hold the ports.

    A socket that is bound but doesn't listen reserves the port for an sshd, because both use SO_REUSEADDR.
    """
    with contextlib.ExitStack() as stack:
        yield tuple(
            Host(f"host{n}", *stack.enter_context(_held(f"127.0.0.{n}"))) for n in range(1, count + 1)
        )


@contextlib.contextmanager
def _held(address: str) -> Iterator[tuple[str, int]]:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((address, 0))
        except OSError:
            holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()
