"""ssh's command lines: pure, as lists, with nothing of the job in them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distlaunch.transport.boot import SCRIPT

if TYPE_CHECKING:
    from distlaunch.transport.ssh import Ssh, SshOptions

# Ours come first and so win over the user's: ssh takes the first value of each option.
_FIXED = (
    "BatchMode=yes",  # a password prompt would hang unseen
    "ServerAliveCountMax=3",  # with an interval of 5 s a silent network is noticed after 19.4 s
    "ForwardX11=no",
    "ForwardAgent=no",
    "ClearAllForwardings=yes",
    "PermitLocalCommand=no",
    "RequestTTY=no",
    "RemoteCommand=none",
    "ConnectionAttempts=1",  # trying again is for us to decide, and to bound
    "LogLevel=INFO",  # less hides why a server closed the connection
)
_RECENT = (
    # Clients before OpenSSH 8.7 don't know these three. Not just their names: ours would replace the list
    # in the user's ssh_config, which then fails over its UseKeychain. What came before it is still checked.
    "IgnoreUnknown=*",
    "StdinNull=no",
    "ForkAfterAuthentication=no",
    "SessionType=default",
)


def ssh_argv(ssh: "Ssh") -> list[str]:
    """An agent at the other end of OpenSSH's client."""
    times = (f"ServerAliveInterval={ssh.options.alive_s}", f"ConnectTimeout={ssh.options.connect_s}")
    options = [*_FIXED, *times, *_sharing(ssh.options), *ssh.options.words, *_RECENT]
    return [
        "ssh",
        *_config(ssh),
        *_pairs("-o", options),
        *_target(ssh),
        # exec spares the login shell; the quotes are safe in every shell (see SCRIPT).
        f"exec /bin/sh -c '{SCRIPT}'",
    ]


def resolve_argv(ssh: "Ssh") -> list[str]:
    """Ask ssh which address it would use (`hostname` in its answer); touches no host."""
    return ["ssh", "-G", *_config(ssh), *_pairs("-o", ssh.options.words), *_target(ssh)]


def plain_argv(ssh: "Ssh") -> list[str]:
    """ssh to the node as people would type it, with the job's options and none of ours."""
    words = (word for word in _target(ssh) if word != "--")
    return ["ssh", *_config(ssh), *_pairs("-o", ssh.options.words), *words]


def _config(ssh: "Ssh") -> list[str]:
    return ["-F", ssh.options.config] if ssh.options.config else []


def _sharing(options: "SshOptions") -> list[str]:
    if options.persist_s is None:
        # A master that the user keeps may outlive us and then owns our stdio: never join it unasked.
        return ["ControlMaster=no", "ControlPath=none"]
    return ["ControlMaster=auto", "ControlPath=~/.ssh/distlaunch-%C", f"ControlPersist={options.persist_s}"]


def _target(ssh: "Ssh") -> list[str]:
    user = ["-l", ssh.user] if ssh.user else []
    port = ["-p", str(ssh.port)] if ssh.port else []
    return [*user, *port, "--", ssh.host]


def _pairs(flag: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (flag, value)]
