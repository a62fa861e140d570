"""Finds what the other nodes call the first one, where the job file does not say it."""

import subprocess
from collections.abc import Sequence

from distlaunch.job.spec import JobSpec
from distlaunch.plan.layout import is_loopback
from distlaunch.transport.argv import ssh_resolve_argv

RESOLVE_S = 2.0


def master_address(spec: JobSpec) -> str | None:
    """The address by which ssh reaches the first node, where the job needs it and does not say it."""
    first = spec.nodes[0]
    if spec.one_machine or spec.master_host or first.address or first.local:
        return None
    return _resolved(ssh_resolve_argv(first.reach, spec.ssh))


def _resolved(argv: Sequence[str]) -> str | None:
    try:
        answer = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=RESOLVE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = [line.split()[1] for line in answer.stdout.splitlines() if line.startswith("hostname ")]
    # An alias for this very machine says nothing about what the others call it.
    return found[0] if found and not is_loopback(found[0]) else None
