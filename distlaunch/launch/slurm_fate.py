"""What Slurm says of a job's fate: whether, when and why it ends."""

import re
from collections.abc import Mapping
from datetime import datetime

from distlaunch.agent.frozen import Frozen


class Fate(Frozen):
    """What `scontrol show job` tells: whether the job `ends`, and why; `end` is Unix time, None = open."""

    ends: bool | None
    why: str = ""
    end: float | None = None

    @property
    def final(self) -> bool:
        """Whether Slurm itself starts the job again, or nobody is to; else it may be asked to."""
        return bool(self.ends) and self.why not in _MAY_GO_ON


_GOING = ("RUNNING", "SUSPENDED", "STOPPED", "CONFIGURING", "SIGNALING", "RESIZING")
_WHYS = {
    "TIMEOUT": "reached its time limit",
    "DEADLINE": "reached its deadline",
    "PREEMPTED": "was preempted",
    "NODE_FAIL": "lost a node",
    "OUT_OF_MEMORY": "ran out of memory",
    "PENDING": "was requeued",
    "REQUEUED": "was requeued",
}
_MAY_GO_ON = (_WHYS["TIMEOUT"], _WHYS["OUT_OF_MEMORY"])
_REASONS = {"NodeDown": "NODE_FAIL", "TimeLimit": "TIMEOUT"}
_DURATION = r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)"


def fate_argv(job: str) -> list[str]:
    """The command that prints what `job_fate` reads."""
    return ["scontrol", "show", "job", job, "--oneliner"]


def job_fate(text: str, starts: int = 0) -> Fate:
    """The fate of a job, from `scontrol show job ID --oneliner`, whose times are local.

    We are in its start number `starts`, from 0: what Slurm says may be of a later one.
    """
    told = dict(re.findall(r"(?:^|\s)([A-Za-z]+)=(\S*)", text))
    state = told.get("JobState")
    if state is None:
        return Fate(None)
    if int(told.get("Restarts", "0")) > starts:
        return Fate(True, _WHYS["REQUEUED"])
    end = _time(told.get("EndTime", ""))
    if state in _GOING:
        return Fate(False, "", end)
    return Fate(True, _WHYS.get(state) or _why_completing(told, end), end)


def _why_completing(told: Mapping[str, str], end: float | None) -> str:
    """A job that is still being ended does not say why: its times do."""
    if (reason := told.get("Reason")) in _REASONS:
        return _WHYS[_REASONS[reason]]
    if end is None:  # it has begun a new life
        return _WHYS["REQUEUED"]
    begin, limit = _time(told.get("StartTime", "")), _seconds(told.get("TimeLimit", ""))
    if begin is not None and end is not None and limit is not None and end - begin >= limit:
        return _WHYS["TIMEOUT"]
    if _time(told.get("PreemptTime", "")) is not None:
        return _WHYS["PREEMPTED"]
    return "was cancelled"


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None  # Unknown, None


def _seconds(text: str) -> float | None:
    found = re.fullmatch(_DURATION, text)
    if not found:
        return None  # UNLIMITED
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
