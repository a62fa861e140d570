"""The command lines that reach a node: pure, as lists, with nothing of the job in them."""

from collections.abc import Sequence

from distlaunch.job.spec import Address, SshOptions
from distlaunch.transport.boot import SCRIPT

CONTROL_FOLDER = "~/.ssh"
"""Where kept connections have their sockets; ssh takes ~ from the user database, not from HOME."""

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


def local_argv() -> list[str]:
    """An agent as a child of this process."""
    return ["/bin/sh", "-c", SCRIPT]


def ssh_argv(address: Address, ssh: SshOptions) -> list[str]:
    """An agent at the other end of OpenSSH's client."""
    if address.host is None:
        raise ValueError("a node on this machine is not reached over ssh")
    times = (f"ServerAliveInterval={ssh.alive_s}", f"ConnectTimeout={ssh.connect_s}")
    options = [*_FIXED, *times, *_sharing(ssh), *ssh.options, *_RECENT]
    return [
        "ssh",
        *(["-F", ssh.config] if ssh.config else []),
        *_pairs("-o", options),
        *_target(address),
        # exec spares the login shell; the quotes are safe in every shell (see SCRIPT).
        f"exec /bin/sh -c '{SCRIPT}'",
    ]


def ssh_resolve_argv(address: Address, ssh: SshOptions) -> list[str]:
    """Ask ssh which address it would use (`hostname` in its answer); touches no host."""
    config = ["-F", ssh.config] if ssh.config else []
    return ["ssh", "-G", *config, *_pairs("-o", ssh.options), *_target(address)]


def plain_ssh_argv(address: Address, ssh: SshOptions) -> list[str]:
    """ssh to the node as people would type it, with the job's options and none of ours."""
    config = ["-F", ssh.config] if ssh.config else []
    return ["ssh", *config, *_pairs("-o", ssh.options), *(word for word in _target(address) if word != "--")]


def argv_of(address: Address, ssh: SshOptions) -> list[str]:
    """The command line of the transport that `address` needs."""
    return local_argv() if address.host is None else ssh_argv(address, ssh)


def _sharing(ssh: SshOptions) -> list[str]:
    if ssh.persist_s is None:
        # A master that the user keeps may outlive us and then owns our stdio: never join it unasked.
        return ["ControlMaster=no", "ControlPath=none"]
    path = f"{CONTROL_FOLDER}/distlaunch-%C"
    return ["ControlMaster=auto", f"ControlPath={path}", f"ControlPersist={ssh.persist_s}"]


def _target(address: Address) -> list[str]:
    user = ["-l", address.user] if address.user else []
    port = ["-p", str(address.port)] if address.port else []
    return [*user, *port, "--", str(address.host)]


def _pairs(flag: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (flag, value)]
