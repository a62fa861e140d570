"""Runs schedulers' commands and reads schedulers' files, to find jobs in a queue and the hosts of a job."""

import os
import pwd
import re
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import DistlaunchError, UsageError, reason
from distlaunch.job.spec import AllocatedNode
from distlaunch.wording import MAX_HOSTS

if TYPE_CHECKING:
    import subprocess

ANSWER_S = 60.0
"""Seconds to wait for an answer from a scheduler, which may be busy or restarting."""
HOSTS_S = 10.0
"""Seconds to wait for a command that lists hosts."""
ANOTHER_WISH_S = 0.7
"""Seconds between two signals to a controller, the second of which kills the ranks. Signals closer together
count as one, as do those that arrive while the controller looks into its run directory."""
MAX_SLOTS = 1_000_000
"""Maximum plausible number of slots on one host."""
_HOST = r"[A-Za-z0-9_][A-Za-z0-9_.:%\-]*"
_EMPTY = ("", "Exiting.")
VISIBLE = ("CUDA_VISIBLE_DEVICES",)
"""The variable that lists the GPUs visible to a process."""
_GRANTED = ("SGE_HGR_gpu", "SGE_HGR_GPU", *VISIBLE)
INSTEAD = "use a job file that lists the hosts in nodes, or `distlaunch run --set launcher=local`"
ANYTHING = re.compile("")
"""Pattern for `forgives` that accepts any failure."""
Stage = Literal["waits", "goes", "ends", "over"]


class Queued(Frozen):
    """A scheduler's report on a job: `state` and `reason` in its own words, and their meaning, `stage`.

    A job that `waits` has yet to start, for the first time or again. A job that `ends` is about to leave the
    queue, or to wait again. A job that is `over` won't start again.
    If the scheduler didn't answer, the state isn't `known`.
    """

    state: str
    reason: str = ""
    stage: Stage = "over"
    known: bool = True

    @property
    def waits(self) -> bool:
        """Return whether the job has yet to start, for the first time or again."""
        return self.stage == "waits"

    @property
    def surely_waits(self) -> bool:
        """Return whether the scheduler has said that the job waits."""
        return self.waits and self.known

    @property
    def over(self) -> bool:
        """Return whether the job has ended and won't start again."""
        return self.stage == "over"

    @property
    def words(self) -> str:
        """Return the state for messages: `PENDING (Resources)`."""
        return f"{self.state} ({self.reason})" if self.reason else self.state

    @property
    def ending(self) -> str:
        """Describe how the job ended, for messages."""
        return "left the queue" if self.state == GONE.state else f"ended ({self.state})"


def stage(state: str, waits: Collection[str], goes: Collection[str], ends: Collection[str]) -> Stage:
    """Return the stage that contains a state; any other state is over."""
    stages: tuple[tuple[Stage, Collection[str]], ...] = (("waits", waits), ("goes", goes), ("ends", ends))
    return next((name for name, states in stages if state in states), "over")


CANCELLED = "CANCELLED"
"""The state of a canceled job, as in Slurm. Also used for schedulers without such a state."""
GONE = Queued("GONE")
"""The state of a job that its scheduler no longer lists, usually some minutes after the job has ended."""


def output_path(directory: str, job: str, scheduler: str) -> str:
    """Return the path of a job's script output, in the directory of its runs."""
    return f"{directory}/{scheduler}-{job}.out"


class ToolMissingError(DistlaunchError):
    """A scheduler's command that isn't installed on this machine, or can't be used here."""


def call(
    title: str,
    *argv: str,
    stdin: str = os.devnull,
    passes: Callable[[str], bool] | None = None,
    forgives: "re.Pattern[str] | None" = None,
    before: Sequence[str] = (),
) -> str:
    """Return the output of a command of the scheduler called `title`. Raises `DistlaunchError`.

    Its standard input is the file `stdin`, and its environment consists of the variables that `passes`
    accepts. Its failure is ignored if `forgives` matches every line of its message. The words in `before` are
    a shell that execs it.
    """
    from subprocess import TimeoutExpired

    env = {name: value for name, value in os.environ.items() if passes is None or passes(name)}
    try:
        done = _run((*before, *argv), ANSWER_S, stdin, env)
        if before and done.returncode == 127:
            raise FileNotFoundError
    except FileNotFoundError:
        where = f"login nodes of {title} clusters have it"
        raise ToolMissingError(f"{argv[0]} not found in PATH; {where}") from None
    except OSError as error:
        raise DistlaunchError(f"can't run {argv[0]}: {error.strerror}") from None
    except TimeoutExpired:
        text = f"{argv[0]} did not answer within {ANSWER_S:g} s: {title} may be overloaded; try again later"
        raise DistlaunchError(text) from None
    lines = (done.stderr.strip() or done.stdout).splitlines()  # some commands print errors to stdout
    if done.returncode and not (forgives and all(map(forgives.search, lines or [""]))):
        messages = (line.split("error: ", 1)[-1].strip().removeprefix(f"{argv[0]}: ") for line in lines)
        words = "; ".join(line for line in messages if line not in _EMPTY) or "it exited without a message"
        raise DistlaunchError(f"{argv[0]} failed: {words}")
    return done.stdout


def _run(
    argv: tuple[str, ...], most_s: float, stdin: str = os.devnull, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    import subprocess  # slow to import, and few schedulers need it

    with open(stdin, "rb") as given:
        return subprocess.run(
            argv, stdin=given, capture_output=True, errors="replace", timeout=most_s, check=False, env=env
        )


def job_id(pattern: str, tool: str, output: str) -> str:
    """Return the last ID in the output of a command; site-specific checks may print others before it."""
    found: list[str] = re.findall(pattern, output, re.MULTILINE)
    if not found:
        raise unexpected(tool, output)
    return found[-1]


def unexpected(tool: str, output: str) -> DistlaunchError:
    """Return the error for a command with unexpected output."""
    return DistlaunchError(f"{tool}: unexpected output: {' '.join(output.split())[:200] or 'nothing'}")


def pause_for_another_wish() -> None:
    """Wait after a signal to a job, so that distlaunch counts the next signal as a second one."""
    time.sleep(ANOTHER_WISH_S)


def user_name() -> str:
    """Return the name of the user whose jobs to query. Raises `DistlaunchError`."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        text = f"can't query the queue: this host has no user name for UID {os.getuid()}"
        raise ToolMissingError(f"{text}; try another login node") from None


def read_hosts(listing: str | tuple[str, ...], title: str) -> str:
    """Read a file, or the output of a command, that lists a job's hosts. Raises `UsageError`."""
    try:
        if isinstance(listing, tuple):
            return printed(listing)
        with open(listing, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        what = listing if isinstance(listing, str) else listing[0]
        text = f"can't read the hosts of this {title} job: {what}: {reason(error)}; {INSTEAD}"
        raise UsageError(text) from None


def printed(command: tuple[str, ...], instead: str = INSTEAD) -> str:
    """Return the output of a command that lists hosts. Raises OSError, or `UsageError` with `instead`."""
    from subprocess import TimeoutExpired

    line = shlex.join(command)
    try:
        done = _run(command, HOSTS_S)
    except TimeoutExpired:
        raise UsageError(f"`{line}` did not answer within {HOSTS_S:g} s; {instead}") from None
    if done.returncode:
        words = done.stderr.strip().splitlines()
        why = words[-1] if words else f"exit status {done.returncode}"
        raise UsageError(f"`{line}` failed: {why}; {instead}")
    return done.stdout


Slots = Iterable[tuple[str, int]]
"""Hosts with their slots. If a host is repeated, its slots are added up."""


def listed_nodes(title: str, slots: Slots, environ: Mapping[str, str]) -> tuple[AllocatedNode, ...]:
    """Return the hosts of a job with this environment. Raises ValueError for an invalid list."""
    counts: dict[str, int] = {}
    for host, count in slots:
        if not re.fullmatch(_HOST, host):
            raise ValueError(f'"{host[:60]}" is not a valid host name')
        counts[host] = counts.get(host, 0) + count
        if len(counts) > MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} hosts")
    if not counts:
        raise ValueError(f"{title} lists no hosts")
    gpus = granted_gpus(environ)
    return tuple(AllocatedNode(host, gpus, count) for host, count in counts.items())


def lines_of(text: str) -> list[str]:
    """Return the nonempty lines of a text."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def slots_in(text: str, line: str) -> int:
    """Return the number of slots in `text`, which is part of `line`. Raises ValueError."""
    if not re.fullmatch("[0-9]{1,7}", text) or not 0 < int(text) <= MAX_SLOTS:
        raise ValueError(f'"{line[:60]}" does not name a host and its slots')
    return int(text)


def granted_gpus(environ: Mapping[str, str], variables: Sequence[str] = _GRANTED) -> int | None:
    """Return the number of GPUs in the first of these variables that is set; None = unknown.

    By default, these are the GPUs granted to the job on this host. Other hosts are assumed to have as many.
    """
    for name in variables:
        if name in environ:
            ids = re.split(r"[,\s]+", environ[name].strip())
            return len([each for each in ids if each and not each.startswith(("-", "No"))])
    return None
