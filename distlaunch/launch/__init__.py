"""Runs the supervisor's policy: the loop, the end's summary, the checks."""
