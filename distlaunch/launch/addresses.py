"""Finds the addresses of nodes that may be the first one, if the job file does not give them."""

import time
from typing import TYPE_CHECKING

from distlaunch.job.spec import JobSpec, NodeSpec
from distlaunch.plan.layout import is_loopback

if TYPE_CHECKING:
    import subprocess

RESOLVE_S = 2.0


def ssh_addresses(spec: JobSpec) -> dict[int, str]:
    """Index in the pool → the address by which ssh reaches it, for the nodes whose address the job needs."""
    if spec.one_machine or not spec.engine.serves_store:
        return {}
    needed = [index for index, node in enumerate(spec.pool) if _may_be_first(spec, index, node)]
    asked = {index: _ask(spec.pool[index]) for index in needed}
    deadline = time.monotonic() + RESOLVE_S
    answers = {index: _answer(process, deadline) for index, process in asked.items() if process}
    return {index: address for index, address in answers.items() if address}


def ssh_address(spec: JobSpec) -> str | None:
    """The address by which ssh reaches the first node."""
    process = _ask(spec.nodes[0])
    return _answer(process, time.monotonic() + RESOLVE_S) if process else None


def _may_be_first(spec: JobSpec, index: int, node: NodeSpec) -> bool:
    if node.address or node.local:
        return False
    return not spec.master_host if index == 0 else spec.elastic


def _ask(node: NodeSpec) -> "subprocess.Popen[bytes] | None":
    argv = node.reach.address_argv()
    if not argv:
        return None
    import subprocess  # jobs on this machine ask nobody

    null = subprocess.DEVNULL
    try:
        return subprocess.Popen(argv, stdin=null, stdout=subprocess.PIPE, stderr=null)
    except OSError:
        return None


def _answer(process: "subprocess.Popen[bytes]", deadline: float) -> str | None:
    from subprocess import TimeoutExpired

    try:
        said, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    lines = said.decode(errors="replace").splitlines()
    found = [line.split()[1] for line in lines if line.startswith("hostname ")]
    # An alias for this very machine says nothing about what the others call it.
    return found[0] if found and not is_loopback(found[0]) else None
