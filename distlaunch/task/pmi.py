"""The process manager of MPICH's mpirun, by which tasks tell each other where rank 0 is (PMI-1).

A task asks in lines such as ``cmd=get kvsname=kvs_1 key=a``, on a socket whose descriptor PMI_FD has. So may
the program that it becomes: nothing is initialized here, and nothing finalized.
"""

import os
import re
import socket

from distlaunch.allocation.task import Task
from distlaunch.errors import DistlaunchError
from distlaunch.task.meeting import hold_through_exec

KEY = "distlaunch"
HOST = "MPIR_CVAR_CH3_INTERFACE_HOSTNAME"
"""The name by which mpirun knows this host, and so do the others."""


def node_of(mapping: str, rank: int) -> tuple[int, int] | None:
    """A rank's node and how many there are, of a mapping such as ``(vector,(0,2,8),(2,1,4))``.

    Each block is (first node, nodes, ranks on each); the blocks are dealt again and again.
    """
    blocks = [tuple(map(int, found)) for found in re.findall(r"\((\d+),(\d+),(\d+)\)", mapping)]
    dealt = [
        node for first, nodes, each in blocks for node in range(first, first + nodes) for _ in range(each)
    ]
    return (dealt[rank % len(dealt)], len({*dealt})) if dealt else None


class ProcessManager:
    """Of this task, by the descriptor that it was given; `job` is the name of what belongs together."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self.job = self._ask("cmd=get_my_kvsname")["kvsname"]

    def meet(self, task: Task) -> tuple[str, int]:
        """An address of rank 0's node and a port there that all agree on; rank 0 holds it."""
        if task.rank == 0:
            place = f"{os.environ.get(HOST) or os.uname().nodename}/{hold_through_exec()}"
            self._ask(f"cmd=put kvsname={self.job} key={KEY} value={place}")
        self._ask("cmd=barrier_in")
        host, _, port = self._ask(f"cmd=get kvsname={self.job} key={KEY}")["value"].rpartition("/")
        return "127.0.0.1" if task.on_one_node else host, int(port)

    def node_of(self, rank: int) -> tuple[int, int] | None:
        """The number of a rank's node, and how many nodes there are."""
        said = self._ask(f"cmd=get kvsname={self.job} key=PMI_process_mapping").get("value", "")
        return node_of(said, rank)

    def close(self) -> None:
        """Leave the descriptor to the program."""
        self._socket.detach()

    def _ask(self, line: str) -> dict[str, str]:
        self._socket.sendall(line.encode() + b"\n")
        said = b""
        while not said.endswith(b"\n"):
            piece = self._socket.recv(1)  # no more than the answer: the rest is the program's
            if not piece:
                raise DistlaunchError("mpirun's process manager has ended")
            said += piece
        text = said.decode(errors="replace").strip()
        fields = dict(word.partition("=")[::2] for word in text.split())
        if fields.get("rc", "0") != "0":
            raise DistlaunchError(f"mpirun's process manager refused `{line}`: {text}")
        return fields
