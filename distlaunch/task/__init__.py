"""`distlaunch exec`: makes a task that a scheduler has started a rank, and leaves."""
