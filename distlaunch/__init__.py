"""Starts distributed PyTorch jobs: one YAML file, one command, any number of machines.

    job.yaml ─job/─▶ JobSpec ─plan/─▶ LaunchPlan ─▶ supervisor/ ═links/═▶ agent/ (one per node) ─▶ workers

`cli/` reads the command line, `launch/` runs the loop: it feeds `supervisor/step.py`, which is pure, with
events (`state/events.py`), does the actions that come back, and tells `observers/` what there is to see.
"""

__version__ = "0.1.0"
