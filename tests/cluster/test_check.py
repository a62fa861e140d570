"""`check` on hosts with planted faults: each is named on the right node, and nowhere else."""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Node, Site, find
from tests.cluster.odd_hosts import a_key_it_does_not_know, with_rc_file
from tests.harness import ROOT, completed, distlaunch, distlaunch_argv, on_time, program
from tests.process.test_check import NCCL, NVML, library

NODES: list[Node] = ["host1", "host2", "host3"]
Words = Sequence[str]
Report = dict[str, Any]
AT_MOST_S = 10.0


def checked(site: Site, nodes: list[Node], *words: str, here: Words = (), **job: Any) -> tuple[int, Report]:
    """The exit status and the report of `check` with more `words`, run by the command `here`."""
    (site.directory / "worker.py").write_text("import torch\n")
    path = site.job(nodes, command=None, script="worker.py", **job)
    began = time.monotonic()
    done = completed([*here, *distlaunch_argv("check", str(path), "--json", *words)], cwd=ROOT)
    assert "Traceback" not in done.stderr, done.stderr
    if "--links" not in words:
        on_time("check", time.monotonic() - began, AT_MOST_S)
    return done.returncode, json.loads(done.stdout)


def found(report: Report) -> list[tuple[str, str, list[str]]]:
    """The level, part and nodes of each finding, except the load, since other tests keep the machine busy."""
    rows = [(each["level"], each["part"], each["nodes"]) for each in report["findings"]]
    return [row for row in rows if row[:2] != ("warning", "load")]


def only(level: str, part: str, hosts: list[str], answer: tuple[int, Report]) -> str:
    """What the only finding of a check says, which is of that level and part, and on these hosts."""
    status, report = answer
    assert (status, found(report)) == (int(level == "error"), [(level, part, hosts)])
    return str(next(each["what"] for each in report["findings"] if each["part"] == part))


def test_finds_nothing_on_sound_hosts(site: Site) -> None:
    status, report = checked(site, NODES)
    assert (status, found(report), report["differs"], report["unchecked"]) == (0, [], {}, [])
    fine = [text.partition(" (")[0] for text in report["fine"] if not text.startswith("load")]
    assert fine == ["reach", "place", "limits", "software", "devices", "network"]


def with_workdir(directory: Path, script: str) -> list[Node]:
    """Three hosts, of which the second has this script."""
    directory.mkdir()
    (directory / "worker.py").write_text(script)
    return ["host1", {"host": "host2", "workdir": str(directory)}, "host3"]


def test_names_a_script_that_differs_or_is_missing(site: Site, tmp_path: Path) -> None:
    nodes = with_workdir(tmp_path / "old", "print()")
    only("warning", "place", ["host2"], answer := checked(site, nodes))
    assert set(answer[1]["differs"]) == {"script"}
    (tmp_path / "old" / "worker.py").unlink()
    assert "can't read the script" in only("error", "place", ["host2"], checked(site, nodes))


def test_names_packages_and_versions_of_one_host(site: Site, tmp_path: Path) -> None:
    (torch := tmp_path / "lib" / "torch").mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text("__version__ = '2.1.0'\ncuda = None\n")
    odd: Node = {"host": "host3", "env": {"PYTHONPATH": str(tmp_path / "lib")}}
    what = only("warning", "software", ["host3"], checked(site, ["host1", "host2", odd]))
    assert what.startswith("torch differs: 2.1.0 instead of ")
    status, report = checked(site, with_workdir(tmp_path / "other", "import json, nonesuch.inner\n"))
    assert status == 1
    assert ("error", "software", ["host2"]) in found(report)
    assert "lacks nonesuch" in report["findings"][0]["what"]


def test_names_limits_and_settings_of_one_host(site: Site, tmp_path: Path) -> None:
    few = program(tmp_path / "few", f'ulimit -n 64; exec {sys.executable} "$@"')
    (tmp_path / "python3").symlink_to(os.path.realpath(sys.executable))
    bare = program(tmp_path / "bare", f'PATH=/nowhere exec {tmp_path}/python3 "$@"')
    nodes: list[Node] = [{"host": "host1", "python": few}, {"host": "host2", "python": bare}]
    nodes += [{"host": "host3", "env": {"GLOO_SOCKET_IFNAME": "wlan7"}}]
    status, report = checked(site, nodes)
    told = {(each["part"], *each["nodes"]): each["what"] for each in report["findings"]}
    assert (status, told["limits", "host2"]) == (1, "py-spy is not installed")
    expected = [("error", "network", ["host3"])]
    expected += [("warning", "limits", [host]) for host in ("host1", "host2")]
    assert sorted(row for row in found(report) if row[1] != "software") == sorted(expected)


def test_names_a_host_that_hangs_at_login(site: Site) -> None:
    answer = checked(site, ["host1", with_rc_file(site, "stuck", "cat >/dev/null"), "host3"])
    only("error", "reach", ["stuck"], answer)
    _, report = answer
    assert any(text.startswith("software") for text in report["fine"]), "the others are checked"
    assert report["unchecked"] == ["connections between stuck and the other nodes"]
    assert "network (the port is free, 2 connections between nodes)" in report["fine"]


def test_names_hosts_that_refuse_a_login_or_are_unknown_or_the_same(site: Site) -> None:
    a_key_it_does_not_know(site, "no-login")
    status, report = checked(site, ["no.invalid", "host1", "no-login", site.name("alias", "host1")])
    assert status == 1
    assert report["unchecked"] == ["the port, and connections between nodes: they need no.invalid"]
    told = {tuple(each["nodes"]): each["what"] for each in report["findings"] if each["part"] == "reach"}
    assert "nodes[3]: alias and host1 are the same host; remove one" in told.pop(())
    assert told == {("no.invalid",): "unknown host", ("no-login",): "authentication failed"}


def test_names_a_pair_that_cannot_connect(site: Site) -> None:
    address = site.bed.hosts["host2"].address
    with site.bed.rule("host3", "INPUT", "-p", "tcp", "--syn", "-s", address, "-j", "DROP"):
        what = only("error", "network", [], checked(site, NODES))
    assert "host3" in what and "can't be reached from host2" in what


def test_names_a_path_that_loses_large_packets(site: Site) -> None:
    source = site.bed.hosts["host2"].address
    large = ("-p", "tcp", "-s", source, "-m", "length", "--length", "1401:65535")
    with site.bed.rule("host3", "INPUT", *large, "-j", "DROP"):
        what = only("error", "network", [], answer := checked(site, NODES))
    assert what.startswith(f"host2 ({source}) can't be reached from host3: only small packets arrive")
    assert "lower the MTU of its interface" in [each["do"] for each in answer[1]["findings"]]


def test_names_a_host_whose_own_name_or_master_is_loopback(site: Site, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 host2\n")
    port = site.sshd("host2", over={Path("/etc/hosts"): hosts})
    odd: Node = {"host": site.name("host2-alone", "host2", port), "address": site.bed.hosts["host2"].address}
    what = only("warning", "network", ["host2-alone"], checked(site, ["host1", odd, "host3"]))
    assert what == "its own name, host2, resolves to 127.0.1.1"


def device_of(site: Site, host: str) -> str:
    rows = site.bed.inside(host, "ip", "-o", "-4", "addr").stdout.splitlines()
    (device,) = [row.split()[1] for row in rows if site.bed.hosts[host].address in row]
    return device


def test_names_the_host_with_another_mtu(site: Site) -> None:
    change = ("host2", "ip", "link", "set", device_of(site, "host2"), "mtu")
    site.bed.inside(*change, "1400", status=0)
    try:
        only("warning", "network", ["host2"], answer := checked(site, NODES))
    finally:
        site.bed.inside(*change, "1500", status=0)
    assert answer[1]["differs"] == {"MTU": {"host1": "1500", "host2": "1400", "host3": "1500"}}


def test_names_who_holds_the_port(site: Site) -> None:
    endpoint = f"{site.bed.hosts['host1'].address}:{site.server('host1', 'import signal; signal.pause()')}"
    what = only("error", "network", ["host1"], checked(site, NODES, rendezvous={"endpoint": endpoint}))
    assert "in use by python" in what


def test_names_a_host_without_the_python_of_the_job(site: Site) -> None:
    status, report = checked(site, ["host1", {"host": "host2", "python": "/nope/python3"}, "host3"])
    assert (status, {tuple(nodes) for _, _, nodes in found(report)}) == (1, {("host2",)})


def test_a_job_that_init_writes_for_hosts_passes_check(site: Site) -> None:
    (site.directory / "train.py").write_text("import torch\n")
    env, job = {**os.environ, "PYTHONPATH": str(ROOT)}, str(site.directory / "job.yaml")
    words = ["train.py", "-H", "host1,host2", "-n", "4", "--set", f"ssh.config={site.ssh_config.name}"]
    made = distlaunch("init", *words, cwd=site.directory, env=env, status=0)
    assert made.stderr == "distlaunch: looking at host1, host2\n"
    assert found(json.loads(distlaunch("check", job, "--json", status=0).stdout)) == []
    assert "4 ranks on 2 nodes" in distlaunch("dry-run", job, status=0).stdout


@contextmanager
def mounted(site: Site, host: str, target: Path, *words: str | Path) -> Iterator[Path]:
    """What is mounted at `target` by these words of mount, on one host only."""
    if not target.exists():
        target.mkdir()
    site.bed.inside(host, "mount", *map(str, words), str(target), status=0)
    try:
        yield target
    finally:
        site.bed.inside(host, "umount", str(target))


def test_names_disks_that_are_full_or_have_no_inodes_or_are_small(site: Site, tmp_path: Path) -> None:
    disk = ("-t", "tmpfs", "tmpfs", "-o")
    full, no_files, shm = tmp_path / "full", tmp_path / "no-files", Path("/dev/shm")
    places = (("host1", shm, "size=64m"), ("host2", full, "size=64k"), ("host3", no_files, "nr_inodes=2"))
    with ExitStack() as stack:
        for host, place, option in places:
            stack.enter_context(mounted(site, host, place, *disk, option))
        nodes: list[Node] = [{"host": host, "env": {"TMPDIR": str(place)}} for host, place, _ in places[1:]]
        status, report = checked(site, ["host1", *nodes])
    told = {each["what"]: each["nodes"] for each in report["findings"] if each["part"] == "place"}
    assert (status, {name for name, _, _ in found(report)}) == (0, {"warning"})
    assert told == {
        f"the disk with {full} has only 64 KiB free": ["host2"],
        f"the disk with {no_files} has room for only 1 file (inodes)": ["host3"],
        "/dev/shm has only 64 MiB": ["host1"],
    }


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("ro", "is not writable on this machine"),
        ("size=64k", "has only 64 KiB free on this machine"),
        ("nr_inodes=1", "has no inodes left on this machine"),
    ],
)
def test_names_a_run_directory_that_cannot_be_written(site: Site, option: str, words: str) -> None:
    (site.directory / "logs").mkdir()
    script = f'mount -t tmpfs -o {option} tmpfs "$0" && exec "$@"'
    here = ["unshare", "--mount", "sh", "-c", script, str(site.directory / "logs")]
    answer = checked(site, NODES, here=here, logs={"dir": "logs/runs"})
    assert only("error", "place", [], answer).endswith(words)


CLOCK = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec -= 3600;
    return failed;
}
"""
"""A stand-in for a host's clock: hosts of a testbed share the kernel's, which no namespace can shift."""


def test_names_a_host_whose_clock_is_off(site: Site) -> None:
    library(site.directory / "clock.so", CLOCK)
    port = site.sshd("host2", f"SetEnv LD_PRELOAD={site.directory}/clock.so")
    status, report = checked(site, ["host1", site.name("late", "host2", port), "host3"])
    (finding,) = [each for each in report["findings"] if "clock" in each["what"]]
    assert (status, finding["nodes"]) == (0, ["late"])
    assert finding["what"] == "the clock is 60 min behind this machine's"


def test_names_gpus_and_libraries_of_one_host(site: Site, tmp_path: Path) -> None:
    three = NVML.replace("handles[2] = {0, 1}", "handles[3]").replace("= 2;", "= 3;")
    library(tmp_path / "sound" / "libnvidia-ml.so.1", three.replace("? 0 : 3", "& 0"))
    library(tmp_path / "bad" / "libnvidia-ml.so.1", NVML)
    for name, version in (("one", "22703"), ("two", "21904")):
        library(tmp_path / name / "libnccl.so.2", NCCL.replace("NUMBER", version))
    xid = "[12.3] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus."
    dmesg = program(tmp_path / "dmesg", f'echo "{xid}"')

    def node(host: str, *directories: str) -> Node:
        path = ":".join(f"{tmp_path}/{name}" for name in directories)
        return {"host": host, "env": {"LD_LIBRARY_PATH": path}}

    nodes = [node("host1", "sound"), node("host2", "bad"), node("host3", "sound", "one", "two")]
    target = Path(completed(["sh", "-c", "command -v dmesg"]).stdout.strip())
    with mounted(site, "host2", target, "--bind", dmesg):
        status, report = checked(site, nodes, gpus_per_node=3, procs_per_node=1, backend="gloo")
    assert status == 1
    assert {tuple(nodes) for _, part, nodes in found(report) if part == "software"} == {("host3",)}
    told = [
        each["what"] for each in report["findings"] if each["nodes"] == ["host2"] and each["part"] != "load"
    ]
    assert [text.partition(", by ")[0] for text in told] == [
        "2 GPUs instead of 3",
        "GPU 0 has had 3 uncorrectable memory errors",
        "GPU 1 already has 40 GiB of 80 GiB in use",
        "GPU 1 is throttled (temperature)",
        "GPU 1 is divided (MIG)",
        "since the node started, its kernel has logged Xid 79 (0000:3b:00)",
        "the number or model of GPUs differs: 2 x Toy H100 instead of 3 x Toy H100",
    ]
    assert len(found(report)) == len(told) + 1


def test_names_two_hosts_with_one_address(site: Site) -> None:
    """As with two virtual machines, each behind a NAT."""
    inner = "172.30.0.9"
    with ExitStack() as stack:
        for host in ("host2", "host3"):
            own = site.bed.hosts[host].address
            subnet = f"{own.rpartition('.')[0]}.0/24"
            nat = ("-s", inner, "-j", "SNAT", "--to-source", own)
            stack.enter_context(site.bed.rule(host, "POSTROUTING", "-t", "nat", *nat))
            flush, add = "ip addr flush dev eth0", "ip addr add dev eth0"
            addresses = f"{flush} && {add} {inner}/32 && {add} {own}/24"
            script = f"{addresses} && ip route replace {subnet} dev eth0 src {inner}"
            stack.callback(site.bed.inside, host, "sh", "-c", f"{flush} && {add} {own}/24 brd +")
            site.bed.inside(host, "sh", "-c", script, status=0)
        status, report = checked(site, NODES)
    assert status == 1
    assert ("error", "network", ["host2", "host3"]) in found(report)
    whats = [each["what"] for each in report["findings"] if each["part"] == "network"]
    assert whats[-1] == f"have the same address, {inner}"
    assert whats[0] == "host1 can't reach host2, host3: Network is unreachable"


def test_names_code_that_differs(site: Site, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        place.mkdir()
        (place / "worker.py").write_text("import torch\n")
        (place / "uv.lock").write_text(place.name)
    (here / "model.py").touch()
    completed(["git", "init", "-q", here], status=0)
    completed(["git", "-C", here, "add", "model.py", "worker.py"], status=0)
    nodes: list[Node] = ["host1", {"host": "host2", "workdir": str(there)}]
    finding = only("warning", "code", ["host2"], checked(site, nodes, "--code", workdir=str(here)))
    assert finding == "2 of 3 files differ from those on this machine: uv.lock, model.py (missing)"


# Links


@pytest.mark.long
def test_names_a_slow_host(site: Site) -> None:
    """On a busy machine, other links may be slow, too."""
    tc, at = str(find("tc")), ("dev", device_of(site, "host2"), "root")
    slow = ("tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms")
    site.bed.inside("host2", tc, "qdisc", "add", *at, *slow, status=0)
    try:
        status, report = checked(site, [*NODES, "host4"], "--links")
    finally:
        site.bed.inside("host2", tc, "qdisc", "del", *at, status=0)
    assert (status, len(report["links"]["measurements"]) >= 6 + 2) == (0, True)
    assert ("warning", "links", ["host2"]) in found(report)


# What `run` checks by itself


def ran(site: Site, nodes: list[Node], *options: str) -> tuple[int, list[str], list[str]]:
    """Run a job whose ranks tell their interface: its exit status, what it says, and what ranks print."""
    worker = "import os; print(os.environ['RANK'], os.environ['GLOO_SOCKET_IFNAME'], flush=True)\n"
    (site.directory / "worker.py").write_text(worker)
    path = site.job(nodes, command=None, script="worker.py")
    done = distlaunch("run", str(path), *options, cwd=site.directory)
    said = [line for line in done.stderr.splitlines() if "no rank was seen to join" not in line]
    return done.returncode, said, sorted(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ({"workdir": "/missing"}, 127, "place: host2: the workdir /missing does not exist or"),
        ({"script": "other.py"}, 127, "place: host2: can't read the script "),
    ],
)
def test_run_ends_before_any_rank_starts_if_a_node_cannot_work(
    fault: dict[str, Any], status: int, words: str, site: Site
) -> None:
    ended, said, printed = ran(site, ["host1", {"host": "host2", **fault}, "host3"])
    assert (ended, printed) == (status, []), said
    assert [line.startswith(f"distlaunch: {words}") for line in said].count(True) == 1, said
    explained = distlaunch("why", cwd=site.directory, status=0).stdout
    assert "; to start the job anyway: --no-check [" in explained, explained


def test_run_says_the_rest_in_one_line_unless_nothing_is_checked(site: Site, tmp_path: Path) -> None:
    nodes = with_workdir(tmp_path / "old", "print('old')")
    ended, said, printed = ran(site, nodes)
    assert (ended, len(printed), len(said)) == (0, 3, 2)
    assert said[0].startswith("distlaunch: place: host2: the script differs · nodes would run different")
    ended, said, printed = ran(site, nodes, "--no-check")
    assert (ended, len(printed), len(said)) == (0, 3, 1)
    ended, said, _ = ran(site, ["host1", {"host": "host2", "workdir": "/missing"}], "--no-check")
    assert ended == 127
    assert said[0].startswith("distlaunch: rank 1 (host2) could not be started: /missing")


def test_exports_the_interface_over_which_all_nodes_reached_the_master(site: Site) -> None:
    """Each of two nodes has another network, which comes first by name and has the default route."""
    for number, host in enumerate(NODES[:2], 1):
        add = f"ip link add aaa0 type veth peer name bbb0; ip address add 10.9.{number}.1/24 dev aaa0"
        up = f"ip link set aaa0 up; ip link set bbb0 up; ip route add default via 10.9.{number}.9"
        site.bed.inside(str(host), "sh", "-ec", f"{add}; {up}", status=0)
    try:
        ended, said, printed = ran(site, NODES)
    finally:
        for host in NODES[:2]:
            site.bed.inside(str(host), "ip", "link", "delete", "aaa0")
    assert (ended, len(said)) == (0, 1)
    assert {line.split()[-1] for line in printed} == {"eth0"}
    (plan,) = site.directory.glob("runs/*/plan.json")
    first, other = (node["interface"] for node in json.loads(plan.read_text())["nodes"][:2])
    master = site.bed.hosts["host1"].address
    assert (first["name"], master in first["why"]) == ("eth0", True)
    assert other["why"].endswith(f"to MASTER_ADDR {master} uses it")


STOPS = """
import json, os, signal
def loads(text, parse=json.loads):
    step = parse(text)
    if "RANK" in os.environ and isinstance(step, dict) and step.get("test") == "pair":
        os.kill(os.getpid(), signal.SIGSTOP)
    return step
json.loads = loads
"""


@pytest.mark.long
def test_names_the_host_of_a_rank_that_stops(site: Site, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STOPS)
    odd: Node = {"host": "host3", "env": {"PYTHONPATH": str(tmp_path)}}
    with site.bed.emptied():
        status, report = checked(site, ["host1", "host2", odd, "host4"], "--links")
    # A busy machine may make links look slow, which is a warning of its own.
    (error,) = [each for each in report["findings"] if each["level"] == "error"]
    assert (status, error["part"], error["nodes"]) == (1, "links", ["host3"])
    assert error["what"] == "stopped answering in the link test"
