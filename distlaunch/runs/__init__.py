"""Runs by their folders: found, listed, followed, stopped, replayed, deleted. No server, no database."""
