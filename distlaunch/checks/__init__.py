"""Checks through agents, without running a job."""
