"""Runs Slurm on the hosts: munged and slurmctld on the first, and one or more slurmds on each.

It is separate from this machine's own Slurm. The daemons run in the hosts' namespaces and end with the hosts.
"""

import time

from . import namespaces, slurm_accounting
from .slurm_files import directory, nodes_of
from .state import Testbed
from .tools import TestbedError, attempt, run, tool

READY_LIMIT_S = 30.0
RETRY_S = 0.05


def start(testbed: Testbed) -> None:
    """Start the daemons on running hosts, and wait until every node is idle."""
    where, first = directory(testbed), testbed.hosts[0]
    files = [f"--{kind}-file={where}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
    run([*namespaces.enter_argv(first), tool("munged"), "--force", f"--socket={where}/munge.socket", *files])
    if testbed.schedulers.slurm_accounts:
        slurm_accounting.start(testbed)
    run([*namespaces.enter_argv(first), tool("slurmctld"), "-c"])
    for name, host in nodes_of(testbed):
        run([*namespaces.enter_argv(host), tool("slurmd"), "-N", name])
    _wait_until_idle(testbed)


def _wait_until_idle(testbed: Testbed) -> None:
    # Slurm doesn't announce that a node has registered.
    deadline = time.monotonic() + READY_LIMIT_S
    look = [tool("sinfo"), "--noheader", "--Node", "--format=%N %T"]
    while True:
        asked = attempt([*namespaces.enter_argv(testbed.hosts[0]), *look])
        states = dict(line.split() for line in asked.stdout.splitlines())
        if asked.returncode == 0 and set(states.values()) == {"idle"}:
            return
        if time.monotonic() >= deadline:
            raise TestbedError(f"Slurm's nodes are not idle: {states or asked.stderr.strip()}")
        time.sleep(RETRY_S)
