"""A node that a command reaches which carries bytes: kubectl exec, podman exec, nsenter, tsh ssh."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.transport.boot import NO_PYTHON, SCRIPT
from distlaunch.transport.failure import Kind, LinkFailure, Patterns, ProcessEnd, classify

HOST = "{host}"
"""Stands for the node's name in the command's words."""
_DEAF = ("/bin/sh", "-c", 'trap "" USR1 USR2; exec "$@"', "sh")


class Command(Frozen):
    """As `distlaunch.transport.kinds` has it; `words` are run with another command's behind them.

    With `shell` that is a single word, for a shell on the node to take apart, as ssh's is.
    """

    host: str
    words: tuple[str, ...]
    shell: bool = False
    name: Literal["command"] = "command"

    def __init_subclass__(cls) -> None:
        """Have the same fields."""

    @property
    def here(self) -> bool:
        """Not as far as we know."""
        return False

    @property
    def direct(self) -> bool:
        """A shell may print, and read, before it runs our command."""
        return not self.shell

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
        """It may be the guardian itself, as behind nsenter, or all that tells the node of our end."""
        return 15.0

    @property
    def folder(self) -> str:
        """None."""
        return ""

    @property
    def reaching(self) -> list[str]:
        """The words for this node."""
        return [word.replace(HOST, self.host) for word in self.words]

    def argv(self) -> list[str]:
        """The command, and behind it nothing of the job."""
        start = [*self._before, *self.reaching]
        return [*start, f"exec /bin/sh -c '{SCRIPT}'"] if self.shell else [*start, "/bin/sh", "-c", SCRIPT]

    @property
    def _before(self) -> tuple[str, ...]:
        return ()

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """All of it, in which a scheduler's commands are found."""
        return environ

    def address_argv(self) -> list[str]:
        """The node's name is its address, or the job file says another."""
        return []

    @property
    def process(self) -> str:
        """What runs here, for messages."""
        return f"{self.words[0]} on this machine"

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """What it said; no words or status of its own are known."""
        return classify(end, process=self.process)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """With a command to paste."""
        if failure.kind is Kind.NO_PYTHON and failure.words.endswith(f"{NO_PYTHON}:"):
            return "it was sent nothing: have the command pass standard input on, as `kubectl exec -i` does"
        if failure.kind is Kind.NO_PYTHON:
            return f"{python or 'python3'} was not found: set `python:` to an interpreter that exists there"
        if failure.kind is Kind.OLD_PYTHON:
            return "set `python:` to Python 3.8 or later"
        from shlex import join, quote  # few nodes fail

        return f"try `{join(self.reaching)} {quote(python or 'python3')} -V`"


class OfScheduler(Command):
    """A host of a scheduler's job, by the scheduler's command; a subclass says how that fails.

    It ends with `failed` for failures of its own, which say one of `failures`; those that a setting of the
    scheduler's is behind have something `advised`. Jobs have the directory of the commands in the variable
    `tools`, where a shell start-up file has set another PATH. One that is `deaf` must not end by the signals
    that announce a job's end, which its scheduler sends to all of the job's processes.
    """

    failures: ClassVar[Patterns] = ()
    failed: ClassVar[int | None] = None
    advised: ClassVar[Mapping[Kind, str]] = MappingProxyType({})
    tools: ClassVar[str] = ""
    deaf: ClassVar[bool] = False

    @property
    def _before(self) -> tuple[str, ...]:
        return _DEAF if self.deaf else ()

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """With the directory of the scheduler's commands behind others."""
        folder = environ.get(self.tools)
        return {**environ, "PATH": f"{environ.get('PATH', '/usr/bin:/bin')}:{folder}"} if folder else environ

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """What it said."""
        return classify(end, self.failures, self.failed, self.process)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """With a command to paste."""
        return self.advised.get(failure.kind) or super().advice(failure, python)
