"""Runs, known by their directories: found, listed, followed, stopped, replayed, reported. No server.

`why` explains a run. `timeline` shows where its time went, `report` collects everything known about it,
`html` renders that as a page, and `bundle` contains its files without secrets.
"""
