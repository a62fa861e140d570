"""What is known of a run, frozen: nodes, workers, timers; what changes it, and what is to be done."""
