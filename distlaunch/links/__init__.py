"""Links to the agents on nodes: `opening` starts transports, and makes a `Link` (`link`) of each `process`.

`Links` serves all of them. For launchers that start by themselves, `join` has the protocol and the side of a
launcher that joins, and `inbound` the side of the controller.
"""
