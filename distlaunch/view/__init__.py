"""A run as a screen that is kept open: its ranks, those that stand out first, output, and history.

`watching` opens it; `picture` is what it shows, `screen` how that looks in lines, and what keys change.
"""
