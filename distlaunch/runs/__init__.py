"""Runs, known by their directories: found, listed, followed, stopped, replayed. No server, no database."""
