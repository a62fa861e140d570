"""What the agent finds out about its node: processes, ports, connections, routes, GPUs, CPUs."""
