"""A kind of transport that distlaunch does not know: a type of its own is all that it takes."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from distlaunch.agent.messages import FindRoute, RouteFound
from distlaunch.checks.port_check import Agents
from distlaunch.job.spec import JobSpec, Logs, NodeSpec, Program
from distlaunch.launch.run import run_job
from distlaunch.observers.observer import Observer, Printed
from distlaunch.state.nodes import End
from distlaunch.transport.boot import SCRIPT
from distlaunch.transport.failure import Kind, LinkFailure, ProcessEnd, classify

REFUSED = 17


class Room(NamedTuple):
    """Another room of this house: reached through `env`, if there is a door."""

    door: bool
    name: str = "room"
    here: bool = False
    direct: bool = False
    together: bool = False
    unknown: bool = False
    patience_s: float = 0.0
    folder: str = ""

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        return environ

    def argv(self) -> list[str]:
        return ["env", "sh", "-c", SCRIPT if self.door else f"echo no door >&2; exit {REFUSED}"]

    def address_argv(self) -> list[str]:
        return []

    def failure(self, end: ProcessEnd) -> LinkFailure:
        return classify(end, [(Kind.REFUSED, "no door")], REFUSED)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        return "make a door"


def test_a_toy_transport_reaches_a_node_and_tells_why_it_does_not(tmp_path: Path) -> None:
    rooms: list[Any] = [Room(door=True), Room(door=False)]
    nodes = tuple(NodeSpec(f"room{i}", room) for i, room in enumerate(rooms))
    spec = JobSpec("job", nodes, Program("command", ("true",)), str(tmp_path), Logs(str(tmp_path)))
    with Agents(spec) as agents:
        answers = agents.ask({0: FindRoute("127.0.0.1")}, (RouteFound,))
        assert (answers[0].interface, agents.present) == ("lo", [0])
        assert (agents.failures[1].kind, agents.failures[1].words) == (Kind.REFUSED, "no door")


RELAY = """
import struct, subprocess, sys, threading

HEADER = struct.Struct("!BHHHI")
stdin, stdout, lock = sys.stdin.buffer, sys.stdout.buffer, threading.Lock()
met = threading.Event()

def tell(data):
    with lock:
        stdout.write(data)
        stdout.flush()

def frame(stream):
    head = stream.read(HEADER.size)
    return head + stream.read(HEADER.unpack(head)[-1]) if len(head) == HEADER.size else b""

def serve(agent, text, first):
    agent.stdout.readline()  # that its shell is there
    agent.stdin.write(text)
    agent.stdin.flush()
    agent.begun.set()
    hello = agent.stdout.readline()
    if first:
        tell(hello)
        met.set()
    met.wait()  # one hello is all that a link has
    while data := frame(agent.stdout):
        tell(data)
    agent.wait()

def boot(first):
    text = b""
    while not text.endswith(b"\\n\\n"):
        text += stdin.readline()
    for _ in range(4):
        size = stdin.read(8)
        text += size + stdin.read(int(size))
    agent = subprocess.Popen(["sh", "-c", sys.argv[1]], stdin=-1, stdout=-1)
    agent.begun = threading.Event()
    threads.append(threading.Thread(target=serve, args=(agent, text, first)))
    threads[-1].start()
    return agent

tell(b"distlaunch-ready-1\\n")
threads, all_agents = [], []
while kind := stdin.peek(1)[:1]:
    if kind in b"\\1\\2\\3\\4":
        data = frame(stdin)
        agent = all_agents[HEADER.unpack_from(data)[1]]  # they come in the order of the nodes
        agent.begun.wait()
        agent.stdin.write(data)
        agent.stdin.flush()
    else:
        all_agents.append(boot(not threads))
for agent in all_agents:
    agent.stdin.close()
for thread in threads:
    thread.join()
"""


class House(NamedTuple):
    """Several rooms behind one door: a relay starts their agents, and passes frames on."""

    name: str = "house"
    here: bool = True
    direct: bool = False
    together: bool = True
    unknown: bool = False
    patience_s: float = 0.0
    folder: str = ""

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        return environ

    def argv(self) -> list[str]:
        return [sys.executable, "-c", RELAY, SCRIPT]

    def address_argv(self) -> list[str]:
        return []

    def failure(self, end: ProcessEnd) -> LinkFailure:
        return classify(end)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        return "look at the relay"


def test_one_link_serves_several_nodes_from_the_first_hello_to_the_last_output(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    house: Any = House()
    rooms = tuple(NodeSpec(f"room{i}", house, gpus=0, procs=2) for i in range(3))
    runs = tmp_path_factory.mktemp("runs")  # a replay knows no transport but our own
    os.mkfifo(tmp_path / "said")
    script = """
        echo $RANK of $WORLD_SIZE
        if [ $RANK = 4 ]; then exec 3<>said; head -n 5 <&3 >/dev/null; exit 7; fi
        echo >said
        exec sleep 600
    """
    spec = JobSpec("job", rooms, Program("command", ("sh",)), str(tmp_path), Logs(str(runs)))
    spec = spec._replace(args=("-c", script))
    printed: dict[int, bytes] = {}

    class Output(Observer):
        def printed(self, output: Printed) -> None:
            printed[output.rank] = printed.get(output.rank, b"") + output.data

    summary = run_job(spec, [Output()])
    assert printed == {rank: f"{rank} of 6\n".encode() for rank in range(6)}
    assert summary.state.outcome == 7
    assert summary.state.cause is not None
    assert summary.state.cause.rank == 4
    assert all(node is End.CLOSED for node in summary.state.nodes)
