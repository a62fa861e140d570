"""The one brain, pure: `step(state, event, now)` gives the next state and what to do. No IO, no clock."""
