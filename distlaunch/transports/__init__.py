"""How a node becomes a byte pipe to an agent: command lines, the first bytes, and what failures mean."""
