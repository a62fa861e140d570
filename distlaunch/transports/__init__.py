"""Transports to nodes, the links to the agents there, and the meaning of their failures.

Pure modules, importable from anywhere: `transport` (the base class; this machine, a launcher that joined, any
command), `ssh`, `slurm`, `container`, `handshake` (the first bytes of a link) and `failure`.

Modules with I/O: `opening` starts transports and makes a `Link` (`link`) of each `process`; `Links` serves
all of them. For launchers that start by themselves, `join` has the protocol and the side of a launcher that
joins, and `inbound` the side of the controller. `tests/unit/test_floors.py` keeps the two parts apart.
"""
