"""A node that a command reaches which carries bytes: kubectl exec, podman exec, nsenter, tsh ssh."""

from collections.abc import Mapping
from typing import Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.transports.boot import NO_PYTHON, SCRIPT
from distlaunch.transports.failure import Kind, LinkFailure, ProcessEnd, classify

HOST = "{host}"
"""Stands for the node's name in the command's words."""
_DEAF = ("/bin/sh", "-c", 'trap "" USR1 USR2; exec "$@"', "sh")


class Command(Frozen):
    """As `distlaunch.transports.kinds` has it; `words` are run with another command's behind them.

    With `shell` that is a single word, for a shell on the node to take apart, as ssh's is. `scheduler` is
    whose preset it is, "" = the job file's own.
    """

    host: str
    words: tuple[str, ...]
    shell: bool = False
    scheduler: str = ""
    name: Literal["command"] = "command"

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
        if not self.scheduler:
            return ()
        from distlaunch.transports.presets import PRESETS  # only such a job needs it

        return _DEAF if PRESETS[self.scheduler].deaf else ()

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """All of it, in which a scheduler's commands are found."""
        if not self.scheduler:
            return environ
        from distlaunch.transports.presets import PRESETS  # few jobs have one

        folder = environ.get(PRESETS[self.scheduler].folder)
        return {**environ, "PATH": f"{environ.get('PATH', '/usr/bin:/bin')}:{folder}"} if folder else environ

    def address_argv(self) -> list[str]:
        """The node's name is its address, or the job file says another."""
        return []

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """What it said; of one that is not a scheduler's, no words or status of its own are known."""
        process = f"{self.words[0]} on this machine"
        if not self.scheduler:
            return classify(end, process=process)
        from distlaunch.transports.presets import PRESETS  # few nodes fail

        preset = PRESETS[self.scheduler]
        return classify(end, preset.failures, preset.failed, process)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """With a command to paste."""
        if failure.kind is Kind.NO_PYTHON and failure.words.endswith(f"{NO_PYTHON}:"):
            return "it was sent nothing: have the command pass standard input on, as `kubectl exec -i` does"
        if failure.kind is Kind.NO_PYTHON:
            return f"{python or 'python3'} was not found: set `python:` to an interpreter that exists there"
        if failure.kind is Kind.OLD_PYTHON:
            return "set `python:` to Python 3.8 or later"
        if self.scheduler and failure.kind in (Kind.NO_ALLOCATION, Kind.TASK_REFUSED):
            from distlaunch.transports.presets import PRESETS

            return PRESETS[self.scheduler].advice[failure.kind]
        from shlex import join, quote  # few nodes fail

        return f"try `{join(self.reaching)} {quote(python or 'python3')} -V`"
