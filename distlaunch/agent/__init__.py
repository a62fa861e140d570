"""The code sent to the nodes: stdlib only, Python 3.8 and later.

`guardian` starts the agent, outlives it, and kills what it leaves behind. `serve` is the agent: a loop that
reads commands (`messages`, `wire`) from its link and executes them. `workers` starts, watches and stops the
workers of an attempt, and `worker` spawns each of them. `watches` detects joins and stalls, and measures
resource use. `sweep` kills every descendant. All of these report through the `outbox`, which also sends
output. `procfs`, `network`, `gpus` and `cpus` provide facts about the node. `scratch` is the agent's
temporary directory.
"""
