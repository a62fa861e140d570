"""Runs, known by their directories: found, listed, followed, stopped, replayed, reported. No server.

`run` finds a run and its state, and `submissions` lists runs with the jobs in queues. `why` explains a run.
`timeline` shows where its time went, `report` collects everything known about it, `html` renders that as a
page, and `bundle` contains its files without secrets.
"""
