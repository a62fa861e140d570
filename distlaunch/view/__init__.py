"""A full-screen view of a run: its ranks (outliers first), their output, and the history.

`screen` controls the terminal and handles keys, and `rendering` creates the lines. Both show the model of
`observers/model`, which `runs/report` extends.
"""
