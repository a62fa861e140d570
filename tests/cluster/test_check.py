"""`check` on hosts with planted faults: each is named on the right node, and nowhere else."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Node, Site
from tests.harness import distlaunch, program

NODES: list[Node] = ["host1", "host2", "host3"]


def checked(site: Site, nodes: list[Node] | None = None, **job: Any) -> tuple[int, dict[str, Any]]:
    (site.folder / "worker.py").write_text("import torch\n")
    path = site.job(nodes or NODES, **job)
    document = {**json.loads(path.read_text()), "script": "worker.py"}
    path.write_text(json.dumps({key: value for key, value in document.items() if key != "command"}))
    done = distlaunch("check", str(path), "--json")
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def found(report: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """The level, part and nodes of each finding, except the load, since other tests keep the machine busy."""
    rows = [(each["level"], each["part"], each["nodes"]) for each in report["findings"]]
    return [row for row in rows if row[:2] != ("warning", "load")]


def test_finds_nothing_on_sound_hosts(site: Site) -> None:
    status, report = checked(site)
    assert (status, found(report), report["differs"], report["unchecked"]) == (0, [], {}, [])
    fine = [text.partition(" (")[0] for text in report["fine"] if not text.startswith("load")]
    assert fine == ["reach", "place", "limits", "software", "devices", "network"]


def with_workdir(folder: Path, script: str | None) -> dict[str, Any]:
    folder.mkdir()
    if script is not None:
        (folder / "worker.py").write_text(script)
    return {"host": "host2", "workdir": str(folder)}


def test_names_a_script_that_differs_or_is_missing(site: Site, tmp_path: Path) -> None:
    status, report = checked(site, ["host1", with_workdir(tmp_path / "old", "print()"), "host3"])
    assert (status, found(report)) == (0, [("warning", "place", ["host2"])])
    assert set(report["differs"]) == {"script"}
    status, report = checked(site, ["host1", with_workdir(tmp_path / "empty", None), "host3"])
    assert (status, found(report)) == (1, [("error", "place", ["host2"])])
    assert "can't read the script" in report["findings"][0]["what"]


def test_names_packages_and_versions_of_one_host(site: Site, tmp_path: Path) -> None:
    (tmp_path / "lib" / "torch").mkdir(parents=True)
    (tmp_path / "lib" / "torch" / "__init__.py").touch()
    (tmp_path / "lib" / "torch" / "version.py").write_text("__version__ = '2.1.0'\ncuda = None\n")
    odd: Node = {"host": "host3", "env": {"PYTHONPATH": str(tmp_path / "lib")}}
    status, report = checked(site, ["host1", "host2", odd])
    assert (status, found(report)) == (0, [("warning", "software", ["host3"])])
    assert report["findings"][0]["what"].startswith("torch differs: 2.1.0 instead of ")
    odd = with_workdir(tmp_path / "other", "import json, nonesuch.inner\n")
    status, report = checked(site, ["host1", odd, "host3"])
    assert status == 1
    assert ("error", "software", ["host2"]) in found(report)
    assert "lacks nonesuch" in report["findings"][0]["what"]


def test_names_limits_and_settings_of_one_host(site: Site, tmp_path: Path) -> None:
    few = program(tmp_path / "few", '#!/bin/sh\nulimit -n 64\nexec python3 "$@"\n')
    status, report = checked(site, ["host1", {"host": "host2", "python": few}, "host3"])
    assert ("warning", "limits", ["host2"]) in found(report)
    odd: Node = {"host": "host3", "env": {"NCCL_SOCKET_IFNAME": "wlan7", "TMPDIR": "/proc"}}
    status, report = checked(site, ["host1", "host2", odd])
    assert status == 1
    assert found(report) == [("error", "network", ["host3"]), ("warning", "place", ["host3"])]


def test_names_a_host_that_does_not_answer_and_checks_the_others(site: Site) -> None:
    with site.bed.rule("host2", "INPUT", "-p", "tcp", "--dport", "22", "-j", "DROP"):
        status, report = checked(site)
    assert (status, found(report)) == (1, [("error", "reach", ["host2"])])
    assert any(text.startswith("software") for text in report["fine"])


def test_names_a_pair_that_cannot_connect(site: Site) -> None:
    address = site.bed.hosts["host2"].address
    with site.bed.rule("host3", "INPUT", "-p", "tcp", "--syn", "-s", address, "-j", "DROP"):
        status, report = checked(site)
    assert (status, found(report)) == (1, [("error", "network", [])])
    assert "host3" in (what := report["findings"][0]["what"])
    assert "can't be reached from host2" in what


def test_names_a_host_whose_own_name_or_master_is_loopback(site: Site, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 host2\n")
    port = site.sshd("host2", over={Path("/etc/hosts"): hosts})
    odd: Node = {"host": site.name("host2-alone", "host2", port), "address": site.bed.hosts["host2"].address}
    status, report = checked(site, ["host1", odd, "host3"])
    assert (status, found(report)) == (0, [("warning", "network", ["host2-alone"])])
    assert report["findings"][0]["what"] == "its own name, host2, means 127.0.1.1"


@contextmanager
def mtu(site: Site, host: str, size: int) -> Iterator[None]:
    rows = site.bed.inside(host, "ip", "-o", "-4", "addr").stdout.splitlines()
    (device,) = [row.split()[1] for row in rows if site.bed.hosts[host].address in row]

    def change(to: int) -> None:
        done = site.bed.inside(host, "ip", "link", "set", device, "mtu", str(to))
        assert done.returncode == 0, done.stderr

    change(size)
    try:
        yield
    finally:
        change(1500)


def test_names_the_host_with_another_mtu(site: Site) -> None:
    with mtu(site, "host2", 1400):
        status, report = checked(site)
    assert (status, found(report)) == (0, [("warning", "network", ["host2"])])
    assert report["differs"] == {"MTU": {"host1": "1500", "host2": "1400", "host3": "1500"}}


def test_names_who_holds_the_port(site: Site) -> None:
    endpoint = f"{site.bed.hosts['host1'].address}:{site.server('host1', 'import signal; signal.pause()')}"
    status, report = checked(site, rendezvous={"endpoint": endpoint})
    assert (status, found(report)) == (1, [("error", "network", ["host1"])])
    assert "in use by python" in report["findings"][0]["what"]


def test_names_a_host_without_the_python_of_the_job(site: Site) -> None:
    status, report = checked(site, ["host1", {"host": "host2", "python": "/nope/python3"}, "host3"])
    assert (status, {tuple(nodes) for _, _, nodes in found(report)}) == (1, {("host2",)})


# What `run` checks by itself

READ_ONLY = "for p in /tmp /var/tmp /dev/shm; do mount --bind $p $p; mount -o remount,bind,ro $p; done"


def ran(site: Site, nodes: list[Node], *options: str, **job: Any) -> tuple[int, list[str], list[str]]:
    """Run a job whose ranks tell their interface: its exit status, what it says, and what ranks print."""
    worker = "import os; print(os.environ['RANK'], os.environ['GLOO_SOCKET_IFNAME'], flush=True)\n"
    (site.folder / "worker.py").write_text(worker)
    document = json.loads(site.job(nodes, script="worker.py", **job).read_text())
    path = site.folder / "job.yaml"
    path.write_text(json.dumps({key: value for key, value in document.items() if key != "command"}))
    done = distlaunch("run", str(path), *options, cwd=site.folder)
    return done.returncode, done.stderr.splitlines(), sorted(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ({"workdir": "/missing"}, 127, "place: host2: the workdir /missing does not exist · no rank"),
        ({"script": "other.py"}, 127, "place: host2: can't read the script "),
        ({"env": {"GLOO_SOCKET_IFNAME": "wlan7"}}, 2, "network: host2: GLOO_SOCKET_IFNAME=wlan7: no such"),
    ],
    ids=["workdir", "script", "interface"],
)
def test_run_ends_before_any_rank_starts_if_a_node_cannot_work(
    fault: dict[str, Any], status: int, words: str, site: Site
) -> None:
    odd: Node = {"host": "host2", **fault}
    ended, said, printed = ran(site, ["host1", odd, "host3"])
    assert (ended, printed) == (status, []), said
    assert [line.startswith(f"distlaunch: {words}") for line in said].count(True) == 1, said


def test_run_names_a_node_with_fewer_gpus_than_the_job_says(site: Site) -> None:
    port = site.sshd("host2", "SetEnv CUDA_VISIBLE_DEVICES=0,1")
    name, address = site.name("fewer", "host2", port), site.bed.hosts["host2"].address
    odd: Node = {"host": name, "address": address, "gpus": 4}
    ended, said, printed = ran(site, ["host1", odd], procs_per_node=4, backend="gloo")
    assert (ended, printed) == (2, [])
    assert said[0].startswith("distlaunch: devices: fewer: 2 GPUs instead of 4 · some ranks have none"), said


def test_run_names_a_node_without_room_for_error_records(site: Site, tmp_path: Path) -> None:
    inside = f"unshare --mount sh -c '{READ_ONLY}; exec \"$@\"' sh"
    enter = f'host=$1; shift\n[ $host = host1 ] || set -- {inside} "$@"\n'
    enter += f'exec {shlex.join(site.bed.argv("exec"))} $host -- "$@"\n'
    command = [program(tmp_path / "enter", enter), "{host}"]
    nodes: list[Node] = [{"host": host, "address": site.bed.hosts[host].address} for host in NODES[:2]]
    ended, said, printed = ran(site, nodes, "--set", "ssh=null", launcher={"command": command})
    assert (ended, printed) == (126, [])
    words = "place: host2: can't create a directory for error records in /tmp: Read-only file system; "
    assert said[0].startswith(f"distlaunch: {words}"), said


def test_run_says_the_rest_in_one_line_unless_nothing_is_checked(site: Site, tmp_path: Path) -> None:
    odd = with_workdir(tmp_path / "old", "print('old')")
    ended, said, printed = ran(site, ["host1", odd, "host3"])
    assert (ended, len(printed), len(said)) == (0, 3, 2)
    assert said[0].startswith("distlaunch: place: host2: the script differs · nodes would run different")
    ended, said, printed = ran(site, ["host1", odd, "host3"], "--no-check")
    assert (ended, len(printed), len(said)) == (0, 3, 1)
    ended, said, _ = ran(site, ["host1", {"host": "host2", "workdir": "/missing"}], "--no-check")
    assert ended == 127
    assert said[0].startswith("distlaunch: rank 1 (host2) could not be started: /missing")


def test_exports_the_interface_over_which_all_nodes_reached_the_master(site: Site) -> None:
    """Each of two nodes has another network, which comes first by name and has the default route."""
    for number, host in enumerate(NODES[:2], 1):
        add = f"ip link add aaa0 type veth peer name bbb0; ip address add 10.9.{number}.1/24 dev aaa0"
        up = f"ip link set aaa0 up; ip link set bbb0 up; ip route add default via 10.9.{number}.9"
        assert site.bed.inside(str(host), "sh", "-ec", f"{add}; {up}").returncode == 0
    try:
        ended, said, printed = ran(site, NODES)
    finally:
        for host in NODES[:2]:
            site.bed.inside(str(host), "ip", "link", "delete", "aaa0")
    assert (ended, len(said)) == (0, 1)
    assert {line.split()[-1] for line in printed} == {"eth0"}
    (plan,) = site.folder.glob("runs/*/plan.json")
    first, other = (node["interface"] for node in json.loads(plan.read_text())["nodes"][:2])
    master = site.bed.hosts["host1"].address
    assert (first["name"], master in first["why"]) == ("eth0", True)
    assert other["why"].endswith(f"to MASTER_ADDR {master} uses it")
