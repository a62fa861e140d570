"""Links to the nodes' agents: opened, served, given up."""
