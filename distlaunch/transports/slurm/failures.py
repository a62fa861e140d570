"""srun's words, by what they mean; read off Slurm 22.05 and its sources' messages."""

import re
from collections.abc import Sequence

from distlaunch.transports.failure import Kind, Patterns, ProcessEnd

SRUN_FAILED = 1
"""srun's own exit status, and a task's that ends so."""

BY_SRUN: Patterns = (
    (
        Kind.NO_ALLOCATION,
        r"Invalid job id|[Jj]ob/step already complet|has been revoked|allocation .* has expired",
    ),
    (Kind.NO_ALLOCATION, r"Unable to confirm allocation"),
    (Kind.NODE_DOWN, r"[Nn]ode failure|required nodes? (?:is|are) not available|nodes? .* DOWN"),
    (
        Kind.UNREACHABLE,
        r"Communication connection failure|Unable to contact slurm|Connection (?:refused|timed out)",
    ),
    (Kind.STEP_REFUSED, r"Unable to create step|Unable to allocate resources|Access/permission denied"),
)

_CHATTER = r"lacks support for cpu binding"
_TASK_ENDED = r"tasks? [\d,-]+: Exited with exit code"
_KILLED = r"tasks? [\d,-]+: Killed"
_BROKEN = rf"[Nn]ode failure|Force Terminated|Job step aborted|{_KILLED}"
_FOLLOWS = (r"Force Terminated|Job step aborted|forcing job termination", _KILLED)
"""What srun says after the cause, which of these is the last to be left out."""


def telling(end: ProcessEnd) -> str:
    """What srun said of the cause: not what it always says, nor a guardian's status, which says it itself."""
    silent = f"{_CHATTER}|{_TASK_ENDED}" if end.booted else _CHATTER
    lines = _without(silent, end.stderr.splitlines(True))
    for pattern in _FOLLOWS:
        lines = _without(pattern, lines) or lines
    return "".join(lines)


def _without(pattern: str, lines: Sequence[str]) -> list[str]:
    return [line for line in lines if not re.search(pattern, line)]


def swept(end: ProcessEnd) -> bool:
    """Whether the status is that of a guardian that found nothing below it: srun's own failure is 1, too."""
    if re.search(_BROKEN, end.stderr):
        return False
    return end.status == 0 or bool(re.search(_TASK_ENDED, end.stderr))
