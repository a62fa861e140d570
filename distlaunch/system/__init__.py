"""This machine and this process: signals, limits, what differs from system to system, files that are read."""
