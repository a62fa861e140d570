"""Runs a job: its start, the links to the agents on its nodes, and the loop around the supervisor.

`opening` starts transports, and creates a `Link` (`link`) for each `process`. `start` opens the links of a
run. `controller` is the loop. `addresses` looks up the addresses of nodes. `snapshot` saves the code to send
to the nodes, and `collecting` writes the files that the nodes send back.

If another program starts distlaunch once per node or rank, `gather` collects these launchers. `join`
implements the protocol and the joining launcher's side, and `inbound` the controller's side. `joined_agent`
and `joined_ranks` run the ranks of a launcher that has joined.

`agents` runs agents without a job for `distlaunch check`, `check-port` and `init`. `node_check` checks the
nodes, `port_check` the rendezvous port and the connections between nodes, and `link_check` the bandwidth of
those connections.
"""
