"""Runs, known by their directories: found, listed, followed, stopped, replayed, reported. No server.

`why` explains a run. `timeline` has what its time went to, `report` all that is known of it, `html` the page
about it, and `bundle` its files without secrets.
"""
