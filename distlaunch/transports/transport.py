"""The base class of transports, and those that need little code."""

from collections.abc import Mapping
from shlex import join, quote
from typing import Literal

from distlaunch.transports.failure import NO_PYTHON, Kind, LinkFailure, Patterns, ProcessEnd, classify
from distlaunch.transports.handshake import SCRIPT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from typing_extensions import Self, dataclass_transform

    @dataclass_transform(frozen_default=True)
    class _Frozen:
        """The stand-in for `Frozen` in mypy, where no NamedTuple can inherit from another class."""

        def _replace(self, **changes: Any) -> Self: ...

else:
    from distlaunch.agent.frozen import Frozen as _Frozen


class SshOptions(_Frozen):
    """The `ssh` section of a job file, with the seconds for a TCP connect and between keep-alives.

    `words` are options of ssh such as `Compression=no`.
    """

    config: str | None = None
    words: tuple[str, ...] = ()
    persist_s: int | None = None
    connect_s: int = 15
    alive_s: int = 5


class Way(_Frozen):
    """What a job and its surroundings say about the way to a host: for ssh, for Slurm, and for a command.

    `job` is the ID of the allocation, "" outside of one, and `group` the component of the host in it.
    """

    user: str | None = None
    port: int | None = None
    ssh: SshOptions = SshOptions()
    job: str = ""
    group: int | None = None
    words: tuple[str, ...] = ()
    shell: bool = False


class Transport(_Frozen):
    """A way to reach one node, as frozen data.

    To add one, write a subclass with its own `name` and `to`, and add its line in `transports/__init__.py`.
    For new kinds of failures, add a `Kind` in `failure.py`.
    """

    needs_names = False
    """Whether a job must list its hosts, unless an allocation has them."""
    allocated = False
    """Whether the hosts are those of a scheduler, which may not be known yet."""

    @classmethod
    def to(cls, host: str, way: Way) -> "Transport":
        """Return the transport to a host of a job whose `launcher` is the name of this one."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Return the name of the transport in documents and histories: a field with a Literal."""
        raise NotImplementedError

    @property
    def here(self) -> bool:
        """Whether the node is known to be this machine."""
        return False

    @property
    def unknown(self) -> bool:
        """Whether the host is not known yet: some are known only inside an allocation."""
        return False

    @property
    def direct(self) -> bool:
        """Whether no program that reads or prints, such as a shell with an rc file, is in between.

        If so, the agent's code is sent at once.
        """
        return True

    @property
    def keeps_alive(self) -> bool:
        """Whether the process ends by itself, in good time, if the node can't be reached any more."""
        return True

    @property
    def patience_s(self) -> float:
        """Return the seconds that a process may live once it is not needed any more.

        0 = it is killed, with everything that it started. Infinity = it is never killed: it is the guardian,
        which must outlive its agent to sweep. Otherwise it is stopped, and killed after that time.
        """
        return 0.0

    @property
    def folder(self) -> str:
        """Return a directory on this machine, below ~, that the process needs but doesn't make; "" = none."""
        return ""

    def argv(self) -> list[str]:
        """Return the command whose stdin and stdout become the link; nothing of the job is in it."""
        raise NotImplementedError

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return the environment of that command."""
        return environ

    def address_argv(self) -> list[str]:
        """Return a command that prints `hostname ADDRESS`, by which others may reach the node; [] = none."""
        return []

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """Return the meaning of the end of the process."""
        return classify(end)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """Return advice on a failure, in a clause; `python` is the interpreter that the job names."""
        raise NotImplementedError


class Local(Transport):
    """This machine as a node: the agent is a child of this process, or of the `runtime` of a container."""

    runtime: str | None = None
    name: Literal["local"] = "local"
    here = True

    @classmethod
    def to(cls, host: str, way: Way) -> "Local":
        """Return this machine, whatever the name of the host."""
        return cls()

    @property
    def patience_s(self) -> float:
        """Return infinity for a guardian, which may take any time to sweep."""
        return 15.0 if self.runtime else float("inf")

    def argv(self) -> list[str]:
        """Return the command for an agent as a child of this process."""
        return ["/bin/sh", "-c", SCRIPT]

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """Return the meaning of the end: only a container may be in between."""
        process = f"{self.runtime} on this machine" if self.runtime else "its agent's guardian process"
        return classify(end, process=process)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """Return advice on the interpreter: little else can fail."""
        text = _LOCAL_ADVICE.get(failure.kind, "check the machine's log")
        return text.format(python=quote(python or "python3"))


OLD_PYTHON = "set `python:` to Python 3.8 or later"
_LOCAL_ADVICE = {
    Kind.SILENT: "the machine may be overloaded: try `{python} -V`",
    Kind.UNSTARTED: "it exited before the agent started: try `{python} -V`",
    Kind.PROTOCOL: "does `{python} -V` print more than its version?",
    Kind.NOISE: "does `{python} -V` print more than its version?",
    Kind.NO_PYTHON: "{python} was not found: set `python:` to an interpreter that exists",
    Kind.OLD_PYTHON: OLD_PYTHON,
}


class Joined(Transport):
    """A node whose own launcher joined the run: it was started there independently, and opened the link.

    `here`: the launcher runs on this machine. Once its connection is closed, there is nothing to wait for:
    the launcher does the rest.
    """

    host: str
    here: bool = False
    name: Literal["joined"] = "joined"

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """Return the meaning of the end of the connection; without any output, there was no launcher."""
        if not (end.booted or end.stderr or end.timed_out):
            return LinkFailure(Kind.ABSENT)
        return classify(end, process="its launcher")

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """Return advice: the launcher prints more on its own node."""
        if failure.kind is Kind.ABSENT:
            return "no launcher has joined for it"
        return f"look at the output of the launcher on {self.host}"


_NO_PATTERNS: Patterns = ()
_NO_STATUS: int | None = None
HOST = "{host}"
"""Placeholder for the name of the node in the words of a command."""
_DEAF = ("/bin/sh", "-c", 'trap "" USR1 USR2; exec "$@"', "sh")


class Command(Transport):
    """A node that is reached by a command that carries bytes: kubectl exec, podman exec, nsenter, tsh ssh.

    `words` are run with the agent's command appended. With `shell`, that command is a single word for a shell
    on the node to split, as with ssh; the shell may print, and read, before it runs the command.

    The process may be the guardian itself, as with nsenter, or the only thing that ends the node's side, so
    it is given time to end.

    A scheduler's own command is a subclass.
    """

    host: str
    words: tuple[str, ...]
    shell: bool = False
    name: Literal["command"] = "command"
    keeps_alive = False
    patience_s = 15.0
    failures = _NO_PATTERNS
    """Messages of the command's own failures, which end it with status `failed`."""
    failed = _NO_STATUS
    advised = _NO_PATTERNS
    """Advice on failures that a setting of the scheduler can fix."""
    tools = ""
    """The variable of jobs with the directory of the scheduler's commands, in case PATH was replaced."""
    deaf = False
    """Whether the command must ignore the termination warnings that its scheduler sends to a whole job."""

    def __init_subclass__(cls) -> None:
        """Keep the fields of this class in subclasses."""

    @classmethod
    def to(cls, host: str, way: Way) -> "Command":
        """Return the way by the command of the job."""
        return cls(host, way.words, way.shell)

    @property
    def direct(self) -> bool:
        """Whether no shell of the user is in between."""
        return not self.shell

    @property
    def _reaching(self) -> list[str]:
        return [word.replace(HOST, self.host) for word in self.words]

    def argv(self) -> list[str]:
        """Return the command, followed by nothing of the job; if `deaf`, in a shell that ignores signals."""
        start = [*(_DEAF if self.deaf else ()), *self._reaching]
        return [*start, f"exec /bin/sh -c '{SCRIPT}'"] if self.shell else [*start, "/bin/sh", "-c", SCRIPT]

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return the environment with the directory of the scheduler's commands at the end of PATH."""
        folder = environ.get(self.tools)
        return {**environ, "PATH": f"{environ.get('PATH', '/usr/bin:/bin')}:{folder}"} if folder else environ

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """Classify the end of the command by its own messages and status."""
        return classify(end, self.failures, self.failed, f"{self.words[0]} on this machine")

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """Return advice, with a command to paste."""
        if failure.kind is Kind.NO_PYTHON and failure.words.endswith(f"{NO_PYTHON}:"):
            return "it received no input: make the command pass on standard input, as `kubectl exec -i` does"
        python = python or "python3"
        missing = f"{python} was not found: set `python:` to an interpreter that exists there"
        known = {Kind.NO_PYTHON: missing, Kind.OLD_PYTHON: OLD_PYTHON, **dict(self.advised)}
        return known.get(failure.kind) or f"try `{join(self._reaching)} {quote(python)} -V`"
