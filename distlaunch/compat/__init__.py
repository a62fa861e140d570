"""Converts command lines and files of other launchers to jobs.

`flags` parses torchrun command lines, and `torchrun_job` creates the `JobSpec` for `distlaunch torchrun`.
Each `from_…` module fills a `Draft` of a job file for `distlaunch import`.
"""
