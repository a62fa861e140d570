"""What it means that a link failed: ssh's own words, classified."""

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


class LinkFailure(NamedTuple):
    """A failed link: its kind, the last words received, and whether the node said that it is `clean`.

    What to do about it is in `distlaunch.transport.advice`.
    """

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
        return self.kind in (Kind.DROPPED, Kind.PROXY)

    @property
    def on_the_way(self) -> bool:
        """Whether it was the jump host or ProxyCommand that failed, so that ssh never met the node."""
        return re.search(_NO_PEER, self.words) is not None and _FORWARDING_FAILED not in self.words


_SETTINGS = frozenset(
    {
        *(Kind.AUTHENTICATION, Kind.HOST_KEY, Kind.HOST_KEY_CHANGED, Kind.HOST_KEY_REVOKED),
        *(Kind.NO_PYTHON, Kind.OLD_PYTHON, Kind.NOISE, Kind.PROTOCOL),
        *(Kind.NOT_SSH, Kind.ALGORITHM, Kind.FORWARDING, Kind.NO_PROXY, Kind.BAD_OPTION, Kind.SHARING),
    }
)

# Under StrictHostKeyChecking=no, ssh warns of a changed key as loudly and goes on: only a refusal counts.
_STRICT = "and you have requested strict checking"
_CHANGED = rf"[Hh]ost key for .* has changed {_STRICT}"
_REVOKED = (
    rf"[Hh]ost key for .* (?:was|is marked as) revoked(?: {_STRICT}|\.\nHost key verif)|revoked by file"
)
_HOST_KEY = r"Host key verification failed|No \S+ host key is known"
_EXCHANGE = r"(?:kex|ssh)_exchange_identification: "
_NO_PEER = r"\bUNKNOWN port 65535\b"
"""How ssh names the other end of a proxy."""
_FORWARDING_FAILED = "stdio forwarding failed"
"""Said by the ssh that is a jump's proxy, once the jump host has let it in."""
# The user's shell, whichever that is, about a ProxyCommand: before ssh has heard from any server.
_NO_PROXY = (
    r"(?i)^(?:\S*sh: .*|\S*sh:\d+: .*|/\S+: |\S+: (?=command not|permission denied\.))"
    r"(?:not found|no such file or directory|permission denied|cannot execute|unknown command"
    r"|command not found)"
    rf"[\s\S]*^{_EXCHANGE}"
)
_JUMP_UNRESOLVED = (
    r"open failed: connect failed: (?:Temporary failure in name resolution|.*[Nn]ame or service not known"
    r"|.*nodename nor servname|.*No address associated|.*Name does not resolve|.*non-recoverable failure)"
)
_FORWARDING = r"open failed: (?:administratively prohibited|unknown channel type)"
_SESSION = r"^channel \d+: open failed|^(?:exec|shell) request failed on channel"
_DROPPED = (
    rf"{_EXCHANGE}(?:read: Connection reset|Connection closed)"
    r"|Exceeded MaxStartups|Not allowed at this time|^ssh: connect to host .*: Connection reset by peer"
    r"|(?:Connection closed by|Connection reset by) \S+ port \d+\s*\Z"
)
_DROPPED_ON_THE_WAY = r"^Connection (?:closed|reset) by (?!UNKNOWN)\S+ port \d+$"
_AUTHENTICATION = r"Permission denied \(|Too many authentication failures|No more authentication methods"
_BAD_OPTION = (
    r"Bad configuration option|bad configuration options|^command-line:? line \d+"
    r"|Can't open user config file|Bad owner or permissions on"
    r"|^bind .*: Cannot assign requested address|no suitable addresses"
)
_SHARING = r"^unix_listener: (?:cannot bind to )?path |^ControlPath .*too long"
_NOT_SSH = (
    r"banner line too long|banner exchange: .*(?:invalid format|could not read protocol)|Bad remote protocol"
)
_UNREACHABLE = (
    r"timed out|No route to host|Network is unreachable|Host is down"
    r"|connect to host .*: Permission denied"  # ICMPv6 "administratively prohibited"
    rf"|open failed: connect failed: .*\n{_FORWARDING_FAILED}"  # some errors have no other words
)
_BY_THE_NODE = (
    (Kind.NO_PYTHON, re.escape(NO_PYTHON)),
    (Kind.OLD_PYTHON, rf"^{re.escape(TOO_OLD)} \d|Unknown option: -I"),
)
# In this order: behind a jump host, ssh adds that it was dropped to what the jump host really said.
_BY_SSH = (
    (Kind.HOST_KEY_CHANGED, _CHANGED),
    (Kind.HOST_KEY_REVOKED, _REVOKED),
    (Kind.HOST_KEY, _HOST_KEY),
    (Kind.AUTHENTICATION, _AUTHENTICATION),
    (Kind.UNRESOLVED, r"Could not resolve hostname"),
    (Kind.BAD_OPTION, _BAD_OPTION),
    (Kind.SHARING, _SHARING),
    (Kind.ALGORITHM, r"Unable to negotiate with"),
    (Kind.NOT_SSH, _NOT_SSH),
    (Kind.JUMP_UNRESOLVED, _JUMP_UNRESOLVED),
    (Kind.FORWARDING, _FORWARDING),
    (Kind.REFUSED, r"Connection refused"),
    (Kind.SILENT, r"timed out during banner exchange|banner exchange: Connection to .* timed out"),
    (Kind.SILENT, r"^Connection to \S+ port \d+ timed out"),  # in the key exchange
    (Kind.UNREACHABLE, _UNREACHABLE),
    (Kind.SESSION, _SESSION),
    (Kind.NO_PROXY, _NO_PROXY),
    (Kind.DROPPED, _DROPPED_ON_THE_WAY),
    (Kind.PROXY, _NO_PEER),
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
        kind = Kind.PROTOCOL if booted else Kind.NOISE
        return LinkFailure(kind, "\n".join([*words, protocol_error]))
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
