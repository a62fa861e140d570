"""A run as a screen that is kept open: its ranks, those that stand out first, output, and history."""
