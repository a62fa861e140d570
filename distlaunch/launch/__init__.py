"""Runs a job: the loop feeds the supervisor, does what it wants, and tells observers what there is to see."""
