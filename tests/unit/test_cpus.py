"""Assignment of CPUs to workers, on made-up machines: sockets, NUMA nodes, SMT siblings, caches, GPUs."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent.cpus import BindingError, Machine, assign, cpu_list, cpu_set, shares
from distlaunch.agent.messages import Binding, StartWorkers, WorkerSpec
from tests.unit.samples import bounded


class Tree(NamedTuple):
    """A machine. `nodes` are the NUMA nodes' CPUs, `siblings`, `caches` and `sockets` groups of CPUs."""

    nodes: Sequence[str]
    siblings: Sequence[str] = ()
    caches: Sequence[str] = ()
    sockets: Sequence[str] = ()
    gpus: Sequence[tuple[str, int]] = ()
    distances: Sequence[str] = ()
    offline: str = ""

    @property
    def cpus(self) -> set[int]:
        """The CPUs that are online."""
        return set().union(*map(cpu_set, self.nodes))

    def write(self, root: Path) -> Path:
        """Make its files below `root`, as Linux lays them out."""
        system = root / "sys/devices/system"
        for number, cpus in enumerate(self.nodes):
            put(system / f"node/node{number}/cpulist", cpus)
        for number, words in enumerate(self.distances):
            put(system / f"node/node{number}/distance", words)
        put(system / "node/online", cpu_list(range(len(self.nodes))))
        for cpu in self.cpus:
            self._write_cpu(system / f"cpu/cpu{cpu}", cpu)
        for cpu in cpu_set(self.offline):
            put(system / f"cpu/cpu{cpu}/online", "0")
        for address, node in self.gpus:
            put(root / f"sys/bus/pci/devices/{address}/numa_node", str(node))
            information = f"Model: \t\t H\nGPU UUID: \t GPU-{address[5:7]}-x\n"
            put(root / f"proc/driver/nvidia/gpus/{address}/information", information)
        return root

    def _write_cpu(self, directory: Path, cpu: int) -> None:
        put(directory / "topology/thread_siblings_list", holding(self.siblings, cpu))
        socket = next((i for i, cpus in enumerate(self.sockets) if cpu in cpu_set(cpus)), 0)
        put(directory / "topology/physical_package_id", str(socket))
        caches = [("1", "Data", str(cpu)), ("1", "Instruction", str(cpu))]
        caches += [("3", "Unified", holding(self.caches, cpu))] if self.caches else []
        for index, (level, kind, sharing) in enumerate(caches):
            for name, value in (("level", level), ("type", kind), ("shared_cpu_list", sharing)):
                put(directory / f"cache/index{index}/{name}", value)


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def holding(groups: Sequence[str], cpu: int) -> str:
    return next((cpus for cpus in groups if cpu in cpu_set(cpus)), str(cpu))


SMALL = Tree(["0-3"])
# 2 sockets of 2 NUMA nodes, each with 4 cores of 2 threads, whose siblings are numbered 16 higher; pairs of
# cores share a cache; 2 GPUs at each of 0, 1 and 3, whose addresses are neither in order nor equally long.
BIG = Tree(
    nodes=["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"],
    siblings=[f"{cpu},{cpu + 16}" for cpu in range(16)],
    caches=[f"{cpu}-{cpu + 1},{cpu + 16}-{cpu + 17}" for cpu in range(0, 16, 2)],
    sockets=["0-7,16-23", "8-15,24-31"],
    gpus=[
        *(("10000:01:00.0", 3), ("0000:3b:00.0", 0), ("0000:af:00.0", 1)),
        *(("0000:0b:00.0", 0), ("0000:b0:00.0", 1), ("0000:ff:00.0", 3)),
    ],
)
NODE = dict(enumerate(BIG.nodes))
PAIRS = ["0-1,16-17", "2-3,18-19", "4-5,20-21", "6-7,22-23", "12-13,28-29", "14-15,30-31"]
# Even CPUs on one socket, odd ones on the other.
WOVEN = Tree(["0,2,4,6", "1,3,5,7"], sockets=["0,2,4,6", "1,3,5,7"])
# The GPUs' memory is a NUMA node of its own; node 2 is nearer to it than node 0.
MEMORY_ONLY = Tree(
    ["0-3", "", "4-7"], gpus=[("0000:01:00.0", 1)], distances=["10 40 20", "40 10 15", "20 15 10"]
)
SILENT_GPUS = Tree(["0-3", "4-7"], gpus=[("0000:01:00.0", -1), ("0000:02:00.0", -1)])
HALF_OFFLINE = Tree(["0-1", "4-7"], siblings=["0-1", "4-5", "6-7"], offline="2-3")
HYBRID = Tree(["0-7"], siblings=["0-1", "2-3"], caches=["0-1", "2-3", "4-7"])
ONE_NODE_TWO_SOCKETS = Tree(["0-7"], sockets=["0-3", "4-7"])


def wish(how: str, gpus: int = 0, cpus: Sequence[str] = ()) -> Binding:
    return Binding(how, gpus, tuple(cpus))


def given_to(
    root: Path, tree: Tree, binding: Binding, workers: int, allowed: str = "", visible: str | None = None
) -> list[str]:
    machine = Machine(cpu_set(allowed) if allowed else tree.cpus, str(tree.write(root)))
    return [cpu_list(cpus) for cpus in shares(binding, workers, machine, visible)]


@pytest.mark.parametrize(
    ("tree", "how", "gpus", "workers", "expected"),
    [
        pytest.param(SMALL, "node", 0, 2, ["0-3"] * 2, id="one node"),
        pytest.param(BIG, "node", 6, 6, [NODE[0]] * 2 + [NODE[1]] * 2 + [NODE[3]] * 2, id="the GPUs' nodes"),
        pytest.param(BIG, "node", 0, 4, BIG.nodes, id="CPU workers over all nodes"),
        pytest.param(BIG, "node", 0, 2, [NODE[0], NODE[2]], id="two CPU workers far apart"),
        pytest.param(BIG, "node", 0, 6, [NODE[i] for i in (0, 0, 1, 2, 2, 3)], id="more CPU workers"),
        pytest.param(BIG, "node", 2, 4, [NODE[0], NODE[0], NODE[2], NODE[3]], id="GPUs and more workers"),
        pytest.param(MEMORY_ONLY, "node", 1, 1, ["4-7"], id="the nearest to a node without CPUs"),
        pytest.param(SILENT_GPUS, "node", 2, 2, ["0-3", "4-7"], id="GPUs whose node is not told"),
        pytest.param(SMALL, "node", 4, 4, ["0-3"] * 4, id="GPUs that are not listed"),
        pytest.param(HALF_OFFLINE, "node", 0, 3, ["0-1", "4-7", "4-7"], id="offline CPUs"),
        pytest.param(BIG, "socket", 6, 6, ["0-7,16-23"] * 4 + ["8-15,24-31"] * 2, id="sockets"),
        pytest.param(WOVEN, "socket", 0, 2, ["0,2,4,6", "1,3,5,7"], id="woven sockets"),
        pytest.param(ONE_NODE_TWO_SOCKETS, "socket", 0, 2, ["0-7"] * 2, id="sockets that share a node"),
        pytest.param(BIG, "exclusive", 6, 6, PAIRS, id="whole cores for each GPU"),
        pytest.param(BIG, "exclusive", 6, 1, ["0-1,16-17"], id="the shares of other GPUs stay free"),
        pytest.param(SMALL, "exclusive", 0, 3, ["0-1", "2", "3"], id="cores that are left over"),
        pytest.param(HALF_OFFLINE, "exclusive", 0, 3, ["0-1", "4-5", "6-7"], id="uneven nodes"),
        pytest.param(BIG, "core-complex", 6, 6, PAIRS, id="a cache each"),
        pytest.param(HYBRID, "core-complex", 0, 4, ["4-7", "0-1", "2-3", "4-7"], id="the largest first"),
        pytest.param(BIG._replace(caches=()), "core-complex", 0, 2, ["0", "8"], id="private caches"),
        pytest.param(BIG, "cores", 6, 2, ["0-7,16-23", "8-15,24-31"], id="a share of all cores"),
        pytest.param(BIG, "cores", 6, 3, ["0-5,16-21", "6-10,22-26", "11-15,27-31"], id="not divisible"),
        pytest.param(WOVEN, "cores", 0, 2, ["0,2,4,6", "1,3,5,7"], id="shares follow the nodes"),
    ],
)
def test_assigns_cpus_to_workers(
    tmp_path: Path, tree: Tree, how: str, gpus: int, workers: int, expected: list[str]
) -> None:
    assert given_to(tmp_path, tree, wish(how, gpus), workers) == list(expected)


@pytest.mark.parametrize(
    ("how", "allowed", "expected"),
    [
        ("node", "0-1,17", ["0-1,17"] * 2),
        ("node", "5-9", ["5-7"] * 2),  # the nearest node that is left
        ("socket", "0,7,8", ["0,7"] * 2),
        ("exclusive", "0-1,17", ["0", "1,17"]),
        ("core-complex", "0-2,17", ["0-1,17", "2"]),
        ("cores", "3-4,19", ["3,19", "4"]),
    ],
)
def test_assigns_only_cpus_of_the_agent(tmp_path: Path, how: str, allowed: str, expected: list[str]) -> None:
    near = BIG._replace(distances=["10 12 32 32", "12 10 32 32", "32 32 10 12", "32 32 12 10"])
    assert given_to(tmp_path, near, wish(how, 2), 2, allowed) == expected


@pytest.mark.parametrize(
    ("visible", "nodes"),
    [
        pytest.param(None, [0, 0, 1], id="none"),
        pytest.param("4,0,2", [3, 0, 1], id="numbers"),
        pytest.param(" 3 , 5", [1, 3, 2], id="the third is not visible, so it is spread"),
        pytest.param("GPU-b0-x,GPU-ff,GPU-3b-x", [1, 3, 0], id="UUIDs, whole and begun"),
        pytest.param("MIG-1,GPU-77,", [0, 1, 2], id="what can't be found is spread"),
    ],
)
def test_follows_cuda_visible_devices(tmp_path: Path, visible: str | None, nodes: list[int]) -> None:
    found = given_to(tmp_path, BIG, wish("node", 3), 3, visible=visible)
    assert found == [NODE[node] for node in nodes]


@pytest.mark.parametrize(
    ("one_device", "wanted"), [(False, NODE[3]), (True, NODE[1])], ids=["its own", "of all workers"]
)
def test_one_visible_device_per_worker_is_found_by_the_workers_own_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_device: bool, wanted: str
) -> None:
    root = str(BIG.write(tmp_path))
    monkeypatch.setattr("distlaunch.agent.cpus.Machine", lambda allowed: Machine(BIG.cpus, root))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    worker = WorkerSpec(0, ("/bin/true",), "/", (), {}, {}, one_device, ())
    start = StartWorkers(0, "id", 1.0, 1.0, {"CUDA_VISIBLE_DEVICES": "4"}, (worker,))
    assert [spec.cpus for spec in assign(start, wish("node", 1))] == [wanted]


def test_without_numa_in_the_kernel_all_cpus_are_one_node(tmp_path: Path) -> None:
    machine = Machine({0, 1, 2, 3}, str(tmp_path))
    for how in ("node", "socket", "core-complex"):
        assert shares(wish(how), 2, machine) == [{0, 1, 2, 3}] * 2
    for how in ("exclusive", "cores"):
        assert shares(wish(how), 2, machine) == [{0, 1}, {2, 3}]


def test_assigns_listed_cpus_or_says_which_a_node_lacks(tmp_path: Path) -> None:
    assert given_to(tmp_path, SMALL, wish("listed", cpus=["0,2", "1-2", "3"]), 2) == ["0,2", "1-2"]
    listed = wish("listed", cpus=["0", "3-5,9"])
    few = "need a core each, but have only 4; use fewer, or another binding, or request"
    for binding, workers, words in (
        (listed, 2, "cpu_binding lists CPU 4-5,9, but this node has only 0-3 available; list others"),
        (wish("cores"), 5, f"cpu_binding: 5 workers on a node {few}"),
        (wish("exclusive", 8), 1, f"numa_binding: 8 GPUs or workers on NUMA node 0 {few}"),
    ):
        with pytest.raises(BindingError) as caught:
            given_to(tmp_path, SMALL, binding, workers)
        assert caught.value.args[0].startswith(words)


@given(st.sets(st.integers(0, 300)))
@bounded()
def test_lists_of_cpus_are_read_as_they_are_written(cpus: set[int]) -> None:
    assert cpu_set(cpu_list(cpus)) == cpus


# Properties


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any machine: CPUs in any order over nodes, in cores and caches that stay within a node."""
    cpus = draw(st.permutations(range(draw(st.integers(1, 16)))))
    cuts = sorted(draw(st.lists(st.integers(0, len(cpus)), max_size=4)))
    nodes = [cpus[start:end] for start, end in zip([0, *cuts], [*cuts, len(cpus)], strict=True)]
    threads, cached, per_socket = (draw(st.integers(1, 4)) for _ in range(3))
    places = draw(st.lists(st.integers(-1, len(nodes)), max_size=8))

    def runs_of(length: int) -> list[str]:
        return [cpu_list(cpus[i : i + length]) for cpus in nodes for i in range(0, len(cpus), length)]

    return Tree(
        nodes=[cpu_list(node) for node in nodes],
        siblings=runs_of(threads),
        caches=runs_of(cached),
        sockets=[cpu_list(set().union(*nodes[i : i + per_socket])) for i in range(0, len(nodes), per_socket)],
        gpus=[(f"0000:{i:02x}:00.0", node) for i, node in enumerate(places)],
    )


@given(
    tree=trees(),
    how=st.sampled_from(["node", "socket", "exclusive", "core-complex", "cores"]),
    gpus=st.integers(0, 8),
    workers=st.integers(1, 8),
    data=st.data(),
)
@bounded()
def test_every_worker_gets_allowed_cpus_and_exclusive_ones_never_overlap(
    tree: Tree, how: str, gpus: int, workers: int, data: st.DataObject
) -> None:
    allowed = data.draw(st.sets(st.sampled_from(sorted(tree.cpus)), min_size=1))
    with TemporaryDirectory() as root:
        machine = Machine(allowed, str(tree.write(Path(root))))
        cores = [cpus for _, cpus in machine.cores]
        try:
            given_out = shares(wish(how, gpus), workers, machine)
        except BindingError:
            assert how in ("exclusive", "cores")
            # Without GPUs, which may all be in one place, there is enough when there is a core for each.
            assert len(cores) < workers or gpus
            return
    assert len(given_out) == workers
    assert all(cpus and cpus <= allowed for cpus in given_out)
    if how in ("exclusive", "cores"):
        assert sum(map(len, given_out)) == len(set().union(*given_out))
        assert all(core <= cpus for cpus in given_out for core in cores if core & cpus)
