"""Transports to nodes, the links to the agents there, and the meaning of their failures.

Pure modules, importable from anywhere: `transport` (the base class; this machine, a launcher that joined, any
command), `ssh`, `slurm`, `container`, `handshake` (the first bytes of a link) and `failure`.

Modules with I/O: `opening` starts transports and makes a `Link` (`link`) of each `process`; `Links` serves
all of them. For launchers that start by themselves, `join` has the protocol and the side of a launcher that
joins, and `inbound` the side of the controller. `tests/unit/test_floors.py` keeps the two parts apart.
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
