"""Assigns CPUs to the workers of a node, using the NUMA nodes, sockets, cores and caches in sysfs.

The NUMA modes have the same meaning as in torch's ``--numa-binding``. Missing information is not an error. A
worker whose GPU has no known NUMA node is placed like a worker without a GPU. A NUMA node without allowed
CPUs is replaced by the nearest one that has some. CPUs whose cache is unknown form one complex.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from distlaunch.agent.messages import Binding, StartWorkers, WorkerSpec
from distlaunch.agent.procfs import contents, names

VISIBLE = "CUDA_VISIBLE_DEVICES"
SYSTEM = "sys/devices/system/"
FAR = 255
"""The ACPI value for an unknown distance."""


class BindingError(Exception):
    """The node can't satisfy a binding. The arguments are the reason and the first local rank affected."""


def assign(command: StartWorkers, binding: Binding) -> list[WorkerSpec]:
    """Return the workers of `command` with `cpus` set (to "0-3", for example). Raises `BindingError`."""
    # With `one_device`, each worker has its own CUDA_VISIBLE_DEVICES. A single worker's value is in `env`.
    one_device = any(spec.one_device for spec in command.workers)
    visible = os.environ.get(VISIBLE) if one_device else command.env.get(VISIBLE, os.environ.get(VISIBLE))
    machine = Machine(os.sched_getaffinity(0))
    found = shares(binding, len(command.workers), machine, visible)
    return [spec._replace(cpus=cpu_list(found[spec.local_rank])) for spec in command.workers]


def shares(binding: Binding, workers: int, machine: Machine, visible: str | None = None) -> list[set[int]]:
    """Return the CPUs of each local rank for `binding`. Raises `BindingError`.

    `visible` is the workers' CUDA_VISIBLE_DEVICES.
    """
    how = binding.how
    if how == "listed":
        return [_listed(rank, text, machine.allowed) for rank, text in enumerate(binding.cpus[:workers])]
    if how == "cores":
        whose = "cpu_binding: %d workers on a node" % workers
        return _deal([core for _, core in machine.cores], workers, whose)
    # As in torch, the share of an unused GPU stays free.
    seats = max(workers, binding.gpus)
    gpus = machine.gpu_nodes(binding.gpus, visible)
    nodes = [machine.usable_node(gpus.get(seat), seat, seats) for seat in range(seats)]
    return _seated(nodes, lambda node, count: _MODES[how](machine, node, count))[:workers]


def _listed(rank: int, text: str, allowed: set[int]) -> set[int]:
    wanted = cpu_set(text)
    if not wanted <= allowed:
        lacking, available = cpu_list(wanted - allowed), cpu_list(allowed)
        what = "cpu_binding lists CPU %s, but this node has only %s available" % (lacking, available)
        why = what + "; list others, or request more CPUs from the scheduler"
        raise BindingError(why, rank)
    return wanted


def _seated(nodes: list[int], share: Callable[[int, int], list[set[int]]]) -> list[set[int]]:
    """Return each seat's share of its NUMA node. A seat is a worker or an unused GPU.

    `nodes` contains the NUMA node of each seat.
    """
    left = {node: iter(share(node, nodes.count(node))) for node in set(nodes)}
    return [next(left[node]) for node in nodes]


def _node(machine: Machine, node: int, count: int) -> list[set[int]]:
    return [machine.nodes[node]] * count


def _socket(machine: Machine, node: int, count: int) -> list[set[int]]:
    socket = machine.socket(node)
    others = [cpus for other, cpus in machine.nodes.items() if machine.socket(other) == socket]
    return [set().union(*others)] * count


def _exclusive(machine: Machine, node: int, count: int) -> list[set[int]]:
    whose = "numa_binding: %d GPUs or workers on NUMA node %d" % (count, node)
    return _deal([core for at, core in machine.cores if at == node], count, whose)


def _core_complex(machine: Machine, node: int, count: int) -> list[set[int]]:
    own = machine.nodes[node]
    complexes = _groups(own, lambda cpu: machine.last_cache(cpu) or own)
    # As in torch: complexes with the most allowed CPUs first, starting over if there are too few.
    complexes.sort(key=len, reverse=True)
    return [complexes[i % len(complexes)] for i in range(count)]


_MODES = {"node": _node, "socket": _socket, "exclusive": _exclusive, "core-complex": _core_complex}
"""Functions that divide a NUMA node among its `count` seats, keyed by `Binding.how`."""


def _deal(cores: list[set[int]], count: int, subject: str) -> list[set[int]]:
    """Divide `cores` into `count` runs whose lengths differ by at most one core, longer ones first.

    Raises `BindingError`, whose text begins with `subject`.
    """
    each, more = divmod(len(cores), count)
    if not each:
        why = "%s need a core each, but have only %d" % (subject, len(cores))
        raise BindingError(why + "; use fewer, or another binding, or request more CPUs", 0)
    starts = [i * each + min(i, more) for i in range(count + 1)]
    return [set().union(*cores[start:end]) for start, end in zip(starts, starts[1:])]


class Machine:
    """The CPUs in `allowed`, arranged as in sysfs.

    `nodes` maps NUMA nodes to their CPUs. `cores` lists each core as (NUMA node, CPUs). Offline CPUs, and
    NUMA nodes without CPUs, are skipped. `root` is the parent directory of proc and sys.
    """

    def __init__(self, allowed: set[int], root: str = "/") -> None:
        self.allowed, self._root = allowed, root
        online = self._cpus("node/online")
        cpus = {node: allowed & self._cpus("node/node%d/cpulist" % node) for node in sorted(online)}
        # A kernel without NUMA has no such files.
        self.nodes = {node: own for node, own in cpus.items() if own} or {0: allowed}
        self.cores = [(node, core) for node, own in self.nodes.items() for core in self._cores(own)]

    def _cores(self, cpus: set[int]) -> list[set[int]]:
        return _groups(cpus, lambda cpu: self._cpus("cpu/cpu%d/topology/thread_siblings_list" % cpu))

    def usable_node(self, wanted: int | None, seat: int, seats: int) -> int:
        """Return the NUMA node nearest to `wanted`.

        If `wanted` is None, return the node that contains the seat's share of all cores.
        """
        if wanted is None:
            # Divides cores rather than nodes, so that each seat gets a core even in an uneven cpuset.
            return self.cores[seat * len(self.cores) // seats][0]
        far = self._distances(wanted)
        return min(self.nodes, key=lambda node: (node != wanted, far.get(node, FAR), node))

    def _distances(self, node: int) -> dict[int, int]:
        online = sorted(self._cpus("node/online"))
        # The file has one distance for each online node, in order.
        words = self._read(SYSTEM + "node/node%d/distance" % node).split()
        return dict(zip(online, map(int, words)))

    def socket(self, node: int) -> str:
        """Return the socket of the first CPU of a NUMA node."""
        return self._read(SYSTEM + "cpu/cpu%d/topology/physical_package_id" % min(self.nodes[node]))

    def last_cache(self, cpu: int) -> set[int]:
        """Return the CPUs that share the last-level cache with `cpu`; empty if unknown."""
        directory = "cpu/cpu%d/cache" % cpu
        caches = [name for name in self._names(SYSTEM + directory) if name[:5] == "index"]
        last = max(("%s/%s" % (directory, name) for name in caches), key=self._level, default="")
        return self._cpus(last + "/shared_cpu_list")

    def _level(self, cache: str) -> int:
        """Return the level of a cache (1, 2 or 3), or 0 if it holds only instructions."""
        holds_data = self._read(SYSTEM + cache + "/type") in ("Unified", "Data")
        return int(self._read(SYSTEM + cache + "/level") or 0) if holds_data else 0

    def gpu_nodes(self, gpus: int, visible: str | None = None) -> dict[int, int]:
        """Map cuda:0 … cuda:`gpus`-1, in CUDA's PCI order, to their NUMA nodes, if known."""
        found = {}
        for device, address in enumerate(self._gpu_addresses(visible)[:gpus]):
            node = self._read("sys/bus/pci/devices/%s/numa_node" % address)
            if node.isdigit():  # -1 if the firmware doesn't expose it
                found[device] = int(node)
        return found

    def _gpu_addresses(self, visible: str | None) -> list[str]:
        """Return the PCI addresses of the GPUs that a worker sees, with "" for a GPU that can't be found."""
        there = sorted(self._names("proc/driver/nvidia/gpus"), key=_pci_order)
        if visible is None:
            return there
        known = {self._uuid(address): address for address in there}
        known.update((str(number), address) for number, address in enumerate(there))
        return [_by_name(known, word.strip()) for word in visible.split(",")]

    def _uuid(self, address: str) -> str:
        lines = self._read("proc/driver/nvidia/gpus/%s/information" % address).splitlines()
        return next((line.split()[-1] for line in lines if line.startswith("GPU UUID:")), "")

    def _cpus(self, path: str) -> set[int]:
        return cpu_set(self._read(SYSTEM + path))

    def _read(self, path: str) -> str:
        return contents(os.path.join(self._root, path)).decode().strip()

    def _names(self, path: str) -> list[str]:
        return names(os.path.join(self._root, path))


def _pci_order(address: str) -> list[int]:
    # Domains may have more than four digits, so sort them as numbers.
    return [int(part, 16) for part in address.replace(".", ":").split(":")]


def _by_name(known: dict[str, str], word: str) -> str:
    """Return the address of the GPU with this number or UUID; "" if it isn't found.

    CUDA also accepts abbreviated UUIDs.
    """
    matches = [name for name in known if word.startswith("GPU-") and name.startswith(word)]
    return known[matches[0]] if matches else known.get(word, "") if word else ""


def _groups(cpus: set[int], sharing: Callable[[int], set[int]]) -> list[set[int]]:
    """Group `cpus` by the sets that `sharing` returns, in order of the first CPU in each set."""
    groups: dict[int, set[int]] = {}
    left = set(cpus)
    for cpu in sorted(cpus):
        if cpu in left:  # called once per group, because each call reads several files
            whole = {cpu} | sharing(cpu)
            groups.setdefault(min(whole), set()).update(whole & left)
            left -= whole
    return [groups[first] for first in sorted(groups)]


def cpu_set(text: str) -> set[int]:
    """Parse a list of CPUs in the kernel's format, such as "0-3,8"."""
    spans = (span.partition("-") for span in text.strip().split(",") if span)
    return {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}


def cpu_list(cpus: Iterable[int]) -> str:
    """Format a set of CPUs in the kernel's format."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and spans[-1][-1] == cpu - 1:
            spans[-1][1:] = [cpu]
        else:
            spans.append([cpu])
    return ",".join("-".join(map(str, span)) for span in spans)
