"""Finds, lists, follows, stops, replays and reports runs, all from their directories, without a server.

`run` finds a run and its state, and `submissions` lists runs together with queued jobs. `why` explains a run.
`timeline` shows where a run's time went, `report` collects everything known about a run, `html` renders a
report as a page, and `bundle` packs a run's files without secrets.
"""
