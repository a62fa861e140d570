"""The addresses of nodes that may become the first one, if the job file doesn't have them."""

import os
import select
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from distlaunch.agent.gpus import gpu_count
from distlaunch.job.spec import JobSpec, NodeSpec
from distlaunch.launch import process
from distlaunch.plan.other_launchers import under_mpirun
from distlaunch.plan.placement import Facts, LaunchPlan, is_loopback, make_plan

RESOLVE_S = 2.0
_READ = 1 << 16


def ask_addresses(spec: JobSpec) -> dict[int, process.Child]:
    """Start commands that print the addresses the job needs, by index in the pool."""
    if spec.one_machine:
        return {}
    return {
        index: child
        for index, node in enumerate(spec.pool)
        if _may_be_first(spec, index, node) and (child := _ask(node))
    }


def answers(asked: Mapping[int, process.Child]) -> dict[int, str]:
    """Return the addresses by which ssh reaches nodes, by index in the pool, as far as they are found."""
    deadline = time.monotonic() + RESOLVE_S
    return {index: address for index, child in asked.items() if (address := _answer(child, deadline))}


def ssh_address(spec: JobSpec) -> str | None:
    """Return the address by which ssh reaches the first node."""
    child = _ask(spec.nodes[0])
    return answers({0: child}).get(0) if child else None


def _may_be_first(spec: JobSpec, index: int, node: NodeSpec) -> bool:
    if node.address or node.local:
        return False
    return not spec.rendezvous.host if index == 0 else spec.elastic


def _ask(node: NodeSpec) -> process.Child | None:
    argv = node.reach.address_argv()
    with suppress(OSError):
        if argv:
            child = process.start(argv, node.reach.environment(os.environ))
            child.close_stdin()  # there may be many nodes
            return child
    return None


def _answer(child: process.Child, deadline: float) -> str | None:
    """Return the address that the command prints; None if it is killed because it is late."""
    text, piece = b"", b"-"
    readable = select.poll()  # unlike select, for any descriptor
    readable.register(child.stdout, select.POLLIN)
    while piece and readable.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        piece = os.read(child.stdout, _READ)
        text += piece
    if piece:
        child.kill()  # and the programs in its configuration
    child.wait()
    child.close()
    lines = [] if piece else text.decode(errors="replace").splitlines()
    found = [line.split()[1] for line in lines if line.startswith("hostname ")]
    # An alias for this very machine doesn't help the others.
    return found[0] if found and not is_loopback(found[0]) else None


def plan_without_nodes(spec: JobSpec) -> LaunchPlan:
    """Return the plan as far as it is known here, with the GPUs of this machine. Raises `JobError`."""
    spec = under_mpirun(spec, sys.executable)
    here = gpu_count() if any(node.local for node in spec.nodes) else None
    facts = {
        index: Facts(sys.executable, here if node.local else None) for index, node in enumerate(spec.nodes)
    }
    return make_plan(spec, facts, answers(ask_addresses(spec)).get(0))
