"""The code sent to the nodes: stdlib only, Python 3.8 and later.

`guardian` starts the agent, outlives it, and kills the processes it leaves behind. `serve` is the agent: a
loop that reads commands (`messages`, `wire`) from its link and executes them. `workers` starts, watches and
stops the workers of an attempt, and `worker` spawns each of them. `watches` detects joins and stalls, and
measures resource use. `sweep` kills every descendant of the agent. Reports and output are sent through the
`outbox`. `procfs`, `network`, `gpus` and `cpus` provide facts about the node. `scratch` manages the agent's
temporary directory.
"""
