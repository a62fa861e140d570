"""Runs Grid Engine on the hosts: sge_qmaster on the first, and sge_execd on each.

It is separate from this machine's own Grid Engine. Inside the hosts, the usual commands use it. It ends with
the hosts.
"""

import time
from pathlib import Path

from . import namespaces
from .grid_engine_files import CELL, LOOSE, PARALLEL, PROGRAMS
from .state import Testbed
from .tools import RETRY_S, TestbedError, attempt, retry, run

READY_LIMIT_S = 30.0
_RESOURCES = Path("/usr/share/gridengine/util/resources")


def start(testbed: Testbed) -> None:
    """Start the daemons on running hosts, and wait until all queues accept jobs."""
    first = namespaces.enter_argv(testbed.hosts[0])
    spool = [*first, "env", f"LD_LIBRARY_PATH={PROGRAMS}", f"SGE_ROOT={CELL.parent}"]
    run([*spool, str(PROGRAMS / "spoolinit"), "classic", "libspoolc", f"{CELL}/common;{CELL}/spool", "init"])
    defaults = [*spool, str(PROGRAMS / "spooldefaults.bin")]
    run([*defaults, "configuration", f"{CELL}/configuration"])
    run([*defaults, "complexes", f"{_RESOURCES}/centry"])
    run([*defaults, "usersets", f"{_RESOURCES}/usersets"])
    run([*defaults, "managers", "root"])
    run([*defaults, "adminhosts", *(host.name for host in testbed.hosts)])
    run([*first, "sge_qmaster"])
    retry([*first, "qconf", "-sh"], READY_LIMIT_S, "sge_qmaster does not answer")
    _configure(testbed)
    for host in testbed.hosts:
        run([*namespaces.enter_argv(host), "sge_execd"])
    _wait_until_ready(testbed)


def _configure(testbed: Testbed) -> None:
    """Add the hosts, the queue and the parallel environments to the qmaster."""
    first, names = namespaces.enter_argv(testbed.hosts[0]), [host.name for host in testbed.hosts]
    run([*first, "qconf", "-as", ",".join(names)])
    for name in names:
        run([*first, "qconf", "-Ae", f"{CELL}/{name}.host"])
    run([*first, "qconf", "-Msconf", f"{CELL}/scheduler"])
    run([*first, "qconf", "-Ahgrp", f"{CELL}/hostgroup"])
    for name in (PARALLEL, LOOSE):
        run([*first, "qconf", "-Ap", f"{CELL}/{name}.pe"])
    run([*first, "qconf", "-Aq", f"{CELL}/queue"])


def _wait_until_ready(testbed: Testbed) -> None:
    # It doesn't announce that a host has reported.
    deadline = time.monotonic() + READY_LIMIT_S
    while True:
        asked = attempt([*namespaces.enter_argv(testbed.hosts[0]), "qstat", "-f"])
        queues = [line.split() for line in asked.stdout.splitlines() if line.startswith("all.q@")]
        # A queue that can't accept jobs has letters in a last column.
        if len(queues) == len(testbed.hosts) and all(len(words) == 5 for words in queues):
            return
        if time.monotonic() >= deadline:
            raise TestbedError(f"Grid Engine's hosts are not ready: {asked.stdout or asked.stderr.strip()}")
        time.sleep(RETRY_S)
