"""How a node is reached: the transport, the link to the node's agent that it carries, what failures mean.

Pure modules, importable from anywhere: `transport` (what every kind has; this machine, a launcher that
joined, any command), `ssh`, `slurm`, `container`; `handshake` (the first bytes of a link) and `failure`.

With I/O, for those who run something: `opening` starts transports, and makes a `Link` (`link`) of each
`process`; `Links` serves them all. Where somebody else starts the launchers, `join` has what they say to each
other, `door` is the controller's side of it and `dial` the others'. `tests/unit/test_floors.py` keeps the two
parts apart.
"""
