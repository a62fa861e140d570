"""A node at the other end of OpenSSH's client: the user's ssh_config, keys and jump hosts all hold."""

from collections.abc import Mapping, Sequence
from typing import Literal

from distlaunch.agent.frozen import Frozen
from distlaunch.transports.boot import SCRIPT
from distlaunch.transports.failure import LinkFailure, ProcessEnd, classify
from distlaunch.transports.malloc import ssh_environment
from distlaunch.transports.ssh.failures import BY_SSH, SSH_FAILED
from distlaunch.transports.ssh.sockets import SOCKETS

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


class SshOptions(Frozen):
    """What the job file's `ssh` section says, how long a TCP connect may take, how often ssh looks.

    `words` are ssh's own options, as `Compression=no`.
    """

    config: str | None = None
    words: tuple[str, ...] = ()
    persist_s: int | None = None
    connect_s: int = 15
    alive_s: int = 5


class Ssh(Frozen):
    """As `distlaunch.transports.kinds` has it; `host` is a name that ssh knows."""

    host: str
    user: str | None = None
    port: int | None = None
    options: SshOptions = SshOptions()
    name: Literal["ssh"] = "ssh"

    @property
    def here(self) -> bool:
        """Not as far as we know: a name for this very machine goes over ssh, too."""
        return False

    @property
    def direct(self) -> bool:
        """A login shell may print, and read, before it runs our command."""
        return False

    @property
    def unknown(self) -> bool:
        """Never."""
        return False

    @property
    def together(self) -> bool:
        """Each node has a process of its own."""
        return False

    @property
    def patience_s(self) -> float:
        """None: sshd tells the agent of its end."""
        return 0.0

    @property
    def folder(self) -> str:
        """ssh makes it only for known_hosts."""
        return "" if self.options.persist_s is None else SOCKETS

    def argv(self) -> list[str]:
        """ssh, with options of ours before the user's, and behind the host nothing of the job."""
        # exec spares the login shell; the quotes are safe in every shell (see SCRIPT).
        return self.argv_for(f"exec /bin/sh -c '{SCRIPT}'")

    def argv_for(self, command: str, terminal: bool = False) -> list[str]:
        """The same, for another command, which the user's login shell takes apart; maybe on a `terminal`."""
        ours = ["RequestTTY=force"] if terminal else []  # the first value of an option counts
        times = (f"ServerAliveInterval={self.options.alive_s}", f"ConnectTimeout={self.options.connect_s}")
        options = [*ours, *_FIXED, *times, *_sharing(self.options), *self.options.words, *_RECENT]
        return ["ssh", *self._config, *_pairs("-o", options), *self._target, command]

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """All of it, and what spares ssh page faults."""
        return ssh_environment(environ)

    def address_argv(self) -> list[str]:
        """ssh itself knows what its configuration makes of a name; this touches no host."""
        return ["ssh", "-G", *self._config, *_pairs("-o", self.options.words), *self._target]

    @property
    def as_typed(self) -> list[str]:
        """ssh to the node as people would type it, with the job's options and none of ours."""
        words = (word for word in self._target if word != "--")
        return ["ssh", *self._config, *_pairs("-o", self.options.words), *words]

    @property
    def _config(self) -> list[str]:
        return ["-F", self.options.config] if self.options.config else []

    @property
    def _target(self) -> list[str]:
        user = ["-l", self.user] if self.user else []
        port = ["-p", str(self.port)] if self.port else []
        return [*user, *port, "--", self.host]

    def failure(self, end: ProcessEnd) -> LinkFailure:
        """ssh's own words, where it failed; else the node's."""
        return classify(end, BY_SSH, SSH_FAILED, "ssh on this machine")

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """With commands to paste."""
        from distlaunch.transports.ssh.advice import advice_for  # few nodes fail

        return advice_for(failure, self.as_typed, self.options.config, python or "python3")


def _sharing(options: SshOptions) -> list[str]:
    if options.persist_s is None:
        # A master that the user keeps may outlive us and then owns our stdio: never join it unasked.
        return ["ControlMaster=no", "ControlPath=none"]
    path = f"{SOCKETS}/distlaunch-%C"
    return ["ControlMaster=auto", f"ControlPath={path}", f"ControlPersist={options.persist_s}"]


def _pairs(flag: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (flag, value)]
