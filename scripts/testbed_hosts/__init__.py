"""The parts of `scripts/testbed`, which makes many hosts on one machine and takes them down again.

Start at `cli` for the commands, at `bring_up` and `take_down` for what they do, and at `keeper` for the
one process that every host consists of.
"""
