"""Observers of a run. `Observers` (observer.py) calls each of them, in order.

recording    writes the run directory (run_directory), and keeps the last output in memory
terminal     shows the run to the user, through the console
outlet       a thread that writes for the console and the run directory: slow readers don't delay a job
metrics, notifier    write metrics and start commands, for jobs that ask for it
"""
