"""What takes the place of other launchers: their command lines and files, read into jobs.

`flags` is torchrun's command line, and `torchrun_job` the `JobSpec` that `distlaunch torchrun` makes of it.
Each `from_…` adds to a `Draft` of a job file for `distlaunch import`.
"""
