"""`distlaunch check`: what would keep a job from working, found before it starts.

`nodes` connects to the nodes of a job as a run does, and has each run `probe`, a program that describes its
node. `findings` compares the answers with the job and with each other. It is pure: one function for each part.
"""
