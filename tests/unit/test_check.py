"""The verdict of `check`: the meaning of facts, differences between nodes, and missing facts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent.messages import WorkerExited
from distlaunch.check.findings import GIB, NodeReport, Report, report
from distlaunch.launch.node_check import _answer
from distlaunch.plan.placement import Facts, make_plan
from distlaunch.supervisor.checking import expected
from tests.unit.samples import anything, bounded, spec_of

DISK = {"path": "/data", "size": 100 * GIB, "free": 50 * GIB, "files": 1 << 20, "writable": True}
GPU = {"name": "H100", "uuid": "GPU-1", "memory": 80 * GIB, "used": 0, "users": [], "ecc": 0, "mig": False}
SOUND: dict[str, Any] = {
    "place": {"workdir": "/data", "exists": True, "digest": "ab", "disks": {"workdir": DISK}},
    "limits": {"nofile": 65536, "memlock": -1, "nproc": -1},
    "software": {"python": "3.11.7", "torch": "2.13.0", "cuda": "13.0", "has_nccl": True, "missing": []},
    "devices": {"counted": True, "gpus": [GPU, GPU], "xids": []},
    "network": {
        "name": "b",
        "own": ["10.0.0.2"],
        "master": ["10.0.0.1"],
        "used": "eth0",
        "named": {},
        "ib": {},
    },
    "code": {"files": 3, "odd": []},
    "load": {"cpus": 8, "all_cpus": 8, "load": 0.5, "memory": 64 * GIB, "available": 60 * GIB, "swap": 0},
}


def with_facts(changes: dict[str, Any], facts: dict[str, Any] = SOUND) -> dict[str, Any]:
    """Facts in which the values at these dotted paths are others."""
    facts = {part: {**values} for part, values in facts.items()}
    for path, value in changes.items():
        part, _, key = path.partition(".")
        facts[part] = value if not key else {**facts[part], key: value}
    return facts


def verdict(
    changes: dict[str, Any], nodes: str = "[a, b, c]", skip: tuple[str, ...] = (), **fields: Any
) -> Report:
    """The verdict on nodes a, b and c, of which b has other facts."""
    spec = spec_of(f"command: [x]\nnodes: {nodes}\ngpus_per_node: 2\nbackend: nccl\n")
    plan = make_plan(spec, {index: Facts("/usr/bin/python3", 2) for index in range(3)})
    reports = []
    for number, name in enumerate("abc", 1):
        own = {"network.interfaces": {"eth0": {"address": f"10.0.0.{number}", "mtu": 1500}}}
        reports.append(NodeReport(name, facts=with_facts(own), clock_s=0.0, python="python3"))
    reports[1] = reports[1]._replace(facts=with_facts(changes, dict(reports[1].facts)), **fields)
    return report(expected(plan), reports, (), skip=skip)


def test_a_gpu_that_no_rank_uses_may_be_busy() -> None:
    found = verdict({"devices.gpus": [GPU, GPU, {**GPU, "used": 70 * GIB}]})
    assert not any("in use" in each.what for each in found.findings)


def test_a_disk_may_lack_both_space_and_inodes() -> None:
    found = verdict(disk(free=4096, files=0)).findings
    assert [each.what for each in found] == [
        "the disk with /data has only 4 KiB free",
        "the disk with /data has room for only 0 files (inodes)",
    ]


def test_finds_nothing_wrong_with_sound_nodes() -> None:
    found = verdict({})
    assert (found.findings, found.differs, found.unchecked, found.ok) == ((), {}, (), True)


def disk(name: str = "workdir", **facts: Any) -> dict[str, Any]:
    return {"place.disks": {name: {**DISK, **facts}}}


def gpu(**facts: Any) -> dict[str, Any]:
    """Facts about the second GPU."""
    return {"devices.gpus": [GPU, {**GPU, **facts}]}


FAULTS: list[tuple[dict[str, Any], str]] = [
    (disk(free=4096), "warning place: the disk with /data has only 4 KiB free"),
    (disk(files=3), "warning place: the disk with /data has room for only 3 files (inodes)"),
    (disk("shm", path="/dev/shm", size=64 << 20), "warning place: /dev/shm has only 64 MiB"),
    ({"place.unrecorded": "can't create a directory"}, "error place: can't create a directory"),
    ({"place.exists": False}, "error place: the workdir /data does not exist or can't be accessed"),
    ({"limits.nofile": 64}, "warning limits: only 64 open files are allowed"),
    (
        {"limits.memlock": 65536, "network.ib": {"mlx5_0:1": "ACTIVE"}},
        "warning limits: only 64 KiB of memory may be locked",
    ),
    ({"software.has_nccl": False}, "error software: torch 2.13.0 is built without CUDA, so it has no nccl"),
    (
        {"software.nccl": {"/a/libnccl.so.2": "2.27.3", "/b/libnccl.so.2": "2.19.4"}},
        "warning software: several NCCL libraries: 2.27.3 in /a/libnccl.so.2, 2.19.4 in /b/libnccl.so.2",
    ),
    ({"devices.gpus": [GPU]}, "error devices: 1 GPU instead of 2"),
    (
        gpu(used=40 * GIB, users=[[812, "python"]]),
        "warning devices: GPU 1 already has 40 GiB of 80 GiB in use, by python (pid 812)",
    ),
    (gpu(ecc=2), "warning devices: GPU 1 has had 2 uncorrectable memory errors"),
    (
        {"devices.xids": [["0000:3b:00", 79]]},
        "warning devices: since the node started, its kernel has logged Xid 79 (0000:3b:00)",
    ),
    ({"network.master": []}, "error network: can't resolve MASTER_ADDR a"),
    ({"network.master": ["127.0.0.1"]}, "error network: MASTER_ADDR a resolves to 127.0.0.1"),
    (
        {"network.named": {"NCCL_SOCKET_IFNAME": "=eth"}},
        "error network: NCCL_SOCKET_IFNAME==eth matches none of the interfaces (eth0)",
    ),
    ({"network.ib": {"mlx5_0:1": "DOWN"}}, "warning network: InfiniBand port mlx5_0:1 is DOWN"),
    ({"load.load": 40.0}, "warning load: a load of 40 on 8 CPUs"),
    ({"load.available": GIB}, "warning load: only 1 GiB of 64 GiB of memory is available"),
    (
        {"code.odd": ["uv.lock", "a.py (missing)"]},
        "warning code: 2 of 3 files differ from those on this machine: uv.lock, a.py (missing)",
    ),
]


@pytest.mark.parametrize(("changes", "words"), FAULTS, ids=[words for _, words in FAULTS])
def test_names_a_fault_on_the_node_that_has_it(changes: dict[str, Any], words: str) -> None:
    (finding,) = [each for each in verdict(changes).findings if "differs" not in each.what]
    assert f"{finding.level} {finding.part}: {finding.what}" == words
    assert finding.nodes == ("b",)


def test_leaves_out_parts_to_skip() -> None:
    found = verdict({"place.exists": False, "limits": "no answer"}, skip=("place", "limits"))
    assert (found.ok, found.findings, found.unchecked) == (True, (), ())
    assert not [text for text in found.fine if text.startswith("place")]


def test_names_a_clock_that_is_off_and_two_nodes_with_one_address() -> None:
    (finding,) = verdict({}, clock_s=-3600.0).findings
    assert finding.line.startswith("load: b: the clock is 60 min behind this machine's")
    (finding,) = verdict({"network.interfaces": {"eth0": {"address": "10.0.0.1", "mtu": 1500}}}).findings
    assert (finding.what, finding.nodes) == ("have the same address, 10.0.0.1", ("a", "b"))


def test_differences_show_each_value() -> None:
    found = verdict({"software.torch": "2.12.1", "load.cpus": 4})
    torch = {"a": "2.13.0", "b": "2.12.1", "c": "2.13.0"}
    assert found.differs == {"torch": torch, "CPUs": {"a": "8", "b": "4", "c": "8"}}
    (finding,) = found.findings
    assert (finding.what, finding.nodes) == ("torch differs: 2.12.1 instead of 2.13.0", ("b",))


def test_gpus_may_differ_as_the_job_says() -> None:
    one = {"devices.gpus": [GPU]}
    assert verdict(one, nodes="[a, {host: b, gpus: 1}, c]").findings == ()
    what = "the number or model of GPUs differs: 1 x H100 instead of 2 x H100"
    assert what in [each.what for each in verdict(one).findings]


def test_scripts_may_differ_as_the_job_says() -> None:
    other = {"place.digest": "cd"}
    assert [each.do for each in verdict(other).findings] == ["copy it to all nodes, or set sync: true"]
    assert verdict(other, nodes="[a, {host: b, script: y.py}, c]").findings == ()


def test_does_not_advise_sync_if_mpirun_starts_the_ranks() -> None:
    plan = make_plan(spec_of("command: [x]\nlauncher: mpirun\n"), {0: Facts("/usr/bin/python3", 0)})
    reports = [NodeReport("node0", facts=with_facts({"place.exists": False}))]
    (finding,) = report(expected(plan), reports, ()).findings
    assert finding.do == "set workdir or copy it to the node"


def test_what_could_not_be_checked_is_not_called_fine() -> None:
    found = verdict({"devices": "no answer within 4 s"})
    assert (found.findings, found.unchecked) == ((), ("devices of b: no answer within 4 s",))
    assert not [text for text in found.fine if text.startswith("devices")]
    assert found.ok


def test_a_node_that_cannot_be_reached_has_no_other_findings() -> None:
    found = verdict({"limits.nofile": 3}, failure="unknown host", advice="check the name")
    (finding,) = found.findings
    assert finding.line == "reach: b: unknown host · its ranks can't start · check the name"
    assert not found.ok


KEYS = [f"{part}.{key}" for part, facts in SOUND.items() for key in (*facts, "interfaces", "nccl")]


@bounded()
@given(st.dictionaries(st.sampled_from([*SOUND, *KEYS]), anything, max_size=6))
def test_answers_of_any_type_are_survived(changes: dict[str, Any]) -> None:
    first = {path: value for path, value in changes.items() if "." not in path}
    rest = {path: value for path, value in changes.items() if path.partition(".")[0] not in first}
    verdict({**first, **rest}).document()


@pytest.mark.parametrize("printed", ["[" * 100_000, f'{{"time": 1{"0" * 400}}}'], ids=["deep", "late"])
def test_output_that_no_probe_prints_is_survived(printed: str) -> None:
    answer = _answer((WorkerExited(0, 0, 0, 0.0), printed.encode()), "python3", 0.0)
    assert report(None, [NodeReport("b", **answer)], ()).ok
