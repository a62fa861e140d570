"""Why a worker, and so a run, ended. Pure.

`exits` has what a status and last words tell, and what to do; `summary` the end of a run.
"""
