"""Which workers have joined the rendezvous: seen from outside, by their connections to its port."""

from distlaunch.agent.probes import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Optional, Set, Tuple


class Arrivals:
    """Looks, again and again, for connections to the rendezvous `port`.

    The table of connections is read only if one was opened or closed since, and a worker has a socket: with
    its empty rows it takes milliseconds, and on a large machine many. Connections that were `counted` before
    are not looked for.
    """

    def __init__(self, port: int, counted: "Optional[Tuple[bytes, ...]]" = None) -> None:
        self._port, self._seen = port, counted
        self._connecting = False

    def look(self, workers: "Dict[int, int]") -> "Set[int]":
        """Local ranks of those `workers` (local rank → pid) that have joined, as far as this look tells."""
        counted = procfs.connections_counted()
        if counted and counted == self._seen and not self._connecting:
            return set()
        self._seen = counted
        # The socket may belong to one of a worker's descendants.
        held = {rank: procfs.socket_inodes(pid, *procfs.descendants(pid)) for rank, pid in workers.items()}
        if not any(held.values()):
            self._connecting = False
            return set()
        ours = [found for found in procfs.sockets() if found.remote_port == self._port]
        self._connecting = any(found.state == procfs.SYN_SENT for found in ours)
        joined = {found.inode for found in ours if found.state == procfs.ESTABLISHED}
        return {rank for rank, inodes in held.items() if inodes & joined}
