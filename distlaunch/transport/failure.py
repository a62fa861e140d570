"""What it means that a link failed: ssh's own words, classified, with what to do about it."""

import re
from enum import Enum
from typing import NamedTuple

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
    LOST = "connection lost"


class LinkFailure(NamedTuple):
    """A failed link: its kind, the last words received, and whether trying again can help."""

    kind: Kind
    words: str = ""

    @property
    def worth_retrying(self) -> bool:
        """Only a server that shed load may let us in at the next try; failed logins may be punished."""
        return self.kind is Kind.DROPPED

    @property
    def advice(self) -> str:
        """What the user can do, as one clause."""
        return _ADVICE[self.kind]


_ADVICE = {
    Kind.UNREACHABLE: "is the machine up, and the name, address and port right?",
    Kind.UNRESOLVED: "give the host as ssh knows it, or add it to your ssh_config",
    Kind.REFUSED: "is sshd running there, and on this port?",
    Kind.AUTHENTICATION: "it never asks for a password: `ssh-copy-id` your key, or load it with ssh-add",
    Kind.HOST_KEY: "connect once with plain ssh and check the key; distlaunch never accepts one for you",
    Kind.NO_PYTHON: "install python3 (3.8 or later) there, or name one with `python:`",
    Kind.OLD_PYTHON: "name one that is 3.8 or later with `python:`",
    Kind.DROPPED: "raise MaxStartups in its sshd_config, or start fewer agents on one machine",
    Kind.SILENT: "does something other than sshd answer there, or does its shell start-up wait?",
    Kind.PROTOCOL: "does its shell start-up print without end?",
    Kind.BAD_OPTION: "see `ssh:` in the job file, and the ssh_config",
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
# In this order: behind a jump host, ssh adds that it was dropped to what the jump host really said.
_PATTERNS = (
    (Kind.NO_PYTHON, re.escape(NO_PYTHON)),
    (Kind.OLD_PYTHON, rf"^{re.escape(TOO_OLD)} \d|Unknown option: -I"),
    (Kind.HOST_KEY, _HOST_KEY),
    (Kind.AUTHENTICATION, _AUTHENTICATION),
    (Kind.UNRESOLVED, r"Could not resolve hostname"),
    (Kind.BAD_OPTION, _BAD_OPTION),
    (Kind.REFUSED, r"Connection refused"),
    (Kind.SILENT, r"timed out during banner exchange|banner exchange: Connection to .* timed out"),
    (Kind.UNREACHABLE, _UNREACHABLE),
    (Kind.DROPPED, _DROPPED),
)


def classify(stderr: str, *, timed_out: bool = False, protocol_error: str = "") -> LinkFailure:
    """The failure that the transport's stderr describes (the whole of what it printed before its end)."""
    words = "\n".join(line for line in stderr.replace("\r", "").splitlines() if line.strip())
    for kind, pattern in _PATTERNS:
        if re.search(pattern, words, re.MULTILINE):
            return LinkFailure(kind, words)
    if timed_out:
        return LinkFailure(Kind.SILENT, words)
    if protocol_error:
        return LinkFailure(Kind.PROTOCOL, "\n".join(filter(None, (protocol_error, words))))
    return LinkFailure(Kind.LOST, words)
