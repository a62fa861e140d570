"""This machine as a node: the agent is a child of this process."""

from collections.abc import Mapping
from typing import Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.transports.boot import LOCAL
from distlaunch.transports.failure import Kind, LinkFailure, ProcessEnd, classify


class Local(Frozen):
    """As `distlaunch.transports.kinds` has it; a container's `runtime` may stand in between."""

    runtime: str | None = None
    name: Literal["local"] = "local"

    @property
    def here(self) -> bool:
        """It is."""
        return True

    @property
    def direct(self) -> bool:
        """No login shell, no rc file."""
        return True

    @property
    def unknown(self) -> bool:
        """Never."""
        return False

    @property
    def together(self) -> bool:
        """Each node has a process of its own."""
        return False

    @property
    def patience_s(self) -> float:
        """A guardian sweeps, however long that takes."""
        return 15.0 if self.runtime else float("inf")

    @property
    def folder(self) -> str:
        """None."""
        return ""

    def argv(self) -> list[str]:
        """An agent as a child of this process."""
        return list(LOCAL)

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """All of it."""
        return environ

    def address_argv(self) -> list[str]:
        """Its own names are known here."""
        return []

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """What the end of its process means: nothing stands in between, but for a container."""
        process = f"{self.runtime} on this machine" if self.runtime else "its agent's guardian process"
        return classify(end, process=process)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """About its interpreter: little else can fail."""
        from shlex import quote  # few nodes fail

        return _ADVICE.get(failure.kind, "check the machine's log").format(python=quote(python or "python3"))


_ADVICE = {
    Kind.SILENT: "the machine may be overloaded: try `{python} -V`",
    Kind.UNSTARTED: "it exited before the agent started: try `{python} -V`",
    Kind.PROTOCOL: "does `{python} -V` print more than its version?",
    Kind.NOISE: "does `{python} -V` print more than its version?",
    Kind.NO_PYTHON: "{python} was not found: set `python:` to an interpreter that exists",
    Kind.OLD_PYTHON: "set `python:` to Python 3.8 or later",
}
