"""Which workers have joined the rendezvous: seen from outside, by their connections to its port."""

from distlaunch.agent.probes import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Optional, Set, Tuple


class Arrivals:
    """Looks, again and again, for connections to the rendezvous `port`.

    The table of connections is read only if one was opened or closed since: with its empty rows it takes
    milliseconds, and on a large machine many. Those that were `counted` before are not looked for.
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
        ours = [found for found in procfs.sockets() if found.remote_port == self._port]
        self._connecting = any(found.state == procfs.SYN_SENT for found in ours)
        return _ranks_with({found.inode for found in ours if found.state == procfs.ESTABLISHED}, workers)


def _ranks_with(inodes: "Set[int]", workers: "Dict[int, int]") -> "Set[int]":
    """The ranks that hold one of these sockets; it may belong to one of a worker's descendants."""
    if not inodes:
        return set()
    found = {rank for rank, pid in workers.items() if procfs.socket_inodes(pid) & inodes}
    for rank in set(workers) - found:
        if any(procfs.socket_inodes(pid) & inodes for pid in procfs.descendants(workers[rank])):
            found.add(rank)
    return found
