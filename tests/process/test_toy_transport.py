"""A kind of transport that distlaunch does not know: a type of its own is all that it takes."""

from pathlib import Path
from typing import Literal

from distlaunch.agent.messages import FindRoute, RouteFound
from distlaunch.job.spec import JobSpec, Logs, NodeSpec, Program
from distlaunch.launch.port_check import Agents
from distlaunch.transports.failure import Kind, LinkFailure, ProcessEnd, classify
from distlaunch.transports.handshake import SCRIPT
from distlaunch.transports.transport import Transport

REFUSED = 17


class Room(Transport):
    """Another room of this house: reached through `env`, if there is a door."""

    door: bool
    name: Literal["room"] = "room"
    direct = False

    def argv(self) -> list[str]:
        return ["env", "sh", "-c", SCRIPT if self.door else f"echo no door >&2; exit {REFUSED}"]

    def failure(self, end: ProcessEnd) -> LinkFailure:
        return classify(end, [(Kind.REFUSED, "no door")], REFUSED)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        return "make a door"


def test_a_toy_transport_reaches_a_node_and_tells_why_it_does_not(tmp_path: Path) -> None:
    rooms = [Room(door=True), Room(door=False)]
    nodes = tuple(NodeSpec(f"room{i}", room) for i, room in enumerate(rooms))
    spec = JobSpec("job", nodes, Program("command", ("true",)), str(tmp_path), Logs(str(tmp_path)))
    with Agents(spec) as agents:
        answers = agents.ask({0: FindRoute("127.0.0.1")}, (RouteFound,))
        assert (answers[0].interface, agents.present) == ("lo", [0])
        assert (agents.failures[1].kind, agents.failures[1].words) == (Kind.REFUSED, "no door")
