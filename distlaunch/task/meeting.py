"""How tasks agree on a port: rank 0 holds a free one and tells all others, once each, and is gone then.

Nobody tells them where rank 0 listens meanwhile: they try the same few ports, drawn from the step's id, and
believe only an answer that begins with it.
"""

import hashlib
import os
import select
import socket
import time
from collections.abc import Callable
from itertools import product

from distlaunch.agent.port import Hold, acceptor, hold
from distlaunch.allocation.task import Task
from distlaunch.errors import DistlaunchError, Exit

LOWEST, PORTS, CANDIDATES = 10_000, 20_000, 8
"""Below the ports that the system gives to connections."""
WAIT_S, TELL_S = 600.0, 15.0
"""For all tasks to come; until we say who has not."""
TRY_S = 2.0
RETRY_S, RETRY_MOST_S = 0.01, 0.5


class TaskError(DistlaunchError):
    """The tasks have not met."""

    exit_status = Exit.TIMEOUT


def meet(task: Task, say: Callable[[str], object]) -> tuple[str, int]:
    """An address of rank 0's node and a port there that all agree on; rank 0 holds it, also after an exec."""
    if task.rank != 0:
        return _ask(task)
    held = hold(None)
    if task.size > 1:
        _tell_all(task, held.port, say)
    keep_through_exec(held)
    return _addresses(task)[0], held.port


def _addresses(task: Task) -> tuple[str, ...]:
    return ("127.0.0.1",) if task.on_one_node else task.addresses


def hold_through_exec() -> int:
    """A port that rank 0's store can listen on, also after an exec, and nobody else."""
    held = hold(None)
    keep_through_exec(held)
    return held.port


def keep_through_exec(held: Hold) -> None:
    """Let rank 0's store listen there, and nobody else."""
    held.release()
    held.keep()


def candidates(step: str) -> list[int]:
    """Where rank 0 listens until all have asked: the first of them that is free."""
    digest = hashlib.sha256(step.encode()).digest()
    return [LOWEST + int.from_bytes(digest[2 * i : 2 * i + 2], "big") % PORTS for i in range(CANDIDATES)]


def _tell_all(task: Task, port: int, say: Callable[[str], object]) -> None:
    missing, began, told = set(range(1, task.size)), time.monotonic(), False
    answer = f"{_greeting(task)} {port}\n".encode()
    with _listening(task) as listener:
        while missing:
            passed = time.monotonic() - began
            if passed > WAIT_S:
                raise TaskError(f"{_named(missing)} did not come within {WAIT_S:.0f} s")
            if passed > TELL_S and not told:
                told = True
                say(f"waiting for {_named(missing)}")
            if select.select([listener], [], [], 1.0)[0]:
                missing -= _served(listener, answer)


def _listening(task: Task) -> socket.socket:
    for port in candidates(task.step):
        try:
            listener = acceptor(port)
            listener.listen(min(task.size, 1024))
            return listener
        except OSError:
            continue
    tried = ", ".join(map(str, candidates(task.step)))
    raise TaskError(f"none of the ports {tried} is free here; set MASTER_ADDR and MASTER_PORT")


def _served(listener: socket.socket, answer: bytes) -> set[int]:
    """The rank that has asked, if the peer was one."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(TRY_S)
        try:
            asked = connection.recv(16)
            connection.sendall(answer)
        except OSError:
            return set()
        return {int(asked)} if asked.strip().isdigit() else set()


def _ask(task: Task) -> tuple[str, int]:
    addresses = _addresses(task)
    deadline, wait_s, why = time.monotonic() + WAIT_S, RETRY_S, ""
    while time.monotonic() < deadline:
        for address, port in product(addresses, candidates(task.step)):
            try:
                if found := _asked(task, address, port):
                    return address, found
            except OSError as error:
                why = error.strerror or str(error)
        time.sleep(wait_s)
        wait_s = min(wait_s * 1.5, RETRY_MOST_S)
    raise TaskError(f"rank 0 on {addresses[0]} did not answer within {WAIT_S:.0f} s: {why}")


def _asked(task: Task, address: str, port: int) -> int | None:
    with socket.create_connection((address, port), timeout=TRY_S) as connection:
        connection.sendall(b"%-16d" % task.rank)
        said = b""
        while not said.endswith(b"\n") and (piece := connection.recv(256)):
            said += piece
    greeting, _, told = said.decode(errors="replace").strip().rpartition(" ")
    return int(told) if greeting == _greeting(task) and told.isdigit() else None


def _greeting(task: Task) -> str:
    return f"distlaunch {task.step} {task.restarts} {os.getuid()}"


def _named(ranks: set[int]) -> str:
    from distlaunch.wording import spans

    return f"rank{'s' if len(ranks) > 1 else ''} {spans(sorted(ranks))}"
