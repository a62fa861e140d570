"""Finds the addresses of nodes that may be the first one, if the job file does not give them."""

import os
import select
import sys
import time
from collections.abc import Mapping

from distlaunch.agent.gpus import gpu_count
from distlaunch.job.spec import JobSpec, NodeSpec
from distlaunch.plan.layout import Facts, LaunchPlan, is_loopback, make_plan
from distlaunch.plan.other_launchers import under_mpirun
from distlaunch.transports import process

RESOLVE_S = 2.0
_READ = 1 << 16


def ask_addresses(spec: JobSpec) -> dict[int, process.Child]:
    """Index in the pool → the command that tells the address, for the nodes whose address the job needs."""
    if spec.one_machine:
        return {}
    return {
        index: child
        for index, node in enumerate(spec.pool)
        if _may_be_first(spec, index, node) and (child := _ask(node))
    }


def answers(asked: Mapping[int, process.Child]) -> dict[int, str]:
    """Index in the pool → the address by which ssh reaches it, of those `asked`, as far as they say."""
    deadline = time.monotonic() + RESOLVE_S
    return {index: told for index, child in asked.items() if (told := _answer(child, deadline))}


def ssh_address(spec: JobSpec) -> str | None:
    """The address by which ssh reaches the first node."""
    child = _ask(spec.nodes[0])
    return _answer(child, time.monotonic() + RESOLVE_S) if child else None


def _may_be_first(spec: JobSpec, index: int, node: NodeSpec) -> bool:
    if node.address or node.local:
        return False
    return not spec.master_host if index == 0 else spec.elastic


def _ask(node: NodeSpec) -> process.Child | None:
    argv = node.reach.address_argv()
    if not argv:
        return None
    try:
        child = process.start(argv, node.reach.environment(os.environ))
    except OSError:
        return None
    child.close_stdin()  # many nodes may be asked
    return child


def _answer(child: process.Child, deadline: float) -> str | None:
    lines = _said(child, deadline).decode(errors="replace").splitlines()
    found = [line.split()[1] for line in lines if line.startswith("hostname ")]
    # An alias for this very machine says nothing about what the others call it.
    return found[0] if found and not is_loopback(found[0]) else None


def _said(child: process.Child, deadline: float) -> bytes:
    """All that it prints, or nothing if it does not come to its end in time: then it is ended."""
    said, piece = b"", None
    come = select.poll()  # it knows no highest descriptor
    come.register(child.stdout, select.POLLIN)
    try:
        while piece != b"":
            if not come.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                child.kill()  # and what its configuration has it run
                return b""
            piece = os.read(child.stdout, _READ)
            said += piece
        return said
    finally:
        child.wait()
        child.close()


def plan_without_nodes(spec: JobSpec) -> LaunchPlan:
    """The plan as far as it is known here: this machine's GPUs, and no other's. Raises `JobError`."""
    spec = under_mpirun(spec, sys.executable)
    here = gpu_count() if any(node.local for node in spec.nodes) else None
    facts = {
        index: Facts(sys.executable, here if node.local else None) for index, node in enumerate(spec.nodes)
    }
    return make_plan(spec, facts, answers(ask_addresses(spec)).get(0))
