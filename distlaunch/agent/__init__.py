"""The code sent to the nodes: stdlib only, Python 3.8 and later.

`guardian` starts the agent, outlives it, and kills what it leaves behind. `serve` is the agent: a loop that
reads commands (`messages`, `wire`) from its link and executes them. `workers` starts, watches and ends the
workers of an attempt, each a `worker`. `watches` sees which ranks join, stall, or use how much. `sweep` kills
every descendant. Reports, sent by all of these, and output go through the `outbox`. The rest are facts of the
node: `procfs`, `network`, `gpus`, `cpus`, and `scratch`, its temporary directory.
"""
