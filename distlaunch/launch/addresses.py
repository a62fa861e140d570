"""Looks up the addresses of nodes that may become node 0, if the job file doesn't set them."""

import os
import select
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from distlaunch.agent.gpus import gpu_count
from distlaunch.job.spec import JobSpec, NodeSpec
from distlaunch.job.text import is_loopback
from distlaunch.launch import process
from distlaunch.plan.placement import Facts, LaunchPlan, make_plan

RESOLVE_S = 2.0
"""Seconds to wait for all lookups together."""
_READ = 1 << 16


def ask_addresses(spec: JobSpec) -> dict[int, process.Child]:
    """Start and return the commands that print the addresses the job needs, keyed by index in the pool.

    They run while links are being opened. `answers` collects their output later.
    """
    if spec.one_machine:
        return {}
    return {
        index: child
        for index, node in enumerate(spec.pool)
        if _may_be_first(spec, index, node) and (child := _ask(node))
    }


def answers(asked: Mapping[int, process.Child]) -> dict[int, str]:
    """Return the addresses that ssh uses for nodes, keyed by index in the pool. Omit unknown ones.

    Waits up to RESOLVE_S seconds for the commands that `ask_addresses` started, then kills the rest.
    """
    deadline = time.monotonic() + RESOLVE_S
    return {index: address for index, child in asked.items() if (address := _answer(child, deadline))}


def ssh_address(spec: JobSpec) -> str | None:
    """Return the address that ssh uses for node 0; None if unknown. Waits up to RESOLVE_S seconds."""
    child = _ask(spec.nodes[0])
    return answers({0: child}).get(0) if child else None


def _may_be_first(spec: JobSpec, index: int, node: NodeSpec) -> bool:
    if node.address or node.local:
        return False
    return not spec.rendezvous.host if index == 0 else spec.elastic


def _ask(node: NodeSpec) -> process.Child | None:
    """Start the command that prints a node's address. Return None if there is none, or it can't start."""
    argv = node.reach.address_argv()
    with suppress(OSError):
        if argv:
            child = process.start(argv, node.reach.environment(os.environ))
            child.close_stdin()  # many nodes would use many descriptors
            return child
    return None


def _answer(child: process.Child, deadline: float) -> str | None:
    """Return the address that the command prints, or None. Kill the command at the deadline."""
    text, piece = b"", b"-"
    readable = select.poll()  # unlike select, works with any descriptor
    readable.register(child.stdout, select.POLLIN)
    while piece and readable.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        piece = os.read(child.stdout, _READ)
        text += piece
    if piece:
        child.kill()  # including programs started by ssh's configuration
    child.wait()
    child.close()
    lines = [] if piece else text.decode(errors="replace").splitlines()
    found = [line.split()[1] for line in lines if line.startswith("hostname ")]
    # Other nodes can't use a loopback alias for this machine.
    return found[0] if found and not is_loopback(found[0]) else None


def plan_without_nodes(spec: JobSpec) -> LaunchPlan:
    """Return the plan known without contacting nodes, with this machine's GPUs. Raises `JobError`.

    For `dry-run` and other commands that start no ranks.
    """
    from distlaunch.plan.other_launchers import under_mpirun  # runs don't need it

    spec = under_mpirun(spec, sys.executable)
    here = gpu_count() if any(node.local for node in spec.nodes) else None
    facts = {
        index: Facts(sys.executable, here if node.local else None) for index, node in enumerate(spec.nodes)
    }
    return make_plan(spec, facts, answers(ask_addresses(spec)).get(0))
