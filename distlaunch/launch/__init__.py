"""The run of a job: the links to the agents on its nodes, its start, and the loop around the supervisor.

`opening` starts transports, and creates a `Link` (`link`) for each `process`. `start` opens the links of a
run. `controller` is the loop. If another program starts distlaunch once per node or rank, `gather` collects
these launchers. `join` has the protocol and the side of a launcher that joins, `inbound` that of the
controller. `joined_agent` and `joined_ranks` run the ranks of a launcher that has joined.
"""
