"""Checks through agents, without running a job: `port_check`."""
