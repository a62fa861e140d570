"""This machine and this process: its job files, its signals and limits, what differs between systems."""
