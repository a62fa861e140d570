"""What it means that a link failed: ssh's own words, classified, with what to do about it."""

import re
from enum import Enum
from typing import NamedTuple

from distlaunch.agent.wire import AGENT_DIED, CLEAN, LEFT_EARLY
from distlaunch.transport.boot import NO_PYTHON, TOO_OLD


class Kind(Enum):
    """Why a node could not be used."""

    UNREACHABLE = "unreachable"
    UNRESOLVED = "unknown host"
    REFUSED = "connection refused"
    AUTHENTICATION = "authentication failed"
    HOST_KEY = "host key not accepted"
    NO_PYTHON = "no python"
    OLD_PYTHON = "python too old"
    DROPPED = "dropped by the server"
    SILENT = "no answer"
    PROTOCOL = "not an agent of this version"
    BAD_OPTION = "ssh refused its options"
    UNSTARTED = "agent not started"
    LOST = "connection lost"


class LinkFailure(NamedTuple):
    """A failed link: its kind, the last words received, and whether the node said that it is `clean`."""

    kind: Kind
    words: str = ""
    clean: bool = False

    @property
    def may_pass(self) -> bool:
        """Whether the node may be usable later without anybody's mending a setting."""
        return self.kind not in _SETTINGS

    @property
    def worth_retrying(self) -> bool:
        """Only a server that shed load may let us in at the next try; failed logins may be punished."""
        return self.kind is Kind.DROPPED

    @property
    def advice(self) -> str:
        """What the user can do, as one clause."""
        return _ADVICE[self.kind]


_SETTINGS = frozenset(
    {Kind.AUTHENTICATION, Kind.HOST_KEY, Kind.NO_PYTHON, Kind.OLD_PYTHON, Kind.PROTOCOL, Kind.BAD_OPTION}
)
_ADVICE = {
    Kind.UNREACHABLE: "is the machine up, and the name, address and port right?",
    Kind.UNRESOLVED: "give the host as ssh knows it, or add it to your ssh_config",
    Kind.REFUSED: "is sshd running there, and on this port?",
    Kind.AUTHENTICATION: "distlaunch asks for no password: `ssh-copy-id` your key, or load it with ssh-add",
    Kind.HOST_KEY: "connect once with plain ssh and check the key; distlaunch never accepts one for you",
    Kind.NO_PYTHON: "install python3 (3.8 or later) there, or name one with `python:`",
    Kind.OLD_PYTHON: "name one that is 3.8 or later with `python:`",
    Kind.DROPPED: "raise MaxStartups in its sshd_config, or start fewer agents on one machine",
    Kind.SILENT: "does something other than sshd answer there, or does its shell start-up wait?",
    Kind.PROTOCOL: "does its shell start-up print without end?",
    Kind.BAD_OPTION: "see `ssh:` in the job file, and the ssh_config",
    Kind.UNSTARTED: "try `ssh HOST python3 -V`: its login shell or its python ended too soon",
    Kind.LOST: "see the network and the machine's log",
}

_HOST_KEY = (
    r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED"
    r"|No \S+ host key is known|host key for .* (?:has changed|was revoked)"
)
_DROPPED = (
    r"(?:kex|ssh)_exchange_identification: (?:read: Connection reset|Connection closed)"
    r"|Exceeded MaxStartups|Not allowed at this time"
    r"|(?:Connection closed by|Connection reset by) \S+ port \d+\s*\Z"
)
_AUTHENTICATION = r"Permission denied \(|Too many authentication failures|No more authentication methods"
_BAD_OPTION = (
    r"Bad configuration option|bad configuration options|^command-line:? line \d+"
    r"|Can't open user config file|Bad owner or permissions on|Unable to negotiate with"
)
_UNREACHABLE = (
    r"timed out|No route to host|Network is unreachable|Host is down"
    r"|connect to host .*: Permission denied"  # ICMPv6 "administratively prohibited"
)
_BY_THE_NODE = (
    (Kind.NO_PYTHON, re.escape(NO_PYTHON)),
    (Kind.OLD_PYTHON, rf"^{re.escape(TOO_OLD)} \d|Unknown option: -I"),
)
# In this order: behind a jump host, ssh adds that it was dropped to what the jump host really said.
_BY_SSH = (
    (Kind.HOST_KEY, _HOST_KEY),
    (Kind.AUTHENTICATION, _AUTHENTICATION),
    (Kind.UNRESOLVED, r"Could not resolve hostname"),
    (Kind.BAD_OPTION, _BAD_OPTION),
    (Kind.REFUSED, r"Connection refused"),
    (Kind.SILENT, r"timed out during banner exchange|banner exchange: Connection to .* timed out"),
    (Kind.SILENT, r"^Connection to \S+ port \d+ timed out"),  # in the key exchange
    (Kind.UNREACHABLE, _UNREACHABLE),
    (Kind.DROPPED, _DROPPED),
)


CLEAN_STATUSES = (CLEAN, LEFT_EARLY, AGENT_DIED)
"""How a guardian ends when nothing is left below it; ssh passes it on."""
SSH_FAILED = 255
"""Exit status of ssh's own failures; any other is the node's, passed on."""
MAX_NOISE_LINES = 4


def classify(
    stderr: str,
    *,
    booted: bool = False,
    status: int | None = None,
    noise: str = "",
    timed_out: bool = False,
    protocol_error: str = "",
) -> LinkFailure:
    """The failure that a transport's end describes, before or after its agent had `booted`.

    `stderr` is the whole of what it printed and `status` its exit status; `noise` is what the node's shell
    printed in place of the agent's first word.
    """
    words = _lines(stderr)
    for kind, pattern in () if booted else _patterns(status):
        if re.search(pattern, "\n".join(words), re.MULTILINE):
            return LinkFailure(kind, "\n".join(words))
    if not booted:
        words += _lines(noise)[-MAX_NOISE_LINES:]
    if timed_out:
        return LinkFailure(Kind.SILENT, "\n".join(words))
    if protocol_error:
        return LinkFailure(Kind.PROTOCOL, "\n".join([*words, protocol_error]))
    if booted or status in (None, SSH_FAILED):
        return LinkFailure(Kind.LOST, "\n".join(words), clean=booted and status in CLEAN_STATUSES)
    return LinkFailure(Kind.UNSTARTED, "\n".join([*words, f"it ended with status {status}"]))


def _patterns(status: int | None) -> tuple[tuple[Kind, str], ...]:
    # What an rc file prints before the node's own failure is no word of ssh's.
    if status is None:
        return _BY_THE_NODE + _BY_SSH
    return _BY_SSH if status == SSH_FAILED else _BY_THE_NODE


def _lines(text: str) -> list[str]:
    return [line for line in text.replace("\r", "").splitlines() if line.strip()]
