"""The parts of `scripts/testbed`, which creates many hosts on one machine and removes them.

`cli` has the commands, `bring_up` and `take_down` implement them, and `keeper` is the main process of each
host.
"""
