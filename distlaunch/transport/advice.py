"""What the user can do about a node that can't be used: one clause, with commands to paste."""

import re
from shlex import join, quote

from distlaunch.job.spec import Address, SshOptions
from distlaunch.transport.argv import CONTROL_FOLDER, plain_ssh_argv
from distlaunch.transport.failure import Kind, LinkFailure


def advice_for(failure: LinkFailure, reach: Address, ssh: SshOptions, python: str | None = None) -> str:
    """What to do about a `failure` of the node at `reach`, whose interpreter is to be `python`."""
    python = python or "python3"
    if reach.host is None:
        return _HERE.get(failure.kind, _LOG).format(python=quote(python))
    plain = join(plain_ssh_argv(reach, ssh))
    text = _ADVICE[failure.kind].format(
        ssh=plain,
        quiet=plain.replace("ssh", "ssh -o BatchMode=yes", 1),
        asking=plain.replace("ssh", "ssh -o StrictHostKeyChecking=ask", 1),
        version=f"{plain} {_remote([python, '-V'])}",
        config=ssh.config or "~/.ssh/config",
        sockets=CONTROL_FOLDER,
        forget=_forgetting(failure.words),
    )
    return text + (_ON_THE_WAY if failure.on_the_way and failure.kind not in _OF_PROXIES else "")


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
_HERE = {
    Kind.SILENT: "is the machine overloaded? try `{python} -V`",
    Kind.UNSTARTED: "try `{python} -V`: it ended before the agent had started",
    Kind.PROTOCOL: "try `{python} -V`: does it print more than its version?",
    Kind.NOISE: "try `{python} -V`: does it print more than its version?",
    Kind.NO_PYTHON: "set `python:` to one that is there",
    Kind.OLD_PYTHON: _ADVICE[Kind.OLD_PYTHON],
}
"""On this machine there is no ssh in between."""
_LOG = "check the machine's log"
