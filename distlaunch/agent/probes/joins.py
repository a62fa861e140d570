"""Which workers have joined the rendezvous: seen from outside, by their connections to its port."""

from distlaunch.agent.probes import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Set


def joined(port: int, workers: "Dict[int, int]") -> "Set[int]":
    """Local ranks with an established connection to the rendezvous `port`.

    `workers` maps local rank → pid. A rank's connection may belong to one of its descendants.
    """
    clients = {
        found.inode
        for found in procfs.sockets()
        if found.remote_port == port and found.state == procfs.ESTABLISHED
    }
    if not clients:
        return set()
    found = {rank for rank, pid in workers.items() if procfs.socket_inodes(pid) & clients}
    for rank in set(workers) - found:
        if any(procfs.socket_inodes(pid) & clients for pid in procfs.descendants(workers[rank])):
            found.add(rank)
    return found
