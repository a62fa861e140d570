"""What scripts/benchmark measures: contests between launchers that do the same work, in turn."""
