"""Transports to nodes, and the interpretation of their failures.

This package contains only pure data and command lines, which `launch/` uses.

`transport` defines the base class and the transports for this machine, for a launcher that joined, and for an
arbitrary command. `ssh`, `slurm` and `container` define the others. `handshake` defines the first bytes of a
link, `failure` the failures of links, and `gathering` the data that joining launchers send about themselves.
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
    """List the transports that `launcher` in a job file may name. A command has a separate key."""
    return [name for name in TABLE if name not in ("command", "joined")]


def load(name: str) -> "type[Transport]":
    """Return the transport of that name. Raises KeyError."""
    module, _, kind = TABLE[name].rpartition(".")
    found: type[Transport] = getattr(import_module(module), kind)
    return found
