"""`distlaunch check`: finds problems that would keep a job from working, before it starts.

`probe` is a program that describes the node it runs on. `launch/node_check` runs it on each node of a job.
`findings` checks the answers against the job and each other, with one function for each part of a node.
`link_probe` measures the links between nodes. `launch/link_check` runs it instead of the ranks, and finds the
slow links.
"""
