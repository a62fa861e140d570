"""Transports to nodes, and the meaning of their failures: pure data and command lines. `launch/` uses them.

`transport` has the base class, this machine, a launcher that joined, and any command; `ssh`, `slurm` and
`container` the others. `handshake` has the first bytes of a link, `failure` the ways in which one ends, and
`gathering` what launchers that join say of themselves.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distlaunch.transports.transport import Transport

TABLE: dict[str, str] = {
    "command": "distlaunch.transports.transport.Command",
    "joined": "distlaunch.transports.transport.Joined",
    "local": "distlaunch.transports.transport.Local",
    "slurm": "distlaunch.transports.slurm.SlurmStep",
    "ssh": "distlaunch.transports.ssh.Ssh",
}
"""The class of each transport, by its `name`."""


def launchers() -> list[str]:
    """List the transports that `launcher` in a job file may name: a command has a key of its own."""
    return [name for name in TABLE if name not in ("command", "joined")]


def load(name: str) -> "type[Transport]":
    """Return the transport of that name. Raises KeyError."""
    module, _, kind = TABLE[name].rpartition(".")
    found: type[Transport] = getattr(import_module(module), kind)
    return found
