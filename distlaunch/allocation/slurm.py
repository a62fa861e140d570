"""Slurm's variables, read without Slurm's tools: in a container they may be absent. See sbatch(1)."""

import re
from collections.abc import Iterable, Mapping

from distlaunch.allocation.allocation import AllocatedNode, Allocation
from distlaunch.wording import expand_ranges


def slurm_allocation(environ: Mapping[str, str]) -> Allocation:
    """The allocation of SLURM_JOB_ID, all components of a heterogeneous job included.

    Raises ValueError for a list that is none.
    """
    components = int(environ.get("SLURM_HET_SIZE") or 0)
    groups = range(components) if components else [None]
    nodes = tuple(node for group in groups for node in _component(environ, group))
    starts = int(environ.get("SLURM_RESTART_COUNT") or 0)
    return Allocation("slurm", environ["SLURM_JOB_ID"], nodes, environ.get("ENVIRONMENT") == "BATCH", starts)


def _component(environ: Mapping[str, str], group: int | None) -> Iterable[AllocatedNode]:
    def value(name: str) -> str:
        suffix = "" if group is None else f"_HET_GROUP_{group}"
        return environ.get(name + suffix, "")

    hosts = expand_nodelist(value("SLURM_JOB_NODELIST") or value("SLURM_NODELIST"))
    asked = "SLURM_NTASKS" if group is None else f"SLURM_NTASKS_HET_GROUP_{group}"
    # Without being asked, Slurm counts a task per node, which says nothing.
    tasks = expand_counts(value("SLURM_TASKS_PER_NODE")) if asked in environ else []
    gpus = count_gpus(value("SLURM_GPUS_PER_NODE"))
    for index, host in enumerate(hosts):
        yield AllocatedNode(host, gpus, tasks[index] if index < len(tasks) else None, group)


def expand_nodelist(text: str) -> list[str]:
    """`a[1-2,07]-b[3],c` → a1-b3 a2-b3 a07-b3 c. Raises ValueError."""
    parts = re.findall(r"(?:\[[^\[\]]*\]|[^,\[\]])+", text)
    return [host for part in parts for host in expand_ranges(part)]


def expand_counts(text: str) -> list[int]:
    """`2(x3),1` → 2 2 2 1. Raises ValueError."""
    counts: list[int] = []
    for item in text.split(",") if text else ():
        found = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,5})\))?", item)
        if not found:
            raise ValueError(f'"{text}" is no list of counts per node')
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def count_gpus(text: str) -> int | None:
    """`4`, `a100:4` and `volta:3,kepler:1` are 4 each; None where there is no number."""
    counts = [item.rpartition(":")[2] for item in text.split(",")]
    return sum(map(int, counts)) if all(count.isdigit() for count in counts) else None
