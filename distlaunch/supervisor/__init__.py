"""The policy of a run, pure: `step(state, event, now)` returns the next state and the actions. No I/O."""
