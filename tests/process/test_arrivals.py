"""Connections of ranks to the rendezvous, as seen from outside."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distlaunch.agent import procfs
from distlaunch.agent.watches import Arrivals
from tests.harness import Going, wait_until

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
def worker(server: socket.socket) -> Iterator[Going]:
    argv = [sys.executable, "-c", CONNECTS, str(server.getsockname()[1])]
    run = Going(Path(), argv, stdin=subprocess.PIPE)
    yield run
    assert run.process.stdin
    run.process.stdin.close()
    run.kill()


def go(worker: Going) -> None:
    assert worker.process.stdin
    worker.process.stdin.write(b"\n")
    worker.wait_for("connecting")


def test_sees_a_connection_at_the_next_look(server: socket.socket, worker: Going) -> None:
    arrivals = Arrivals(server.getsockname()[1])
    assert arrivals.look({3: worker.process.pid}) == set()
    go(worker)
    worker.wait_for("connected")
    assert arrivals.look({3: worker.process.pid}) == {3}


def test_looks_again_at_a_connection_that_takes_its_time(server: socket.socket, worker: Going) -> None:
    port, pid = server.getsockname()[1], worker.process.pid

    def is_sent() -> bool:
        return any(s.state == procfs.SYN_SENT and s.remote_port == port for s in procfs.sockets())

    with socket.create_connection(("127.0.0.1", port)):  # the queue is full: a SYN is dropped, and sent again
        arrivals = Arrivals(port)
        go(worker)
        wait_until(is_sent, lambda: "no SYN was sent")
        assert arrivals.look({0: pid}) == set()
        server.accept()[0].close()
        worker.wait_for("connected")
        assert arrivals.look({0: pid}) == {0}
