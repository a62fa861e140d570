"""The contests of scripts/benchmark, in which launchers do the same work in turn."""
