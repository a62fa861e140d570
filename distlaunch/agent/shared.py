"""Descriptors of the command that an agent on its machine has copies of, for its workers."""

VARIABLE = "DISTLAUNCH_SHARED"
"""Says which of the agent's descriptors are the copies, `5,6`; empty for agents elsewhere."""
KEPT = "PMI_FD"
"""Says which is the connection to MPI's process manager: a worker has it, too."""
