"""The base class of transports, and the transports that need little code."""

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
    """The `ssh` section of a job file, plus the TCP connect timeout and keepalive interval in seconds.

    `words` are ssh options such as `Compression=no`.
    """

    config: str | None = None
    words: tuple[str, ...] = ()
    persist_s: int | None = None
    connect_s: int = 15
    alive_s: int = 5


class Way(_Frozen):
    """The settings, from a job and its surroundings, for reaching a host by ssh, Slurm or a command.

    `job` is the ID of the allocation, or "" outside an allocation. `group` is the component of the allocation
    that the host belongs to.
    """

    user: str | None = None
    port: int | None = None
    ssh: SshOptions = SshOptions()
    job: str = ""
    group: int | None = None
    words: tuple[str, ...] = ()
    shell: bool = False


class Transport(_Frozen):
    """A way to reach an agent on one node, as frozen data.

    To add a transport, write a subclass with its own `name` and `to`, and add it to the list in
    `transports/__init__.py`. For a new kind of failure, add a `Kind` in `failure.py`.
    """

    needs_names = False
    """Whether a job must list its hosts, unless an allocation provides them."""
    allocated = False
    """Whether a scheduler provides the hosts, which may not be known yet."""
    here = False
    """Whether the node is known to be this machine."""
    deaf = False
    """Whether the command, the agent and the ranks ignore the scheduler's termination warnings."""
    hydra = ""
    """The launcher with which MPICH's mpirun reaches the job's other nodes; "" = mpirun chooses."""
    keeps_alive = True
    """Whether the process soon exits on its own if the node becomes unreachable.

    If not, the controller gives up on the node after a few missed heartbeats.
    """

    @classmethod
    def to(cls, host: str, way: Way) -> "Transport":
        """Return a transport of this class to `host`, for a job whose `launcher` names this transport."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Return the transport's name in documents and histories. Subclasses make it a Literal field."""
        raise NotImplementedError

    @property
    def unknown(self) -> bool:
        """Return whether the host isn't known yet. Some hosts are known only inside an allocation."""
        return False

    @property
    def direct(self) -> bool:
        """Return whether no program in between, such as a shell with an rc file, reads or prints anything.

        If so, the agent's code is sent immediately.
        """
        return True

    @property
    def patience_s(self) -> float:
        """Return the seconds that a process may run once it is no longer needed.

        If 0, the process is killed along with everything that it started. If infinite, the process is never
        killed: it is the guardian, which must outlive its agent to sweep. Otherwise, the process is stopped,
        and killed if it is still running after that time.
        """
        return 0.0

    @property
    def directory(self) -> str:
        """Return a directory below ~ on this machine that the process needs but doesn't create, or ""."""
        return ""

    def argv(self) -> list[str]:
        """Return the command whose stdin and stdout become the link. It contains no job values."""
        raise NotImplementedError

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return the environment of the command that `argv` returns."""
        return environ

    def address_argv(self) -> list[str]:
        """Return a command that prints `hostname ADDRESS`, or [].

        Other nodes may be able to reach the node at that address."""
        return []

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """Return the failure that the end of the process indicates."""
        return classify(end)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """Return advice on a failure, as a clause. `python` is the interpreter that the job names."""
        raise NotImplementedError


_IGNORING = 'trap "" USR1 USR2; '
"""Shell code for what must survive termination warnings that a scheduler sends to all processes of a job."""


def _starting(ignoring: bool) -> list[str]:
    """Return the command that starts an agent. If `ignoring`, its ranks ignore termination warnings, too."""
    return ["/bin/sh", "-c", (_IGNORING if ignoring else "") + SCRIPT]


class Local(Transport):
    """This machine as a node. The agent is a child of this process, or of the `runtime` of a container."""

    runtime: str | None = None
    deaf: bool = False
    name: Literal["local"] = "local"
    here = True

    @classmethod
    def to(cls, host: str, way: Way) -> "Local":
        """Return the transport for this machine, regardless of the host name."""
        return cls()

    @property
    def patience_s(self) -> float:
        """Return infinity for a guardian, which may take any amount of time to sweep."""
        return 15.0 if self.runtime else float("inf")

    def argv(self) -> list[str]:
        """Return the command for an agent as a child of this process."""
        return _starting(self.deaf)

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """Return the failure that the end of the process indicates. Only a container can be in between."""
        process = f"{self.runtime} on this machine" if self.runtime else "its agent's guardian process"
        return classify(end, process=process)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """Return advice on the interpreter, since little else can fail."""
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
    """A node whose own launcher joined the run. The launcher was started independently and opened the link.

    `here` is set if the launcher runs on this machine. Once the connection is closed, the controller doesn't
    wait for anything, because the launcher does the cleanup.
    """

    host: str
    here: bool = False
    name: Literal["joined"] = "joined"

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """Return the failure that the end of the connection indicates. No output means no launcher."""
        if not (end.booted or end.stderr or end.timed_out):
            return LinkFailure(Kind.ABSENT)
        return classify(end, process="its launcher")

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """Return advice. The launcher prints details on its own node."""
        if failure.kind is Kind.ABSENT:
            return "no launcher has joined for it"
        return f"look at the output of the launcher on {self.host}"


_NO_PATTERNS: Patterns = ()
_NO_STATUS: int | None = None
HOST = "{host}"
"""Placeholder for the host in the words of a command."""


class Command(Transport):
    """A node reached by a command that carries bytes, such as kubectl exec, podman exec, nsenter or tsh ssh.

    `words` are run with the agent's command appended. With `shell`, the agent's command is a single word that
    a shell on the node splits, as with ssh. The shell may print and read before it runs the command.

    The command's process may be the guardian itself, as with nsenter, or the only process that can stop the
    node's side. Therefore, it is given time to exit.

    Each scheduler with its own command has a subclass.
    """

    host: str
    words: tuple[str, ...]
    shell: bool = False
    name: Literal["command"] = "command"
    keeps_alive = False
    patience_s = 15.0
    failures = _NO_PATTERNS
    """Messages of the command's own failures, after which the command exits with status `failed`."""
    failed = _NO_STATUS
    advised = _NO_PATTERNS
    """Advice on failures that a setting of the scheduler can fix."""
    tools = ""
    """The job variable with the directory of the scheduler's commands, in case PATH was replaced."""

    def __init_subclass__(cls) -> None:
        """Keep the fields of this class in subclasses."""

    @classmethod
    def to(cls, host: str, way: Way) -> "Command":
        """Return the transport that uses the command of the job."""
        return cls(host, way.words, way.shell)

    @property
    def direct(self) -> bool:
        """Return whether no shell of the user runs in between."""
        return not self.shell

    @property
    def _reaching(self) -> list[str]:
        return [word.replace(HOST, self.host) for word in self.words]

    def argv(self) -> list[str]:
        """Return the command, which contains no job values. If `deaf`, a shell execs it."""
        reaching = ["/bin/sh", "-c", _IGNORING + 'exec "$@"', "sh"] if self.deaf else []
        sh, dash_c, script = _starting(self.deaf)
        words = [f"exec {sh} {dash_c} '{script}'"] if self.shell else [sh, dash_c, script]
        return [*reaching, *self._reaching, *words]

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return the environment with the directory of the scheduler's commands at the end of PATH."""
        directory = environ.get(self.tools)
        path = f"{environ.get('PATH', '/usr/bin:/bin')}:{directory}"
        return {**environ, "PATH": path} if directory else environ

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """Classify the end of the command by its messages and its status."""
        return classify(end, self.failures, self.failed, f"{self.words[0]} on this machine")

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """Return advice, with a command to paste."""
        if failure.kind is Kind.NO_PYTHON and failure.words.endswith(f"{NO_PYTHON}:"):
            return "it received no input: make the command pass on standard input, as `kubectl exec -i` does"
        python = python or "python3"
        missing = f"{python} was not found: set `python:` to an interpreter that exists on the node"
        known = {Kind.NO_PYTHON: missing, Kind.OLD_PYTHON: OLD_PYTHON, **dict(self.advised)}
        return known.get(failure.kind) or f"try `{join(self._reaching)} {quote(python)} -V`"
