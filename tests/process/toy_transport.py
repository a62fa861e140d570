"""A transport of another type: the tests add its line to the table."""

from typing import Literal

from distlaunch.transports.failure import Kind, LinkFailure, ProcessEnd, classify
from distlaunch.transports.handshake import SCRIPT
from distlaunch.transports.transport import Transport, Way

REFUSED = 17


class Room(Transport):
    """Another room of this house: reached through `env`, if there is a listener."""

    listener: bool
    name: Literal["room"] = "room"
    direct = False

    @classmethod
    def to(cls, host: str, way: Way) -> "Room":
        return cls(host != "attic")

    def argv(self) -> list[str]:
        return ["env", "sh", "-c", SCRIPT if self.listener else f"echo no listener >&2; exit {REFUSED}"]

    def failure(self, end: ProcessEnd) -> LinkFailure:
        return classify(end, [(Kind.REFUSED, "no listener")], REFUSED)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        return "make a listener"
