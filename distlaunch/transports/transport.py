"""How a node is reached: what every kind of transport has, and the kinds that need few words."""

from collections.abc import Mapping
from shlex import join, quote
from typing import Literal

from distlaunch.transports.failure import NO_PYTHON, Kind, LinkFailure, ProcessEnd, classify
from distlaunch.transports.handshake import SCRIPT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from typing_extensions import Self, dataclass_transform

    from distlaunch.transports.presets import Preset

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
    are in `job/fields.py`; `_reach` in `job/pool.py` makes it, and `_check_launcher` in `job/checks.py` knows
    what it needs.
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
    node to take apart, as ssh's is: that may print, and read, before it runs our command. `scheduler` names
    whose preset it is, "" = the job file's own.

    The process may be the node's guardian itself, as behind nsenter, or all that tells the node of our end:
    so it is given time.
    """

    host: str
    words: tuple[str, ...]
    shell: bool = False
    scheduler: str = ""
    name: Literal["command"] = "command"
    patience_s = (
        15.0  # it may be the guardian itself, as behind nsenter, or all that tells the node of our end
    )

    @property
    def direct(self) -> bool:
        """Whether no shell of the user's is in between."""
        return not self.shell

    @property
    def _preset(self) -> "Preset | None":
        if not self.scheduler:
            return None
        from distlaunch.transports.presets import PRESETS  # only such a job needs it

        return PRESETS[self.scheduler]

    @property
    def _reaching(self) -> list[str]:
        return [word.replace(HOST, self.host) for word in self.words]

    def argv(self) -> list[str]:
        """The command, and behind it nothing of the job."""
        before = _DEAF if self._preset and self._preset.deaf else ()
        start = [*before, *self._reaching]
        return [*start, f"exec /bin/sh -c '{SCRIPT}'"] if self.shell else [*start, "/bin/sh", "-c", SCRIPT]

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """All of it, in which a scheduler's commands are found."""
        folder = environ.get(self._preset.folder) if self._preset else None
        return {**environ, "PATH": f"{environ.get('PATH', '/usr/bin:/bin')}:{folder}"} if folder else environ

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """What it said; of one that is not a scheduler's, no words or status of its own are known."""
        preset, process = self._preset, f"{self.words[0]} on this machine"
        if preset is None:
            return classify(end, process=process)
        return classify(end, preset.failures, preset.failed, process)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """With a command to paste."""
        if failure.kind is Kind.NO_PYTHON and failure.words.endswith(f"{NO_PYTHON}:"):
            return "it was sent nothing: have the command pass standard input on, as `kubectl exec -i` does"
        if failure.kind is Kind.NO_PYTHON:
            return f"{python or 'python3'} was not found: set `python:` to an interpreter that exists there"
        if failure.kind is Kind.OLD_PYTHON:
            return "set `python:` to Python 3.8 or later"
        if self._preset and failure.kind in (Kind.NO_ALLOCATION, Kind.TASK_REFUSED):
            return self._preset.advice[failure.kind]
        return f"try `{join(self._reaching)} {quote(python or 'python3')} -V`"
