"""Plans without asking any node: what `dry-run` prints."""

import sys

from distlaunch.agent.gpus import gpu_count
from distlaunch.job.spec import JobSpec
from distlaunch.launch.addresses import ssh_addresses
from distlaunch.plan.layout import Facts, LaunchPlan, make_plan


def plan_without_nodes(spec: JobSpec) -> LaunchPlan:
    """The plan as far as it is known here: this machine's GPUs, and no other's. Raises `JobError`."""
    here = gpu_count() if any(node.local for node in spec.nodes) else None
    facts = {
        index: Facts(sys.executable, here if node.local else None) for index, node in enumerate(spec.nodes)
    }
    return make_plan(spec, facts, ssh_addresses(spec).get(0))
