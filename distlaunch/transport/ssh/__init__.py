"""A node at the other end of OpenSSH's client: the user's ssh_config, keys and jump hosts all hold."""

from typing import Literal, NamedTuple

from distlaunch.transport.failure import End, LinkFailure, classify
from distlaunch.transport.ssh.argv import resolve_argv, ssh_argv
from distlaunch.transport.ssh.failures import BY_SSH, SSH_FAILED


class SshOptions(NamedTuple):
    """What the job file's `ssh` section says, how long a TCP connect may take, how often ssh looks.

    `words` are ssh's own options, as `Compression=no`.
    """

    config: str | None = None
    words: tuple[str, ...] = ()
    persist_s: int | None = None
    connect_s: int = 15
    alive_s: int = 5


class Ssh(NamedTuple):
    """As `distlaunch.transport.kinds` has it; `host` is a name that ssh knows."""

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
    def quiet(self) -> bool:
        """A login shell may print, and read, before it runs our command."""
        return False

    def argv(self) -> list[str]:
        """ssh, with options of ours before the user's."""
        return ssh_argv(self)

    def address_argv(self) -> list[str]:
        """ssh itself knows what its configuration makes of a name."""
        return resolve_argv(self)

    def failure(self, end: End) -> LinkFailure:
        """ssh's own words, where it failed; else the node's."""
        return classify(end, BY_SSH, SSH_FAILED)

    def advice(self, failure: LinkFailure, python: str | None) -> str:
        """With commands to paste."""
        from distlaunch.transport.ssh.advice import advice_for  # few nodes fail

        return advice_for(failure, self, python or "python3")
