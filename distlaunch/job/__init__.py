"""The job file: its fields, its checks, and the frozen `JobSpec` it becomes. Pure."""
