"""The failures of links: their kinds, and the patterns that all transports share."""

import re
from collections.abc import Sequence
from enum import Enum

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.wire import AGENT_DIED, CLEAN, LEFT_EARLY
from distlaunch.wording import status_words

TOO_OLD = "distlaunch-agent"
"""Printed on stderr before the version of an interpreter older than 3.8. Also the agent's name in ps."""
NO_PYTHON = "distlaunch: no python"
NO_IMAGE = "distlaunch: no image"
NO_RUNTIME = "distlaunch: no container runtime"


class Kind(Enum):
    """The reason why a node can't be used."""

    UNREACHABLE = "unreachable"
    UNRESOLVED = "unknown host"
    REFUSED = "connection refused"
    AUTHENTICATION = "authentication failed"
    HOST_KEY = "host key not accepted"
    HOST_KEY_CHANGED = "host key changed"
    HOST_KEY_REVOKED = "host key revoked"
    NO_PYTHON = "no python"
    OLD_PYTHON = "python too old"
    DROPPED = "dropped by the server"
    SILENT = "no answer"
    NOT_SSH = "not an ssh server"
    ALGORITHM = "no algorithm in common"
    SESSION = "session refused"
    FORWARDING = "jump host refuses to forward"
    JUMP_UNRESOLVED = "unknown to the jump host"
    NO_PROXY = "ProxyCommand can't be run"
    PROXY = "closed by its proxy"
    NOISE = "too much output before the agent started"
    PROTOCOL = "protocol error"
    BAD_OPTION = "ssh refused its options"
    SHARING = "connection can't be kept open"
    UNSTARTED = "agent not started"
    LOST = "connection lost"
    NO_ALLOCATION = "no allocation"
    NO_SCHEDULER = "no answer from the scheduler"
    NODE_DOWN = "node down"
    STEP_REFUSED = "step refused"
    NO_RUNTIME = "no container runtime"
    NO_IMAGE = "no image"
    TASK_REFUSED = "task refused"
    ABSENT = "not there yet"


class LinkFailure(Frozen):
    """A failed link: its kind, its last output, and whether the node reported that it is `clean`.

    A transport's `advice` explains what to do about the failure.
    """

    kind: Kind
    words: str = ""
    clean: bool = False

    @property
    def may_pass(self) -> bool:
        """Return whether the node may become usable without changes to settings."""
        return self.kind not in _SETTINGS

    @property
    def worth_retrying(self) -> bool:
        """Return whether to try again. Only overload is retried, since servers may penalize failed logins."""
        return self.kind in (Kind.DROPPED, Kind.PROXY)

    def saying(self, more: str) -> "LinkFailure":
        """Return the same failure with `more` added to its output."""
        return self._replace(words="\n".join(filter(None, (self.words, more))))


Patterns = Sequence[tuple[Kind, str]]
"""The regular expressions that identify failures, in search order."""


class ProcessEnd(Frozen):
    """The end of a transport process, before or after its agent `booted`.

    `stderr` is the end of its stderr output. `status` is its exit status, or None while it is still running.
    `noise` is the output of the node's shell before the first output of the agent. `timed_out` is set if the
    controller gave up on the node. `protocol_error` is the reason why the output is invalid, or "".
    """

    stderr: str
    booted: bool = False
    status: int | None = None
    noise: str = ""
    timed_out: bool = False
    protocol_error: str = ""


_SETTINGS = frozenset(
    {
        *(Kind.AUTHENTICATION, Kind.HOST_KEY, Kind.HOST_KEY_CHANGED, Kind.HOST_KEY_REVOKED),
        *(Kind.NO_PYTHON, Kind.OLD_PYTHON, Kind.NOISE, Kind.PROTOCOL, Kind.NO_RUNTIME),
        *(Kind.NOT_SSH, Kind.ALGORITHM, Kind.FORWARDING, Kind.NO_PROXY, Kind.BAD_OPTION, Kind.SHARING),
    }
)

_BY_THE_NODE = (
    (Kind.NO_PYTHON, re.escape(NO_PYTHON)),
    (Kind.NO_RUNTIME, re.escape(NO_RUNTIME)),
    (Kind.NO_IMAGE, re.escape(NO_IMAGE)),
    (Kind.OLD_PYTHON, rf"^{re.escape(TOO_OLD)} \d|Unknown option: -I"),
)
CLEAN_STATUSES = (CLEAN, LEFT_EARLY, AGENT_DIED)
"""Exit statuses of a guardian that left no process behind. Transports pass them on."""
MAX_NOISE_LINES = 4


def classify(
    end: ProcessEnd, own: Patterns = (), own_status: int | None = None, process: str = "its link's process"
) -> LinkFailure:
    """Return the failure that `end` describes.

    `own` contains the patterns for failures of the transport itself, which exits with `own_status` in that
    case. Any other status comes from the node. `process` names the transport in the message about a signal.
    """
    words = "\n".join(_lines(end.stderr))
    for kind, pattern in () if end.booted else _patterns(end.status, own, own_status):
        if re.search(pattern, words, re.MULTILINE):
            return LinkFailure(kind, words)
    failure = LinkFailure(Kind.LOST, words)
    if not end.booted:
        failure = failure.saying("\n".join(_lines(end.noise)[-MAX_NOISE_LINES:]))
    if end.timed_out:
        return failure._replace(kind=Kind.SILENT)
    if end.protocol_error:
        kind = Kind.PROTOCOL if end.booted else Kind.NOISE
        return failure._replace(kind=kind).saying(end.protocol_error)
    if end.status is not None and end.status < 0:
        return failure.saying(f"{process} was {status_words(end.status)}")
    if end.booted and not words and end.status == own_status and own_status not in CLEAN_STATUSES:
        # ssh exits like this if a signal ends it, and also if one ends the node's command.
        failure = failure.saying(f"its agent exited, or a signal stopped {process}")
    if end.booted or end.status in (None, own_status):
        return failure._replace(clean=end.booted and end.status in CLEAN_STATUSES)
    why = f"exited with status {end.status} before the agent started"
    return failure._replace(kind=Kind.UNSTARTED).saying(why)


def _patterns(status: int | None, own: Patterns, own_status: int | None) -> Patterns:
    # If the node has failed, an rc file may have printed messages that resemble those of the transport.
    if status is None:
        return (*_BY_THE_NODE, *own)
    return own if status == own_status else _BY_THE_NODE


def _lines(text: str) -> list[str]:
    return [line for line in text.replace("\r", "").splitlines() if line.strip()]
