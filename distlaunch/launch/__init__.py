"""The run of a job: its start, the loop around the supervisor, and launchers that join."""
