"""The queue of PBS Professional, OpenPBS and Torque, by their own commands: qsub(1B), qstat(1B), qdel(1B)."""

import re
import time
from collections.abc import Iterator, Sequence

from distlaunch.batch.queue import Queued, Said, Stage, ask, call, failed, unexpected

TITLE = "PBS"
ANOTHER_WISH_S = 0.25
"""Between two SIGTERMs, of which the second one ends all at once: what comes closer together is one."""
_ID = re.compile(r"^\d+\.[\w.-]+$", re.MULTILINE)
_OVER = re.compile("Unknown Job Id|Job has finished|invalid for (state of|finished) job", re.IGNORECASE)
_WAITING, _GOING = "QHWT", "RESUB"


def submit(script: str) -> str:
    """Submit the script of that path; the job's id, with its server's name. Raises `DistlaunchError`."""
    said = call(TITLE, "qsub", script)
    ids = _ID.findall(said)  # a site's own checks may print more before it
    if not ids:
        raise unexpected("qsub", said)
    return str(ids[-1])


def look(jobs: Sequence[str]) -> dict[str, Queued]:
    """What it says of these jobs, by their ids: most servers forget one that is over.

    Raises `DistlaunchError`.
    """
    # Not for all of a user: only the table of -u can do that, which cuts ids off. Not -x, Torque's XML.
    said = ask(TITLE, "qstat", "-f", *jobs)
    if said.status and not _only_forgotten(said):
        raise failed(said)
    return jobs_in(said.stdout)


def _only_forgotten(said: Said) -> bool:
    """Whether all that went wrong is that some of the jobs are over."""
    lines = said.stderr.strip().splitlines()
    return bool(lines) and all(_OVER.search(line) for line in lines)


def jobs_in(text: str) -> dict[str, Queued]:
    """Those that `qstat -f` has listed, by their ids."""
    whole = text.replace("\n\t", "")  # long values go on in another line
    return dict(_jobs(whole))


def _jobs(whole: str) -> Iterator[tuple[str, Queued]]:
    for part in re.split(r"^Job Id:\s*", whole, flags=re.MULTILINE)[1:]:
        told = dict(re.findall(r"^ {4}(job_state|comment) = (.*)$", part, re.MULTILINE))
        state = told.get("job_state", "").strip()
        if state:
            yield part.split()[0], Queued(state, told.get("comment", "").strip(), _stage(state))


def _stage(state: str) -> Stage:
    return "waits" if state in _WAITING else "goes" if state in _GOING else "over"


def cancel(job: str, at_once: bool = False) -> None:
    """End a job, waiting or running; `at_once` leaves its ranks no time. Raises `DistlaunchError`.

    `qdel -W force` would forget the job while processes of it may go on, and Torque has no such option. So
    distlaunch gets two SIGTERMs, of which qdel sends one.
    """
    if at_once:
        ask(TITLE, "qsig", "-s", "TERM", job)  # refused for a job that does not run
        time.sleep(ANOTHER_WISH_S)
    said = ask(TITLE, "qdel", job)
    if said.status and not _OVER.search(said.words):
        raise failed(said)
