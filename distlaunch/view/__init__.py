"""A full-screen view of a run: its ranks (outliers first), their output, and the history.

`watching` runs the screen, `view_model` collects what it shows, and `screen` renders it and handles keys.
"""
