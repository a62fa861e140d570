"""Removes a testbed: its processes, links and directory, if they exist."""

import os
import shutil
import time

from . import namespaces
from .processes import by_netns, by_parent, descendants, kill_all, lives
from .state import Host, Testbed
from .tools import TestbedError

DOWN_LIMIT_S = 10.0


def population(testbed: Testbed) -> dict[str, list[int]]:
    """Return the PIDs in each host, by name: processes in its network namespace, and below its keeper.

    The keeper comes last. A process that creates another network namespace is still below the keeper if it
    was started over ssh.
    """
    children, inhabitants = by_parent(), by_netns()
    return {host.name: _inside(testbed, host, children, inhabitants) for host in testbed.hosts}


def take_down(testbed: Testbed) -> None:
    """Remove a testbed completely. Raises TestbedError if a process remains. The call can be repeated."""
    if os.getpid() in _pids(testbed, keepers=False):
        raise TestbedError("this would kill itself: take the testbed down from outside of its hosts")
    deadline = time.monotonic() + DOWN_LIMIT_S
    # The keepers come last, because they are needed to find the other processes.
    stuck = kill_all(lambda: _pids(testbed, keepers=False), deadline)
    stuck += kill_all(lambda: _pids(testbed, keepers=True), deadline)
    if testbed.mode == "netns":
        namespaces.remove_links(testbed)
    if stuck:
        raise TestbedError(f"still alive after {DOWN_LIMIT_S:g} s: {sorted(set(stuck))}; run `down` again")
    shutil.rmtree(testbed.dir)


def _pids(testbed: Testbed, keepers: bool) -> list[int]:
    keeper_pids = {host.keeper.pid for host in testbed.hosts if host.keeper and lives(host.keeper)}
    everybody = {pid for pids in population(testbed).values() for pid in pids}
    return sorted(everybody if keepers else everybody - keeper_pids)


def _inside(
    testbed: Testbed, host: Host, children: dict[int, list[int]], inhabitants: dict[int, list[int]]
) -> list[int]:
    below: list[int] = []
    keeper: list[int] = []
    if host.keeper and lives(host.keeper):
        below = descendants(host.keeper.pid, children)
        keeper = [host.keeper.pid]
    there = _of_namespace(testbed, host, inhabitants)
    return [*dict.fromkeys(pid for pid in [*there, *below] if pid not in keeper), *keeper]


def _of_namespace(testbed: Testbed, host: Host, inhabitants: dict[int, list[int]]) -> list[int]:
    pids = inhabitants.get(host.netns, []) if host.netns else []
    # With a keeper, the namespace is certain. Without a keeper, its label must match.
    if lives(host.keeper) or any(namespaces.is_marked(pid, namespaces.mark(testbed, host)) for pid in pids):
        return pids
    return []
