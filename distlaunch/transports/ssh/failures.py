"""How ssh fails: its own words, classified."""

import re

from distlaunch.transports.failure import Kind, LinkFailure

SSH_FAILED = 255
"""Exit status of ssh's own failures."""

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
    rf"[\s\S]*^(?:{_EXCHANGE}|banner exchange: Connection to UNKNOWN )"
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
BY_SSH = (
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
"""In this order: behind a jump host, ssh adds that it was dropped to what the jump host really said."""


def on_the_way(failure: LinkFailure) -> bool:
    """Whether it was the jump host or ProxyCommand that failed, so that ssh never met the node."""
    return re.search(_NO_PEER, failure.words) is not None and _FORWARDING_FAILED not in failure.words
