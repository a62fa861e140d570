"""Grid Engine's queue, by its own commands; see qsub(1), qstat(1) and qdel(1)."""

import os
import pwd
import re
from collections.abc import Sequence

from distlaunch.batch.queue import Queued, Stage, ask, call, failed, unexpected

TITLE = "Grid Engine"
# No XML parser: versions differ in what they declare, and names of jobs are not always escaped.
_JOB = re.compile(r"<JB_job_number>(\d+)</JB_job_number>.*?<state>(\w+)</state>", re.DOTALL)
_END = "</job_info>"


def submit(script: str) -> str:
    """Submit the script of that path; the job's id. Raises `DistlaunchError`."""
    said = call(TITLE, "qsub", "-terse", script)
    ids = re.findall(r"^\d+$", said, re.MULTILINE)  # a site's own checks may print more before it
    if not ids:
        raise unexpected("qsub", said)
    return str(ids[-1])


def look(jobs: Sequence[str]) -> dict[str, Queued]:
    """What it says of these jobs, by their ids: one that is over is not listed. Raises `DistlaunchError`."""
    said = call(TITLE, "qstat", "-u", pwd.getpwuid(os.getuid()).pw_name, "-xml")
    if _END not in said:  # an answer that is cut off must not mean that all jobs are over
        raise unexpected("qstat", said)
    return {job: state for job, state in jobs_in(said).items() if job in jobs}


def jobs_in(said: str) -> dict[str, Queued]:
    """Those that `qstat -xml` has listed, by their ids."""
    return {job: _queued(letters, job) for job, letters in _JOB.findall(said)}


def _queued(letters: str, job: str) -> Queued:
    if "E" in letters:
        return Queued(letters, f"can't start: `qstat -j {job}` says why", "waits")
    return Queued(letters, "", _stage(letters))


def _stage(letters: str) -> Stage:
    if "z" in letters:
        return "over"
    return "waits" if "w" in letters and "d" not in letters else "goes"


def cancel(job: str, at_once: bool = False) -> None:
    """End a job, waiting or running. Raises `DistlaunchError`.

    Nothing is faster than qdel: `qdel -f` is the administrators', and only for hosts that do not answer.
    """
    said = ask(TITLE, "qdel", job)
    if said.status and "does not exist" not in said.stdout + said.stderr:  # it may be over by now
        raise failed(said)
