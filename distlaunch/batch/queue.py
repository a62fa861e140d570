"""What schedulers' queues have in common: what they say of a job, and how their commands are called."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import DistlaunchError

ANSWER_S = 60.0
"""Seconds for a scheduler to answer; it may be busy, or restarting."""
_EMPTY = ("", "Exiting.")
Stage = Literal["waits", "goes", "over"]


class Queued(Frozen):
    """What a scheduler says of a job: its state and the reason, in its own words, and what they mean.

    A job that `waits` is to start, for the first time or again; of one that is `over` nothing follows.
    """

    state: str
    reason: str = ""
    stage: Stage = "over"

    @property
    def waits(self) -> bool:
        """Whether it is to start, for the first time or again."""
        return self.stage == "waits"

    @property
    def over(self) -> bool:
        """Whether nothing follows."""
        return self.stage == "over"

    @property
    def words(self) -> str:
        """For people: `PENDING (Resources)`."""
        return f"{self.state} ({self.reason})" if self.reason else self.state

    @property
    def ending(self) -> str:
        """How it ended, for people."""
        return "left the queue" if self.state == GONE.state else f"ended ({self.state})"


CANCELLED = "CANCELLED"
"""The end of a job that was cancelled, as Slurm calls it, and we where a scheduler does not say."""
GONE = Queued("GONE")
"""A job that its scheduler does not list any more: ended ones are forgotten at once, or in minutes."""


class Queue(Protocol):
    """A scheduler's queue. Each function is one call of its commands, and raises `DistlaunchError`."""

    def submit(self, script: str) -> str:
        """Submit the script of that path; the job's id."""

    def look(self, jobs: Sequence[str]) -> dict[str, Queued]:
        """What it says of these jobs, by their ids; of those that are missing it knows nothing."""

    def cancel(self, job: str, at_once: bool = False) -> None:
        """End a job, waiting or running; `at_once` leaves its ranks no time, as far as that can be asked."""


class ToolMissingError(DistlaunchError):
    """A scheduler's command is not installed here."""


class Said(Frozen):
    """What a command, `tool`, has printed, and its exit status."""

    tool: str
    stdout: str
    stderr: str
    status: int = 0

    @property
    def words(self) -> str:
        """Its error message, without its name before each line; some commands print theirs to stdout."""
        lines = (self.stderr.strip() or self.stdout).splitlines()
        told = (line.split("error: ", 1)[-1].strip().removeprefix(f"{self.tool}: ") for line in lines)
        return "; ".join(line for line in told if line not in _EMPTY) or "it exited without a message"


def call(title: str, *argv: str, env: Mapping[str, str] | None = None) -> str:
    """What a command of the scheduler that people call `title` prints. Raises `DistlaunchError`."""
    said = ask(title, *argv, env=env)
    if said.status:
        raise failed(said)
    return said.stdout


def ask(title: str, *argv: str, env: Mapping[str, str] | None = None) -> Said:
    """The same for one whose failure may be an answer. Raises `DistlaunchError` where it can't be asked."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            check=False,
            env=env,
        )
    except FileNotFoundError:
        raise ToolMissingError(
            f"{argv[0]} not found: {title}'s commands are on the login nodes; from elsewhere use --on HOST"
        ) from None
    except OSError as error:
        raise DistlaunchError(f"can't run {argv[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise DistlaunchError(f"{title} did not answer {argv[0]} within {ANSWER_S:g} s") from None
    return Said(argv[0], done.stdout, done.stderr, done.returncode)


def failed(said: Said) -> DistlaunchError:
    """The error of a command, in its words."""
    return DistlaunchError(f"{said.tool} failed: {said.words}")


def unexpected(tool: str, said: str) -> DistlaunchError:
    """The error of a command that has not printed what it should."""
    return DistlaunchError(f"{tool}: unexpected output: {' '.join(said.split())[:200] or 'nothing'}")
