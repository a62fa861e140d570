"""Slurm's queue, by its own commands: each function is one call."""

import os
import pwd
from collections.abc import Sequence

from distlaunch.batch.queue import Queued, Stage, call
from distlaunch.errors import DistlaunchError
from distlaunch.transports.slurm import VARIABLES

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


def submit(script: str) -> str:
    """Submit the script of that path; the job's id. Raises `DistlaunchError`."""
    said = _call("sbatch", "--parsable", script)
    return said.strip().splitlines()[-1].partition(";")[0]


def look(jobs: Sequence[str]) -> dict[str, Queued]:
    """What Slurm says of these jobs, by their ids. Raises `DistlaunchError`."""
    # Of several, some may be forgotten, which squeue would take for an error.
    which = f"--jobs={jobs[0]}" if len(jobs) == 1 else f"--user={pwd.getpwuid(os.getuid()).pw_name}"
    try:
        said = _call("squeue", "--noheader", "--states=all", which, "--format=%i|%T|%r")
    except DistlaunchError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    rows = (line.split("|", 2) for line in said.splitlines() if line.count("|") >= 2)
    return {job.strip(): queued(state, reason) for job, state, reason in rows}


def queued(state: str, reason: str = "") -> Queued:
    """What squeue's words for a job mean."""
    stage: Stage = "waits" if state in WAITING else "goes" if state in _GOING else "over"
    return Queued(state, "" if reason == "None" else reason, stage)


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
    return call("Slurm", *argv, env=_environment())


def _environment() -> dict[str, str]:
    """Ours without what describes an allocation that we are inside of: sbatch would take it for options."""
    given = os.environ.items()
    return {name: value for name, value in given if name in _KEPT or not name.startswith(VARIABLES)}
