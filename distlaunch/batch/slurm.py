"""Slurm's queue, by its own commands: each function is one call."""

import os
import pwd
import subprocess
from collections.abc import Sequence

from distlaunch.agent.frozen import Frozen
from distlaunch.errors import DistlaunchError
from distlaunch.transport.slurm import VARIABLES

ANSWER_S = 60.0
"""Seconds for slurmctld to answer; it may be busy, or restarting."""
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")
_GOING = (
    "RUNNING",
    "CONFIGURING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
)


class Queued(Frozen):
    """What Slurm says of a job: its state and the reason, in its own words."""

    state: str
    reason: str = ""

    @property
    def waits(self) -> bool:
        """Whether it is to start, for the first time or again."""
        return self.state in WAITING

    @property
    def over(self) -> bool:
        """Whether nothing follows."""
        return not self.waits and self.state not in _GOING

    @property
    def words(self) -> str:
        """For people: `PENDING (Resources)`."""
        known = self.reason not in ("", "None")
        return f"{self.state} ({self.reason})" if known else self.state


GONE = Queued("GONE")
"""A job that Slurm does not know any more: it forgets those that have ended minutes ago."""


def submit(script: str) -> str:
    """Submit the script of that path; the job's id. Raises `DistlaunchError`."""
    said = _call("sbatch", "--parsable", script)
    return said.strip().splitlines()[-1].partition(";")[0]


def look(job: str | None = None) -> dict[str, Queued]:
    """A job, or all of this user that Slurm knows, by their ids. Raises `DistlaunchError`."""
    which = f"--user={pwd.getpwuid(os.getuid()).pw_name}" if job is None else f"--jobs={job}"
    try:
        said = _call("squeue", "--noheader", "--states=all", which, "--format=%i|%T|%r")
    except DistlaunchError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    rows = (line.split("|", 2) for line in said.splitlines() if line.count("|") >= 2)
    return {job.strip(): Queued(state, reason) for job, state, reason in rows}


def cancel(job: str, at_once: bool = False) -> None:
    """End a job, pending or running; `at_once` leaves its ranks no time. Raises `DistlaunchError`."""
    _call("scancel", job)
    if at_once:
        _call("scancel", "--signal=KILL", job)


def requeue(job: str) -> None:
    """Have a job start again; one that is to do so already stays so. Raises `DistlaunchError`."""
    try:
        _call("scontrol", "requeue", job)
    except DistlaunchError as error:
        if "pending execution" not in str(error):
            raise


def _call(*argv: str) -> str:
    """What one of Slurm's commands prints. Raises `DistlaunchError` with its words."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            check=False,
            env=_environment(),
        )
    except FileNotFoundError:
        raise DistlaunchError(
            f"{argv[0]} not found: Slurm's commands are on the login nodes; from elsewhere use --on HOST"
        ) from None
    except subprocess.TimeoutExpired:
        raise DistlaunchError(f"Slurm did not answer {argv[0]} within {ANSWER_S:g} s") from None
    if done.returncode:
        raise DistlaunchError(f"{argv[0]} failed: {_words(done.stderr)}")
    return done.stdout


def _environment() -> dict[str, str]:
    """Ours without what describes an allocation that we are inside of: sbatch would take it for options."""
    given = os.environ.items()
    return {name: value for name, value in given if name in _KEPT or not name.startswith(VARIABLES)}


def _words(stderr: str) -> str:
    """What it said, without its name before each line."""
    lines: Sequence[str] = [line.split("error: ", 1)[-1].strip() for line in stderr.splitlines()]
    return "; ".join(filter(None, lines)) or "it exited without a message"
