"""Who sees a run: `Observers` (observer.py) tells each of them what happens, in order.

recording    what is kept of a run: in its folder (run_folder), and its last output in memory
terminal     what the user sees, by way of the console
outlet       a thread that writes for the console, and for the run directory: a slow reader slows nobody
metrics, notifier    what others are told, for jobs that ask for it
"""
