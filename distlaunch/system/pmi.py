"""MPICH's process manager (PMI-1), by which the tasks of a job learn of each other.

A task asks in lines such as ``cmd=get kvsname=kvs_1 key=a``, on a socket whose descriptor PMI_FD has. The
program that follows talks on it, too: nothing is initialized here, and nothing finalized.
"""

import os
import re
import socket

from distlaunch.errors import DistlaunchError
from distlaunch.schedulers.task import Task

KEY = "distlaunch"
HOST = "MPIR_CVAR_CH3_INTERFACE_HOSTNAME"
"""The name by which mpirun knows this host, and so do the others."""


def located(task: Task, descriptor: int) -> Task:
    """The task with what its process manager tells: the job's name, its node, and the host of rank 0."""
    with socket.socket(fileno=os.dup(descriptor)) as manager:
        job = _ask(manager, "cmd=get_my_kvsname")["kvsname"]
        if task.rank == 0:
            host = os.environ.get(HOST) or os.uname().nodename
            _ask(manager, f"cmd=put kvsname={job} key={KEY} value={host}")
        _ask(manager, "cmd=barrier_in")
        host = _ask(manager, f"cmd=get kvsname={job} key={KEY}")["value"]
        mapping = _ask(manager, f"cmd=get kvsname={job} key=PMI_process_mapping").get("value", "")
    node, count = node_of(mapping, task.rank) or (None, None)
    return task._replace(step=job, job=job, node_rank=node, node_count=count, addresses=(host,))


def node_of(mapping: str, rank: int) -> tuple[int, int] | None:
    """A rank's node and how many there are, of a mapping such as ``(vector,(0,2,8),(2,1,4))``.

    Each block is (first node, nodes, ranks on each); the blocks are dealt again and again.
    """
    blocks = [tuple(map(int, found)) for found in re.findall(r"\((\d+),(\d+),(\d+)\)", mapping)]
    dealt = [
        node for first, nodes, each in blocks for node in range(first, first + nodes) for _ in range(each)
    ]
    return (dealt[rank % len(dealt)], len({*dealt})) if dealt else None


def _ask(manager: socket.socket, line: str) -> dict[str, str]:
    manager.sendall(line.encode() + b"\n")
    said = b""
    while not said.endswith(b"\n"):
        piece = manager.recv(1)  # no more than the answer: the rest is the program's
        if not piece:
            raise DistlaunchError("mpirun's process manager has exited")
        said += piece
    text = said.decode(errors="replace").strip()
    fields = dict(word.partition("=")[::2] for word in text.split())
    if fields.get("rc", "0") != "0":
        raise DistlaunchError(f"mpirun's process manager refused `{line}`: {text}")
    return fields
