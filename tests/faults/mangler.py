"""Passes a connection on and mangles what comes back: ``mangler.py HOW HOST PORT FIFO``, as a ProxyCommand.

HOW is `sliced` (at once), or what happens as soon as FIFO has been opened for writing and closed again:
`truncated` (half of what comes next, then the end) or `corrupt` (the last bit of what comes next is wrong).
"""

import os
import select
import socket
import sys

READ, SLICE = 1 << 16, 7


def main(how: str, host: str, port: str, fifo: str) -> None:
    """Pass bytes on until either side ends."""
    peer = socket.create_connection((host, int(port)))
    begin = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    begun = how == "sliced"
    while True:
        ready, _, _ = select.select([0, peer.fileno(), *([] if begun else [begin])], [], [])
        begun = begun or begin in ready
        if 0 in ready and not passed_on(os.read(0, READ), peer.fileno()):
            return
        if peer.fileno() in ready:
            data = peer.recv(READ)
            if not all(passed_on(part, 1) for part in (mangled(how, data) if begun else [data])):
                return


def mangled(how: str, data: bytes) -> list[bytes]:
    """What is passed on in place of `data`; an empty part is the end."""
    if how == "sliced":
        return [data[start : start + SLICE] for start in range(0, max(1, len(data)), SLICE)]
    if how == "truncated":
        return [data[: len(data) // 2], b""]
    return [data[:-1] + bytes([data[-1] ^ 1]) if data else b""]


def passed_on(data: bytes, fd: int) -> bool:
    """Write all of `data`; whether there was any."""
    rest = data
    while rest:
        rest = rest[os.write(fd, rest) :]
    return bool(data)


if __name__ == "__main__":
    main(*sys.argv[1:])
