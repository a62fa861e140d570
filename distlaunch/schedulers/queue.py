"""What schedulers' commands and files say: of jobs in a queue, of a job's hosts, of what becomes of it."""

import os
import pwd
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import DistlaunchError, UsageError, reason
from distlaunch.job.allocation import AllocatedNode
from distlaunch.wording import MAX_HOSTS

if TYPE_CHECKING:
    import subprocess

    from distlaunch.supervisor.events import AllocationTold

ANSWER_S = 60.0
"""Seconds for a queue to answer; it may be busy, or restarting."""
HOSTS_S = 10.0
"""Seconds for a command to list the hosts."""
ANOTHER_WISH_S = 0.25
"""Seconds between two signals, of which the second one ends all at once: closer together they are one."""
MAX_BYTES = 1 << 24
MAX_SLOTS = 1_000_000
"""More than this on one host is no count."""
_HOST = r"[A-Za-z0-9_][A-Za-z0-9_.:%\-]*"
_EMPTY = ("", "Exiting.")
_INSTEAD = "list the hosts in nodes, or use `--set launcher=local`"
ANYTHING = re.compile("")
"""Forgives a command that may fail."""
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
        """Tell whether the job is to start, for the first time or again."""
        return self.stage == "waits"

    @property
    def over(self) -> bool:
        """Tell whether nothing follows."""
        return self.stage == "over"

    @property
    def words(self) -> str:
        """Return the state for people: `PENDING (Resources)`."""
        return f"{self.state} ({self.reason})" if self.reason else self.state

    @property
    def ending(self) -> str:
        """Return how the job ended, for people."""
        return "left the queue" if self.state == GONE.state else f"ended ({self.state})"


CANCELLED = "CANCELLED"
"""The end of a job that was cancelled, as Slurm calls it, and we where a scheduler does not say."""
GONE = Queued("GONE")
"""A job that its scheduler does not list any more: ended ones are forgotten at once, or in minutes."""


def output_path(folder: str, job: str, scheduler: str) -> str:
    """Return where the output of a script goes: into the directory of the runs, by the job's ID."""
    return f"{folder}/{scheduler}-{job}.out"


class ToolMissingError(DistlaunchError):
    """A scheduler's command is not installed here."""


def call(
    title: str,
    *argv: str,
    stdin: str = os.devnull,
    passes: Callable[[str], bool] | None = None,
    forgives: "re.Pattern[str] | None" = None,
) -> str:
    """Return what a command of the scheduler that people call `title` prints. Raises `DistlaunchError`.

    It reads the file `stdin`, and gets those of our variables whose names pass. It may fail if each line that
    it says is forgiven.
    """
    from subprocess import TimeoutExpired

    env = {name: value for name, value in os.environ.items() if passes is None or passes(name)}
    try:
        done = _run(argv, ANSWER_S, stdin, env)
    except FileNotFoundError:
        raise ToolMissingError(
            f"{argv[0]} not found: {title}'s commands are on the login nodes; from elsewhere use --on HOST"
        ) from None
    except OSError as error:
        raise DistlaunchError(f"can't run {argv[0]}: {error.strerror}") from None
    except TimeoutExpired:
        raise DistlaunchError(f"{title} did not answer {argv[0]} within {ANSWER_S:g} s") from None
    lines = (done.stderr.strip() or done.stdout).splitlines()  # some commands print errors to stdout
    if done.returncode and not (forgives and all(map(forgives.search, lines or [""]))):
        told = (line.split("error: ", 1)[-1].strip().removeprefix(f"{argv[0]}: ") for line in lines)
        words = "; ".join(line for line in told if line not in _EMPTY) or "it exited without a message"
        raise DistlaunchError(f"{argv[0]} failed: {words}")
    return done.stdout


def _run(
    argv: tuple[str, ...], most_s: float, stdin: str = os.devnull, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    import subprocess  # expensive, and few schedulers have to be asked for hosts

    with open(stdin, "rb") as given:
        return subprocess.run(
            argv,
            stdin=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=most_s,
            check=False,
            env=env,
        )


def job_id(pattern: str, tool: str, said: str) -> str:
    """Find the last ID that a command has printed; a site's own checks may print more before it."""
    found: list[str] = re.findall(pattern, said, re.MULTILINE)
    if not found:
        raise unexpected(tool, said)
    return found[-1]


def unexpected(tool: str, said: str) -> DistlaunchError:
    """Make the error of a command that has not printed what it should."""
    return DistlaunchError(f"{tool}: unexpected output: {' '.join(said.split())[:200] or 'nothing'}")


def pause_for_another_wish() -> None:
    """Wait after one signal to a job, so that distlaunch there takes the next one for a wish to hurry."""
    time.sleep(ANOTHER_WISH_S)


def user_name() -> str:
    """Return the name of the user whose jobs are meant."""
    return pwd.getpwuid(os.getuid()).pw_name


def read_hosts(listing: str | tuple[str, ...], title: str) -> str:
    """Return what a file, or a command, says that lists the hosts of a job. Raises `UsageError`."""
    try:
        return _text(listing) if isinstance(listing, str) else printed(listing)
    except OSError as error:
        what = listing if isinstance(listing, str) else listing[0]
        told = f"can't read the hosts of this {title} job: {what}: {reason(error)}; {_INSTEAD}"
        raise UsageError(told) from None


def _text(path: str) -> str:
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES >> 20} MiB: not a list of hosts")
    return data.decode(errors="replace")


def printed(command: tuple[str, ...], instead: str = _INSTEAD) -> str:
    """Return what a command prints that lists hosts. Raises OSError, or `UsageError` with `instead`."""
    from subprocess import TimeoutExpired

    line = " ".join(command)
    try:
        done = _run(command, HOSTS_S)
    except TimeoutExpired:
        raise UsageError(f"`{line}` did not answer within {HOSTS_S:g} s; {instead}") from None
    if done.returncode:
        words = done.stderr.strip().splitlines()
        told = words[-1] if words else f"exit status {done.returncode}"
        raise UsageError(f"`{line}` failed: {told}; {instead}")
    return done.stdout


Slots = Iterable[tuple[str, int]]
"""Hosts, each with its slots there; one that comes again adds them up."""


def listed_nodes(title: str, slots: Slots, environ: Mapping[str, str]) -> tuple[AllocatedNode, ...]:
    """Return the hosts of a job with this environment. Raises ValueError for a list that is none."""
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
    """Split a text into its lines, without those that are empty."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def slots_in(text: str, line: str) -> int:
    """Read `text`, of a whole `line`, as a number of slots. Raises ValueError."""
    if not re.fullmatch("[0-9]{1,7}", text) or not 0 < int(text) <= MAX_SLOTS:
        raise ValueError(f'"{line[:60]}" does not name a host and its slots')
    return int(text)


def granted_gpus(environ: Mapping[str, str]) -> int | None:
    """Count the GPUs of the job on this host, as on each; None = its environment does not say."""
    for name in ("SGE_HGR_gpu", "SGE_HGR_GPU", "CUDA_VISIBLE_DEVICES"):
        if name in environ:
            ids = re.split(r"[,\s]+", environ[name].strip())
            return len([each for each in ids if each and not each.startswith(("-", "No"))])
    return None


class Question:
    """A question about the fate of a job, under way; `fd` is readable when some of the answer has come.

    `meaning` makes of all that `argv` has printed, and of the time, what it tells.
    """

    def __init__(self, argv: list[str], meaning: Callable[[str, float], "AllocationTold"]) -> None:
        import subprocess

        self._heard, self._meaning = b"", meaning
        self._process: subprocess.Popen[bytes] | None = None
        read, write = os.pipe()
        self.fd = read
        # Inherited: a scheduler may end all processes of a job at once, and so the one that asks it why.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            pass  # not installed here: the end of the pipe is the answer
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(write)
        os.set_blocking(read, False)

    def answer(self) -> "AllocationTold | None":
        """Return the answer; None while more is to come."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return None
        self._heard += data
        return None if data else self._meaning(self._heard.decode(errors="replace"), time.time())

    def close(self) -> None:
        """Leave nothing behind, whether it has answered or not."""
        os.close(self.fd)
        if self._process:
            self._process.kill()
            self._process.wait()
