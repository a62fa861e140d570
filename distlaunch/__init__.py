"""Starts distributed PyTorch jobs: one YAML file, one command, any number of machines.

    job.yaml ─job/─▶ JobSpec ─plan/─▶ LaunchPlan ─▶ supervisor/ ═links/═▶ agent/ (one per node) ─▶ workers

`cli/` reads the command line, `launch/` runs the loop: it feeds `supervisor/step.py`, which is pure, with
events (`state/events.py`), does the actions that come back, and tells `observers/` what there is to see:

    agent ─frame─▶ Links ─report─▶ translation/ ─event─▶ step ─action─▶ translation/ ─command─▶ agent

The agent is shipped to the node, where it starts the workers; its parent, the guardian, cleans up if it dies.
What each package holds stands in its `__init__`, what to touch for something new in CONTRIBUTING.md.
"""

__version__ = "0.1.0"
