"""Nodes reached by the OpenSSH client, with the user's ssh_config, keys and jump hosts.

This module contains the command line of ssh, the classification of its error messages, and advice on them.
"""

import re
from collections.abc import Mapping, Sequence
from shlex import join, quote
from typing import Literal

from distlaunch.transports.failure import Kind, LinkFailure, ProcessEnd, classify
from distlaunch.transports.handshake import SCRIPT
from distlaunch.transports.transport import OLD_PYTHON, SshOptions, Transport, Way

# These precede the user's options and so override them: ssh uses the first value of each option.
_FIXED = (
    "BatchMode=yes",  # a password prompt would hang unseen
    "ServerAliveCountMax=3",  # with an interval of 5 s, a silent network is noticed after 19.4 s
    *("ForwardX11=no", "ForwardAgent=no", "ClearAllForwardings=yes", "PermitLocalCommand=no"),
    *("RequestTTY=no", "RemoteCommand=none"),
    "ConnectionAttempts=1",  # retries are up to the controller
    "LogLevel=INFO",  # a lower level hides why a server closed the connection
)
_RECENT = (
    # Clients before OpenSSH 8.7 don't support the last three. If IgnoreUnknown listed only their names, that
    # would replace the list in the user's ssh_config, and ssh would then fail on UseKeychain there. Options
    # before IgnoreUnknown are still checked.
    *("IgnoreUnknown=*", "StdinNull=no", "ForkAfterAuthentication=no", "SessionType=default"),
)
_KEPT = 64 << 20
"""Bytes that malloc keeps in ssh processes. ssh uses at most a few times its window of 2 MiB.

While their reader is slow, ssh's buffers grow with each packet. Without this setting, malloc returns their
pages to the kernel and faults them in again. That takes a third of ssh's CPU time while it transfers output.
"""
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(_KEPT // 2), "MALLOC_TRIM_THRESHOLD_": str(_KEPT)}
SOCKETS = "~/.ssh"
"""The directory of the sockets for `ssh.persist`. ssh expands ~ using the user database, not HOME."""


class Ssh(Transport):
    """A node reached by ssh. `host` is a name for ssh, which may refer to this machine."""

    host: str
    user: str | None = None
    port: int | None = None
    options: SshOptions = SshOptions()
    name: Literal["ssh"] = "ssh"
    direct = False  # a login shell may print and read before it runs the command
    needs_names = True

    @classmethod
    def to(cls, host: str, way: Way) -> "Ssh":
        """Return an SSH transport to `host`."""
        return cls(host, way.user, way.port, way.ssh)

    @property
    def directory(self) -> str:
        """Return the directory for sockets. ssh itself creates it only for known_hosts."""
        return "" if self.options.persist_s is None else SOCKETS

    def argv(self) -> list[str]:
        """Return the ssh command, with distlaunch's options before the user's. It contains no job values."""
        # exec replaces the login shell. The quotes are safe in every shell (see SCRIPT).
        return self.argv_for(f"exec /bin/sh -c '{SCRIPT}'")

    def argv_for(self, command: str, terminal: bool = False) -> list[str]:
        """Return ssh with another command, which the login shell splits. With `terminal`, request a terminal.

        `--on HOST` uses this.
        """
        ours = ["RequestTTY=force"] if terminal else []  # the first value of an option counts
        times = (f"ServerAliveInterval={self.options.alive_s}", f"ConnectTimeout={self.options.connect_s}")
        options = [*ours, *_FIXED, *times, *_sharing(self.options), *self.options.words, *_RECENT]
        return ["ssh", *self._config, *_pairs("-o", options), *self._target, command]

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return the environment with settings that avoid page faults in ssh, unless they are already set."""
        return {**_MALLOC, **environ}

    def address_argv(self) -> list[str]:
        """Return the command that prints the configuration for the host, without contacting any host."""
        return ["ssh", "-G", *self._config, *_pairs("-o", self.options.words), *self._target]

    @property
    def plain_argv(self) -> list[str]:
        """Return the ssh command as a user would type it, with only the job's options."""
        target = (word for word in self._target if word != "--")
        return ["ssh", *self._config, *_pairs("-o", self.options.words), *target]

    @property
    def _config(self) -> list[str]:
        return ["-F", self.options.config] if self.options.config else []

    @property
    def _target(self) -> list[str]:
        user = ["-l", self.user] if self.user else []
        port = ["-p", str(self.port)] if self.port else []
        return [*user, *port, "--", self.host]

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """Return the failure, based on ssh's messages if ssh itself failed, else on the node's messages."""
        return classify(end, _BY_SSH, _SSH_FAILED, "ssh on this machine")

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """Return advice with commands to paste."""
        plain = join(self.plain_argv)
        python = python or "python3"
        text = _ADVICE[failure.kind].format(
            ssh=plain,
            direct=plain.replace("ssh", "ssh -o BatchMode=yes -o ControlPath=none", 1),
            asking=plain.replace("ssh", "ssh -o StrictHostKeyChecking=ask", 1),
            python=python,
            version=f"{plain} {_remote([python, '-V'])}",
            config=self.options.config or "~/.ssh/config",
            sockets=SOCKETS,
            forget=_forgetting(failure.words),
        )
        return text + (_ON_THE_WAY if on_the_way(failure) and failure.kind not in _OF_PROXIES else "")


def _sharing(options: SshOptions) -> list[str]:
    if options.persist_s is None:
        # The user's master connection may outlive this process and own its stdio, so sharing is opt-in.
        return ["ControlMaster=no", "ControlPath=none"]
    path = f"{SOCKETS}/distlaunch-%C"
    return ["ControlMaster=auto", f"ControlPath={path}", f"ControlPersist={options.persist_s}"]


def _pairs(flag: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (flag, value)]


_SSH_FAILED = 255
"""Exit status of ssh's own failures."""

# Under StrictHostKeyChecking=no, ssh prints the same warning about a changed key, but continues. Therefore,
# only a refusal counts.
_STRICT = "and you have requested strict checking"
_REVOKED = (
    rf"[Hh]ost key for .* (?:was|is marked as) revoked(?: {_STRICT}|\.\nHost key verif)|revoked by file"
)
_EXCHANGE = r"(?:kex|ssh)_exchange_identification: "
_NO_PEER = r"\bUNKNOWN port 65535\b"
"""The name that ssh uses for the other end of a proxy."""
_FORWARDING_FAILED = "stdio forwarding failed"
"""Printed by the ssh process that is the proxy for a jump, once it has logged in to the jump host."""
# Messages of the user's shell about a ProxyCommand, printed before any server has responded to ssh.
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
_DROPPED = (
    rf"{_EXCHANGE}(?:read: Connection reset|Connection closed)"
    r"|Exceeded MaxStartups|Not allowed at this time|^ssh: connect to host .*: Connection reset by peer"
    r"|(?:Connection closed by|Connection reset by) \S+ port \d+\s*\Z"
)
_AUTHENTICATION = r"Permission denied \(|Too many authentication failures|No more authentication methods"
_BAD_OPTION = (
    r"Bad configuration option|bad configuration options|^command-line:? line \d+"
    r"|Can't open user config file|Bad owner or permissions on"
    r"|^bind .*: Cannot assign requested address|no suitable addresses"
)
_NOT_SSH = (
    r"banner line too long|banner exchange: .*(?:invalid format|could not read protocol)|Bad remote protocol"
)
_UNREACHABLE = (
    r"timed out|No route to host|Network is unreachable|Host is down"
    r"|connect to host .*: Permission denied"  # ICMPv6 "administratively prohibited"
    rf"|open failed: connect failed: .*\n{_FORWARDING_FAILED}"  # some errors have no other message
)
_BY_SSH = (
    (Kind.HOST_KEY_CHANGED, rf"[Hh]ost key for .* has changed {_STRICT}"),
    (Kind.HOST_KEY_REVOKED, _REVOKED),
    (Kind.HOST_KEY, r"Host key verification failed|No \S+ host key is known"),
    (Kind.AUTHENTICATION, _AUTHENTICATION),
    (Kind.UNRESOLVED, r"Could not resolve hostname"),
    (Kind.BAD_OPTION, _BAD_OPTION),
    (Kind.SHARING, r"^unix_listener: (?:cannot bind to )?path |^ControlPath .*too long"),
    (Kind.ALGORITHM, r"Unable to negotiate with"),
    (Kind.NOT_SSH, _NOT_SSH),
    (Kind.JUMP_UNRESOLVED, _JUMP_UNRESOLVED),
    (Kind.FORWARDING, r"open failed: (?:administratively prohibited|unknown channel type)"),
    (Kind.REFUSED, r"Connection refused"),
    (Kind.SILENT, r"timed out during banner exchange|banner exchange: Connection to .* timed out"),
    (Kind.SILENT, r"^Connection to \S+ port \d+ timed out"),  # in the key exchange
    (Kind.UNREACHABLE, _UNREACHABLE),
    (Kind.SESSION, r"^channel \d+: open failed|^(?:exec|shell) request failed on channel"),
    (Kind.NO_PROXY, _NO_PROXY),
    (Kind.DROPPED, r"^Connection (?:closed|reset) by (?!UNKNOWN)\S+ port \d+$"),
    (Kind.PROXY, _NO_PEER),
    (Kind.DROPPED, _DROPPED),
)
"""Patterns of ssh messages. Order matters: after a jump host's error, ssh also reports a lost connection."""


def on_the_way(failure: LinkFailure) -> bool:
    """Return whether the jump host or ProxyCommand failed before ssh reached the node."""
    return re.search(_NO_PEER, failure.words) is not None and _FORWARDING_FAILED not in failure.words


def _remote(argv: list[str]) -> str:
    """Return a command as a string for ssh. The remote shell splits the string again."""
    plain = " ".join(argv)
    return plain if join(argv) == plain else quote(join(argv))


def _forgetting(words: str) -> str:
    """Return the command that removes a changed key from the file in which ssh found it."""
    name = re.search(r"[Hh]ost key for (\S+) has changed", words)
    file = re.search(r"^Offending .*key in (.+):\d+$", words, re.MULTILINE)
    if not name:
        return "ssh-keygen -R NAME"
    return join(["ssh-keygen", *(["-f", file[1]] if file else []), "-R", name[1]])


_OF_PROXIES = (Kind.PROXY, Kind.NO_PROXY, Kind.DROPPED)
_ON_THE_WAY = "; this concerns its jump host or ProxyCommand: ssh has not reached the node itself"
_ADVICE = {
    Kind.UNREACHABLE: "is the machine up, and are its name, address and port right?",
    Kind.UNRESOLVED: "check the name, or add it to {config}",
    Kind.REFUSED: "is sshd running on that host, on this port?",
    Kind.AUTHENTICATION: (
        "`{direct} true` must work without a password: load your key with ssh-add,"
        " or install it with ssh-copy-id"
    ),
    Kind.HOST_KEY: "connect once with `{asking}` and check the key; distlaunch never accepts one for you",
    Kind.HOST_KEY_CHANGED: (
        "someone may be intercepting the connection; only if you know that the machine was reinstalled,"
        " run `{forget}`, then `{ssh}` and check the new key"
    ),
    Kind.HOST_KEY_REVOKED: "its host key has been revoked: ask its administrator why, and for a new one",
    Kind.NO_PYTHON: (
        "{python} was not found: install Python 3.8 or later, or set `python:` to an interpreter on the node"
    ),
    Kind.OLD_PYTHON: OLD_PYTHON,
    Kind.DROPPED: (
        "raise MaxStartups in its sshd_config (or its jump host's), or list fewer nodes on one machine"
    ),
    Kind.SILENT: (
        "try `{ssh} true`: its shell start-up may be waiting, or something other than sshd may be listening"
    ),
    Kind.NOT_SSH: "something other than sshd is answering: is the port right?",
    Kind.ALGORITHM: "allow an algorithm that it offers, in {config} or with `ssh: {{options: […]}}`",
    Kind.SESSION: "sshd let you in but started no shell: check its MaxSessions and process limit",
    Kind.FORWARDING: "allow forwarding with AllowTcpForwarding and PermitOpen in the jump host's sshd_config",
    Kind.JUMP_UNRESOLVED: "the jump host resolves the name itself: set HostName in {config} to an address",
    Kind.NO_PROXY: "fix ProxyCommand in {config}, or install the program that it names on this machine",
    Kind.PROXY: (
        "its jump host or ProxyCommand closed the connection: try `{ssh} true`;"
        " if the jump host is overloaded, raise its MaxStartups"
    ),
    Kind.NOISE: "does its shell start-up file print? try `{ssh} true`",
    Kind.PROTOCOL: "the agent has another version, or something alters the data in transit",
    Kind.BAD_OPTION: "check `ssh:` in the job file, and {config}",
    Kind.SHARING: (
        "ssh.persist needs a socket in {sockets} on this machine: make that directory writable, with a short"
        " path, or leave out ssh.persist"
    ),
    Kind.UNSTARTED: "its login shell or Python exited too early: try `{version}`",
    Kind.LOST: "check the network and the machine's log",
}
