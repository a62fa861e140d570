"""A node whose own launcher joined the run: somebody else started it there, and it opened the link itself."""

from collections.abc import Mapping
from typing import Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.transports.failure import Kind, LinkFailure, ProcessEnd, classify


class Joined(Frozen):
    """As `distlaunch.transports.kinds` has it; `here`: the launcher runs on this machine."""

    host: str
    here: bool = False
    name: Literal["joined"] = "joined"

    @property
    def direct(self) -> bool:
        """The link begins with the agent's own hello."""
        return True

    @property
    def unknown(self) -> bool:
        """Never."""
        return False

    @property
    def together(self) -> bool:
        """Each launcher has a connection of its own."""
        return False

    @property
    def patience_s(self) -> float:
        """Nothing is left to wait for once its connection is closed: the launcher does the rest."""
        return 0.0

    @property
    def folder(self) -> str:
        """None."""
        return ""

    def argv(self) -> list[str]:
        """None: it is not started from here."""
        return []

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Its own."""
        return environ

    def address_argv(self) -> list[str]:
        """None: the endpoint is the address."""
        return []

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """What the end of its connection means: nothing was ever said where there was none."""
        if not (end.booted or end.stderr or end.timed_out):
            return LinkFailure(Kind.ABSENT)
        return classify(end, process="its launcher")

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """What to look at: the launcher says more on its own node."""
        if failure.kind is Kind.ABSENT:
            return "no launcher has come for it"
        return f"look at the output of the launcher on {self.host}"
