"""What the user can do about a node that can't be used over ssh: one clause, with commands to paste."""

import re
from shlex import join, quote

from distlaunch.transport.failure import Kind, LinkFailure
from distlaunch.transport.ssh.failures import on_the_way
from distlaunch.transport.ssh.sockets import SOCKETS


def advice_for(failure: LinkFailure, by_hand: list[str], config: str | None, python: str) -> str:
    """What to do about a `failure` of the node that `by_hand` reaches, with this ssh_config.

    `python` is to be its interpreter.
    """
    plain = join(by_hand)
    text = _ADVICE[failure.kind].format(
        ssh=plain,
        quiet=plain.replace("ssh", "ssh -o BatchMode=yes", 1),
        asking=plain.replace("ssh", "ssh -o StrictHostKeyChecking=ask", 1),
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
_ON_THE_WAY = "; this is about its jump host or ProxyCommand: ssh has not reached the node itself"
_ADVICE = {
    Kind.UNREACHABLE: "is the machine up, and are its name, address and port right?",
    Kind.UNRESOLVED: "check the name, or add it to {config}",
    Kind.REFUSED: "does sshd run there, and on this port?",
    Kind.AUTHENTICATION: (
        "`{quiet} true` must work without a password: load your key with ssh-add,"
        " or install it with ssh-copy-id"
    ),
    Kind.HOST_KEY: "connect once with `{asking}` and check the key; distlaunch never accepts one for you",
    Kind.HOST_KEY_CHANGED: (
        "someone may be intercepting the connection; only if you know that the machine was reinstalled,"
        " run `{forget}`, then `{ssh}` and check the new key"
    ),
    Kind.HOST_KEY_REVOKED: "its key was withdrawn, as after a theft: ask its administrator for a new one",
    Kind.NO_PYTHON: "install Python 3.8 or later there, or set `python:` to one that it has",
    Kind.OLD_PYTHON: "set `python:` to one that is 3.8 or later",
    Kind.DROPPED: (
        "raise MaxStartups in its sshd_config (or its jump host's), or start fewer agents on one machine"
    ),
    Kind.SILENT: (
        "does something other than sshd answer there, or does its shell start-up wait? try `{ssh} true`"
    ),
    Kind.NOT_SSH: "is the port right? something other than sshd answers there",
    Kind.ALGORITHM: "allow one that it offers, in {config} or with `ssh: {{options: […]}}`",
    Kind.SESSION: "its sshd let you in but started no shell: see MaxSessions and the process limit there",
    Kind.FORWARDING: "allow it with AllowTcpForwarding and PermitOpen in the jump host's sshd_config",
    Kind.JUMP_UNRESOLVED: "the jump host looks the name up itself: set HostName in {config} to an address",
    Kind.NO_PROXY: "install on this machine what ProxyCommand names in {config}, or correct it",
    Kind.PROXY: (
        "its jump host or ProxyCommand closed the connection: try `{ssh} true`;"
        " a jump host that is overloaded needs a higher MaxStartups"
    ),
    Kind.NOISE: "does its shell start-up file print? try `{ssh} true`",
    Kind.PROTOCOL: "the agent is of another version, or something on the way alters the data",
    Kind.BAD_OPTION: "check `ssh:` in the job file, and {config}",
    Kind.SHARING: (
        "ssh.persist has ssh make a socket in {sockets} here: see that it is writable and its path is short,"
        " or leave out ssh.persist"
    ),
    Kind.UNSTARTED: "try `{version}`: its login shell or its Python ended too soon",
    Kind.LOST: "check the network, and the machine's log",
}
