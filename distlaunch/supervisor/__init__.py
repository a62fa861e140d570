"""The policy of a run, pure: `step(state, event, now)` gives the next state and what to do. No I/O."""
