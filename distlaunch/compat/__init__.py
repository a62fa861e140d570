"""Replacements for other launchers: their command lines and files, read as jobs.

`flags` reads the torchrun command line, and `torchrun_job` makes the `JobSpec` of `distlaunch torchrun`. Each
`from_…` module fills a `Draft` of a job file for `distlaunch import`.
"""
