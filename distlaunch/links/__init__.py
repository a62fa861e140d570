"""Links to the nodes' agents: opened, served, closed."""
