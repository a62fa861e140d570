"""Who has connected to a port, as seen from outside: what is looked at, and when it need not be."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from distlaunch.agent import procfs
from distlaunch.agent.watches import Arrivals
from tests.harness import PATIENCE_S

CONNECTS = """
import socket, sys
sys.stdin.readline()
peer = socket.socket()
print("connecting", flush=True)
peer.connect(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        yield listening


@pytest.fixture
def worker(server: socket.socket) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", CONNECTS, str(server.getsockname()[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def says(worker: "subprocess.Popen[str]", word: str) -> None:
    assert worker.stdout
    assert worker.stdout.readline() == f"{word}\n"


def go(worker: "subprocess.Popen[str]") -> None:
    assert worker.stdin
    print(file=worker.stdin, flush=True)
    says(worker, "connecting")


def test_a_rank_is_seen_to_join_at_the_next_look(
    server: socket.socket, worker: "subprocess.Popen[str]"
) -> None:
    arrivals = Arrivals(server.getsockname()[1])
    assert arrivals.look({3: worker.pid}) == set()
    go(worker)
    says(worker, "connected")
    assert arrivals.look({3: worker.pid}) == {3}


def test_a_connection_that_takes_its_time_is_looked_at_again(
    server: socket.socket, worker: "subprocess.Popen[str]"
) -> None:
    port = server.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):  # the queue is full: a SYN is dropped, and sent again
        arrivals = Arrivals(port)
        go(worker)
        deadline = time.monotonic() + PATIENCE_S
        while not any(s.state == procfs.SYN_SENT and s.remote_port == port for s in procfs.sockets()):
            assert time.monotonic() < deadline
        assert arrivals.look({0: worker.pid}) == set()
        server.accept()[0].close()
        says(worker, "connected")
        assert arrivals.look({0: worker.pid}) == {0}


def test_where_no_worker_has_a_socket_the_table_is_not_read(
    server: socket.socket, worker: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> Iterator[procfs.Socket]:
        raise AssertionError("it was read")

    monkeypatch.setattr(procfs, "sockets", read)
    arrivals = Arrivals(server.getsockname()[1])
    with socket.create_connection(server.getsockname()):  # not a worker's
        assert arrivals.look({0: worker.pid}) == set()


def test_where_no_connection_has_come_or_gone_the_table_is_not_read(
    server: socket.socket, worker: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes of this machine may connect meanwhile: then it is read."""
    arrivals, read, table = Arrivals(server.getsockname()[1]), 0, procfs.sockets

    def counting() -> Iterator[procfs.Socket]:
        nonlocal read
        read += 1
        return table()

    go(worker)
    says(worker, "connected")
    monkeypatch.setattr(procfs, "sockets", counting)
    changes, before = 0, None
    for _ in range(50):
        found = procfs.connections_counted()
        assert found, "the counters can be read"
        arrivals.look({0: worker.pid})
        changes += found != before
        before = found
    assert 1 <= read <= 2 * changes
    assert read < 50
