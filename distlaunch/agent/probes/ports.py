"""Who listens on a port of this node."""

import os

from distlaunch.agent.probes import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List

    from distlaunch.agent.wire import Message


def listeners(port: int) -> "Dict[int, int]":
    """inode → uid of the sockets that listen on `port`."""
    return {
        found.inode: found.uid
        for found in procfs.sockets()
        if found.local_port == port and found.state == procfs.LISTEN
    }


def owners(port: int) -> "List[Message]":
    """Who listens on `port`: {uid, pid, command}; pid is None where we may not look."""
    wanted = listeners(port)
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
