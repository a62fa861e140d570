"""What the user can do about a node that ssh can't use: one clause, with commands to paste."""

import re
from shlex import join, quote

from distlaunch.transports.failure import Kind, LinkFailure
from distlaunch.transports.ssh.failures import on_the_way
from distlaunch.transports.ssh.sockets import SOCKETS


def advice_for(failure: LinkFailure, plain_argv: list[str], config: str | None, python: str) -> str:
    """What to do about a `failure` of the node that `plain_argv` reaches, with this ssh_config.

    `python` is to be its interpreter.
    """
    plain = join(plain_argv)
    text = _ADVICE[failure.kind].format(
        ssh=plain,
        direct=plain.replace("ssh", "ssh -o BatchMode=yes", 1),
        asking=plain.replace("ssh", "ssh -o StrictHostKeyChecking=ask", 1),
        python=python,
        version=f"{plain} {_remote([python, '-V'])}",
        config=config or "~/.ssh/config",
        sockets=SOCKETS,
        forget=_forgetting(failure.words),
    )
    return text + (_ON_THE_WAY if on_the_way(failure) and failure.kind not in _OF_PROXIES else "")


def _remote(argv: list[str]) -> str:
    """A command as words of ssh's, which the shell over there splits again."""
    plain = " ".join(argv)
    return plain if join(argv) == plain else quote(join(argv))


def _forgetting(words: str) -> str:
    """The command that removes a changed key from the file in which ssh found it."""
    name = re.search(r"[Hh]ost key for (\S+) has changed", words)
    file = re.search(r"^Offending .*key in (.+):\d+$", words, re.MULTILINE)
    return join(
        ["ssh-keygen", *(["-f", file[1]] if file else []), "-R", name[1]]
        if name
        else ["ssh-keygen", "-R", "NAME"]
    )


_OF_PROXIES = (Kind.PROXY, Kind.NO_PROXY, Kind.DROPPED)
_ON_THE_WAY = "; this concerns its jump host or ProxyCommand: ssh has not reached the node itself"
_ADVICE = {
    Kind.UNREACHABLE: "is the machine up, and are its name, address and port right?",
    Kind.UNRESOLVED: "check the name, or add it to {config}",
    Kind.REFUSED: "is sshd running there, on this port?",
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
    Kind.NO_PYTHON: "{python} was not found: install Python 3.8 or later, or set `python:` to one there",
    Kind.OLD_PYTHON: "set `python:` to Python 3.8 or later",
    Kind.DROPPED: (
        "raise MaxStartups in its sshd_config (or its jump host's), or list fewer nodes on one machine"
    ),
    Kind.SILENT: (
        "try `{ssh} true`: its shell start-up may be waiting, or something other than sshd may be listening"
    ),
    Kind.NOT_SSH: "something other than sshd answers there: is the port right?",
    Kind.ALGORITHM: "allow an algorithm that it offers, in {config} or with `ssh: {{options: […]}}`",
    Kind.SESSION: "sshd let you in but started no shell: check MaxSessions and the process limit there",
    Kind.FORWARDING: "allow forwarding with AllowTcpForwarding and PermitOpen in the jump host's sshd_config",
    Kind.JUMP_UNRESOLVED: "the jump host resolves the name itself: set HostName in {config} to an address",
    Kind.NO_PROXY: "fix ProxyCommand in {config}, or install the program that it names on this machine",
    Kind.PROXY: (
        "its jump host or ProxyCommand closed the connection: try `{ssh} true`;"
        " if the jump host is overloaded, raise its MaxStartups"
    ),
    Kind.NOISE: "does its shell start-up file print? try `{ssh} true`",
    Kind.PROTOCOL: "the agent has another version, or something alters the data on its way",
    Kind.BAD_OPTION: "check `ssh:` in the job file, and {config}",
    Kind.SHARING: (
        "ssh.persist needs a socket in {sockets} on this machine: make that folder writable, with a short"
        " path, or leave out ssh.persist"
    ),
    Kind.UNSTARTED: "its login shell or Python exited too early: try `{version}`",
    Kind.LOST: "check the network and the machine's log",
}
