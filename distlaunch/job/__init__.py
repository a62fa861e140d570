"""The job file: its keys (`fields.py`), its checks, and the frozen `JobSpec` it becomes. Pure."""
