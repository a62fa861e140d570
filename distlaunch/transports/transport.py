"""How a node is reached: what every kind of transport has, and the kinds that need few words."""

from collections.abc import Mapping
from shlex import join, quote
from types import MappingProxyType
from typing import ClassVar, Literal

from distlaunch.transports.failure import NO_PYTHON, Kind, LinkFailure, Patterns, ProcessEnd, classify
from distlaunch.transports.handshake import SCRIPT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from typing_extensions import Self, dataclass_transform

    @dataclass_transform(frozen_default=True)
    class _Frozen:
        """What mypy is to take `Frozen` for here: no NamedTuple can inherit from another class."""

        def _replace(self, **changes: Any) -> Self: ...

else:
    from distlaunch.agent.frozen import Frozen as _Frozen


class Transport(_Frozen):
    """A frozen value that says how one node is reached.

    To add a kind: a subclass with a `name` of its own, a line in `distlaunch.runs.replay`, and, where a new
    way for it to fail needs one, a `Kind` in `failure.py`. A job file asks for it by `launcher`, whose words
    are in `job/fields.py`; `_reach` in `job/nodes.py` makes it, and `_launcher` in `job/checks.py` knows what
    it needs.
    """

    @property
    def name(self) -> str:
        """That of the kind, for documents and histories: a field with a Literal."""
        raise NotImplementedError

    @property
    def here(self) -> bool:
        """Whether the node is this machine, as far as we know."""
        return False

    @property
    def unknown(self) -> bool:
        """Whether the node's host is not known yet: some are known only inside an allocation."""
        return False

    @property
    def direct(self) -> bool:
        """Whether nothing that reads or prints, such as a shell with an rc file, is in between.

        Then the agent's text is sent at once.
        """
        return True

    @property
    def patience_s(self) -> float:
        """How long the process may live when it is no longer wanted.

        0 = it is killed, with all that it started; else it is asked to end, by SIGTERM, and killed so many
        seconds later; infinity = it never is: it is the node's guardian, which must outlive its agent to
        sweep.
        """
        return 0.0

    @property
    def folder(self) -> str:
        """One on this machine, below ~, that the process needs and does not make itself; "" = none."""
        return ""

    def argv(self) -> list[str]:
        """The command line of a process whose stdin and stdout become the link, with nothing of the job."""
        raise NotImplementedError

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """What of our environment that process gets."""
        return environ

    def address_argv(self) -> list[str]:
        """A command that tells, in a line `hostname ADDRESS`, how others may reach the node; [] = none."""
        return []

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """What the process's end means."""
        return classify(end)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """What to do about a failure, in a clause; `python` is the interpreter that the job names."""
        raise NotImplementedError


class Local(Transport):
    """This machine as a node: the agent is a child of this process, or of a container's `runtime`."""

    runtime: str | None = None
    name: Literal["local"] = "local"
    here = True

    @property
    def patience_s(self) -> float:
        """A guardian sweeps, however long that takes."""
        return 15.0 if self.runtime else float("inf")

    def argv(self) -> list[str]:
        """An agent as a child of this process."""
        return ["/bin/sh", "-c", SCRIPT]

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """What the end of its process means: nothing stands in between, but for a container."""
        process = f"{self.runtime} on this machine" if self.runtime else "its agent's guardian process"
        return classify(end, process=process)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """About its interpreter: little else can fail."""
        return _LOCAL_ADVICE.get(failure.kind, "check the machine's log").format(
            python=quote(python or "python3")
        )


_LOCAL_ADVICE = {
    Kind.SILENT: "the machine may be overloaded: try `{python} -V`",
    Kind.UNSTARTED: "it exited before the agent started: try `{python} -V`",
    Kind.PROTOCOL: "does `{python} -V` print more than its version?",
    Kind.NOISE: "does `{python} -V` print more than its version?",
    Kind.NO_PYTHON: "{python} was not found: set `python:` to an interpreter that exists",
    Kind.OLD_PYTHON: "set `python:` to Python 3.8 or later",
}


class Joined(Transport):
    """A node whose own launcher joined the run: somebody else started it there, and it opened the link.

    `here`: the launcher runs on this machine. Nothing is left to wait for once its connection is closed: the
    launcher does the rest.
    """

    host: str
    here: bool = False
    name: Literal["joined"] = "joined"

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


HOST = "{host}"
"""Stands for the node's name in a command's words."""
_DEAF = ("/bin/sh", "-c", 'trap "" USR1 USR2; exec "$@"', "sh")


class Command(Transport):
    """A node that a command reaches which carries bytes: kubectl exec, podman exec, nsenter, tsh ssh.

    `words` are run with another command's behind them. With `shell` that is a single word, for a shell on the
    node to take apart, as ssh's is: that may print, and read, before it runs our command.

    The process may be the node's guardian itself, as behind nsenter, or all that tells the node of our end:
    so it is given time.
    """

    host: str
    words: tuple[str, ...]
    shell: bool = False
    name: Literal["command"] = "command"
    patience_s = 15.0

    def __init_subclass__(cls) -> None:
        """Have the same fields."""

    @property
    def direct(self) -> bool:
        """Whether no shell of the user's is in between."""
        return not self.shell

    @property
    def _reaching(self) -> list[str]:
        return [word.replace(HOST, self.host) for word in self.words]

    def argv(self) -> list[str]:
        """The command, and behind it nothing of the job."""
        start = self._reaching
        return [*start, f"exec /bin/sh -c '{SCRIPT}'"] if self.shell else [*start, "/bin/sh", "-c", SCRIPT]

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
        return f"try `{join(self._reaching)} {quote(python or 'python3')} -V`"


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

    def argv(self) -> list[str]:
        """The command, in a shell that takes no notice of such signals if it must not end by them."""
        return [*(_DEAF if self.deaf else ()), *super().argv()]

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
