"""`check` on hosts with planted faults: each is named on the right node, and nowhere else."""

import json
import os
import shlex
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
AT_MOST_S = 10.0


def checked(
    site: Site,
    nodes: list[Node] | None = None,
    words: Sequence[str] = (),
    here: Sequence[str] = (),
    **job: Any,
) -> tuple[int, dict[str, Any]]:
    """The exit status and the report of `check` with more `words`, run by the command `here`."""
    (site.directory / "worker.py").write_text("import torch\n")
    path = site.job(nodes or NODES, **job)
    document = {**json.loads(path.read_text()), "script": "worker.py"}
    path.write_text(json.dumps({key: value for key, value in document.items() if key != "command"}))
    began = time.monotonic()
    done = completed([*here, *distlaunch_argv("check", str(path), "--json", *words)], cwd=ROOT)
    assert "Traceback" not in done.stderr, done.stderr
    if "--links" not in words:
        on_time("check", time.monotonic() - began, AT_MOST_S)
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


def with_workdir(directory: Path, script: str | None) -> dict[str, Any]:
    directory.mkdir()
    if script is not None:
        (directory / "worker.py").write_text(script)
    return {"host": "host2", "workdir": str(directory)}


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
    (tmp_path / "python3").symlink_to(os.path.realpath(sys.executable))
    bare = program(tmp_path / "bare", f'PATH=/nowhere exec {tmp_path}/python3 "$@"')
    status, report = checked(site, ["host1", {"host": "host2", "python": bare}, "host3"])
    assert [each["what"] for each in report["findings"] if each["part"] == "limits"] == [
        "py-spy is not installed"
    ]
    odd: Node = {"host": "host3", "env": {"GLOO_SOCKET_IFNAME": "wlan7", "TMPDIR": "/proc"}}
    status, report = checked(site, ["host1", "host2", odd])
    assert status == 1
    assert found(report) == [("error", "network", ["host3"]), ("warning", "place", ["host3"])]


def test_names_a_host_that_does_not_answer_and_checks_the_others(site: Site) -> None:
    with site.bed.rule("host2", "INPUT", "-p", "tcp", "--dport", "22", "-j", "DROP"):
        status, report = checked(site)
    assert (status, found(report)) == (1, [("error", "reach", ["host2"])])
    assert any(text.startswith("software") for text in report["fine"])
    assert report["unchecked"] == ["connections between host2 and the other nodes"]
    assert "network (the port is free, 2 connections between nodes)" in report["fine"]


def test_names_a_host_that_hangs_at_login(site: Site) -> None:
    status, report = checked(site, ["host1", with_rc_file(site, "stuck", "cat >/dev/null"), "host3"])
    assert (status, found(report)) == (1, [("error", "reach", ["stuck"])])


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
        status, report = checked(site)
    assert (status, found(report)) == (1, [("error", "network", [])])
    assert "host3" in (what := report["findings"][0]["what"])
    assert "can't be reached from host2" in what


def test_names_a_path_that_loses_large_packets(site: Site) -> None:
    source = site.bed.hosts["host2"].address
    large = ("-p", "tcp", "-s", source, "-m", "length", "--length", "1401:65535")
    with site.bed.rule("host3", "INPUT", *large, "-j", "DROP"):
        status, report = checked(site)
    assert (status, found(report)) == (1, [("error", "network", [])])
    what = report["findings"][0]["what"]
    assert what.startswith(f"host2 ({source}) can't be reached from host3: only small packets arrive")
    assert report["findings"][0]["do"] == "lower the MTU of its interface"


def test_names_a_host_whose_own_name_or_master_is_loopback(site: Site, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 host2\n")
    port = site.sshd("host2", over={Path("/etc/hosts"): hosts})
    odd: Node = {"host": site.name("host2-alone", "host2", port), "address": site.bed.hosts["host2"].address}
    status, report = checked(site, ["host1", odd, "host3"])
    assert (status, found(report)) == (0, [("warning", "network", ["host2-alone"])])
    assert report["findings"][0]["what"] == "its own name, host2, resolves to 127.0.1.1"


def device_of(site: Site, host: str) -> str:
    rows = site.bed.inside(host, "ip", "-o", "-4", "addr").stdout.splitlines()
    (device,) = [row.split()[1] for row in rows if site.bed.hosts[host].address in row]
    return device


@contextmanager
def mtu(site: Site, host: str, size: int) -> Iterator[None]:
    device = device_of(site, host)

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


def test_a_job_that_init_writes_for_hosts_passes_check(site: Site) -> None:
    (site.directory / "train.py").write_text("import torch\n")
    setting = f"ssh.config={site.ssh_config.name}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = ["train.py", "-H", "host1,host2", "-n", "4", "--set", setting]
    made = distlaunch("init", *words, cwd=site.directory, env=env, status=0)
    assert made.stderr == "distlaunch: looking at host1, host2\n"
    checked = distlaunch("check", str(site.directory / "job.yaml"), "--json")
    assert (checked.returncode, found(json.loads(checked.stdout))) == (0, [])
    planned = distlaunch("dry-run", str(site.directory / "job.yaml"), status=0)
    assert "4 ranks on 2 nodes" in planned.stdout


@contextmanager
def mounted(site: Site, host: str, target: Path, *words: str | Path) -> Iterator[Path]:
    """What is mounted at `target` by these words of mount, on one host only."""
    if not target.exists():
        target.mkdir()
    done = site.bed.inside(host, "mount", *map(str, words), str(target))
    assert done.returncode == 0, done.stderr
    try:
        yield target
    finally:
        site.bed.inside(host, "umount", str(target))


def test_names_disks_that_are_full_or_have_no_inodes_or_are_small(site: Site, tmp_path: Path) -> None:
    disk = ("-t", "tmpfs", "tmpfs", "-o")
    with ExitStack() as stack:
        full = stack.enter_context(mounted(site, "host2", tmp_path / "full", *disk, "size=64k"))
        no_files = stack.enter_context(mounted(site, "host3", tmp_path / "no-files", *disk, "nr_inodes=2"))
        stack.enter_context(mounted(site, "host1", Path("/dev/shm"), *disk, "size=64m"))
        nodes: list[Node] = [
            "host1",
            {"host": "host2", "env": {"TMPDIR": str(full)}},
            {"host": "host3", "env": {"TMPDIR": str(no_files)}},
        ]
        status, report = checked(site, nodes)
    told = {each["what"]: each["nodes"] for each in report["findings"] if each["part"] == "place"}
    assert (status, {name for name, _, _ in found(report)}) == (0, {"warning"})
    assert told == {
        f"the disk with {full} has only 64 KiB free": ["host2"],
        f"the disk with {no_files} has room for only 1 file (inodes)": ["host3"],
        "/dev/shm has only 64 MiB": ["host1"],
    }


@pytest.mark.parametrize(
    ("option", "words"),
    [("ro", "is not writable on this machine"), ("size=64k", "has only 64 KiB free on this machine")],
)
def test_names_a_run_directory_that_cannot_be_written(site: Site, option: str, words: str) -> None:
    (site.directory / "logs").mkdir()
    script = f'mount -t tmpfs -o {option} tmpfs "$0" && exec "$@"'
    here = ["unshare", "--mount", "sh", "-c", script, str(site.directory / "logs")]
    status, report = checked(site, here=here, logs={"dir": "logs/runs"})
    assert (status, found(report)) == (1, [("error", "place", [])])
    assert report["findings"][0]["what"].endswith(words)


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
    sound = (
        NVML.replace("handles[2] = {0, 1}", "handles[3]").replace("= 2;", "= 3;").replace("? 0 : 3", "& 0")
    )
    library(tmp_path / "sound" / "libnvidia-ml.so.1", sound)
    library(tmp_path / "bad" / "libnvidia-ml.so.1", NVML)
    for name, version in (("one", "22703"), ("two", "21904")):
        library(tmp_path / name / "libnccl.so.2", NCCL.replace("NUMBER", version))
    xid = "[12.3] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus."
    dmesg = program(tmp_path / "dmesg", f'echo "{xid}"')

    def node(host: str, *directories: str) -> Node:
        return {
            "host": host,
            "env": {"LD_LIBRARY_PATH": ":".join(f"{tmp_path}/{name}" for name in directories)},
        }

    nodes = [node("host1", "sound"), node("host2", "bad"), node("host3", "sound", "one", "two")]
    target = Path(completed(["sh", "-c", "command -v dmesg"]).stdout.strip())
    with mounted(site, "host2", target, "--bind", dmesg):
        status, report = checked(site, nodes, gpus_per_node=3, procs_per_node=1, backend="gloo")
    assert status == 1
    assert {tuple(nodes) for _, part, nodes in found(report) if part == "software"} == {("host3",)}
    told = [each["what"] for each in report["findings"] if each["nodes"] == ["host2"]]
    assert [text.partition(", by ")[0] for text in told if "load of" not in text] == [
        "2 GPUs instead of 3",
        "GPU 0 has had 3 uncorrectable memory errors",
        "GPU 1 already has 40 GiB of 80 GiB in use",
        "GPU 1 is throttled (temperature)",
        "GPU 1 is divided (MIG)",
        "the kernel log has Xid 79 (0000:3b:00)",
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
            script = (
                f"ip addr flush dev eth0 && ip addr add {inner}/32 dev eth0 && ip addr add {own}/24 dev eth0"
                f" && ip route replace {subnet} dev eth0 src {inner}"
            )
            restoring = f"ip addr flush dev eth0 && ip addr add {own}/24 brd + dev eth0"
            stack.callback(site.bed.inside, host, "sh", "-c", restoring)
            done = site.bed.inside(host, "sh", "-c", script)
            assert done.returncode == 0, done.stderr
        status, report = checked(site)
    assert status == 1
    assert ("error", "network", ["host2", "host3"]) in found(report)
    whats = [each["what"] for each in report["findings"] if each["part"] == "network"]
    assert whats[-1] == f"have the same address, {inner}"
    assert whats[0] == "host1 can't reach host2, host3: Network is unreachable"


def test_names_code_that_differs(site: Site, tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name / "pkg").mkdir(parents=True)
        (tmp_path / name / "pkg" / "model.py").touch()
        (tmp_path / name / "worker.py").write_text("import torch\n")
        (tmp_path / name / "uv.lock").write_text(name)
    completed(["git", "init", "-q", str(tmp_path / "here")], status=0)
    completed(["git", "-C", str(tmp_path / "here"), "add", "pkg", "worker.py"], status=0)
    (tmp_path / "there" / "pkg" / "model.py").unlink()
    nodes: list[Node] = ["host1", {"host": "host2", "workdir": f"{tmp_path}/there"}]
    status, report = checked(site, nodes, ["--code"], workdir=str(tmp_path / "here"))
    assert (status, found(report)) == (0, [("warning", "code", ["host2"])])
    (finding,) = [each["what"] for each in report["findings"] if each["part"] == "code"]
    assert finding == "2 of 3 files differ from those on this machine: uv.lock, pkg/model.py (missing)"
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "worker.py").touch()
    status, report = checked(site, nodes[:1], ["--code"], workdir=str(tmp_path / "empty"))
    assert report["unchecked"] == [f"code: no git repository or lock file in {tmp_path}/empty here"]


# Links


@contextmanager
def slowed(site: Site, host: str, target: str) -> Iterator[None]:
    """Send what `host` sends to these addresses at 100 Mbit/s."""
    on = ("dev", device_of(site, host))
    limit = (*on, "parent", "1:", "classid", "1:1", "htb", "rate", "100mbit")
    match = (*on, "parent", "1:", "protocol", "ip", "u32", "match", "ip", "dst", target, "flowid", "1:1")

    def tc(*words: str) -> None:
        done = site.bed.inside(host, str(find("tc")), *words)
        assert done.returncode == 0, done.stderr

    tc("qdisc", "add", *on, "root", "handle", "1:", "htb")
    try:
        tc("class", "add", *limit)
        tc("filter", "add", *match)
        yield
    finally:
        tc("qdisc", "del", *on, "root")


FOUR: list[Node] = [*NODES, "host4"]


@pytest.mark.long
def test_names_a_slow_host_or_a_slow_pair(site: Site) -> None:
    """On a busy machine, other links may be slow, too."""
    with slowed(site, "host2", "0.0.0.0/0"):
        status, report = checked(site, FOUR, ["--links"])
    assert status == 0
    assert len(report["links"]["measurements"]) >= 6 + 2
    assert ("warning", "links", ["host2"]) in found(report)
    with slowed(site, "host2", f"{site.bed.hosts['host3'].address}/32"):
        status, report = checked(site, FOUR, ["--links"])
    assert status == 0
    assert ("warning", "links", ["host2", "host3"]) in found(report)


@pytest.mark.long
def test_a_pair_that_hangs_after_connecting_is_an_error(site: Site) -> None:
    address, began = site.bed.hosts["host2"].address, time.monotonic()
    large = ("-p", "tcp", "-s", address, "-m", "length", "--length", "1400:65535", "-j", "DROP")
    with site.bed.rule("host3", "INPUT", *large):
        status, report = checked(site, FOUR, ["--links"])
    on_time("check --links", time.monotonic() - began, 60)
    assert status == 1
    (what,) = [each["what"] for each in report["findings"] if each["nodes"] == ["host2", "host3"]]
    assert what == "an all-reduce between them doesn't complete"
    assert {part for _, part, _ in found(report)} == {"network", "links"}  # large packets don't get through


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
        status, report = checked(site, ["host1", "host2", odd, "host4"], ["--links"])
    # A busy machine may make links look slow, which is a warning of its own.
    (error,) = [each for each in report["findings"] if each["level"] == "error"]
    assert (status, error["part"], error["nodes"]) == (1, "links", ["host3"])
    assert error["what"] == "stopped answering in the link test"


# What `run` checks by itself

READ_ONLY = "for p in /tmp /var/tmp /dev/shm; do mount --bind $p $p; mount -o remount,bind,ro $p; done"


def ran(site: Site, nodes: list[Node], *options: str, **job: Any) -> tuple[int, list[str], list[str]]:
    """Run a job whose ranks tell their interface: its exit status, what it says, and what ranks print."""
    worker = "import os; print(os.environ['RANK'], os.environ['GLOO_SOCKET_IFNAME'], flush=True)\n"
    (site.directory / "worker.py").write_text(worker)
    document = json.loads(site.job(nodes, script="worker.py", **job).read_text())
    path = site.directory / "job.yaml"
    path.write_text(json.dumps({key: value for key, value in document.items() if key != "command"}))
    done = distlaunch("run", str(path), *options, cwd=site.directory)
    said = [line for line in done.stderr.splitlines() if "no rank joined the rendezvous" not in line]
    return done.returncode, said, sorted(done.stdout.splitlines())


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
    explained = distlaunch("why", cwd=site.directory, status=0).stdout
    assert "; to start the job anyway: --no-check [" in explained, explained


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
    (plan,) = site.directory.glob("runs/*/plan.json")
    first, other = (node["interface"] for node in json.loads(plan.read_text())["nodes"][:2])
    master = site.bed.hosts["host1"].address
    assert (first["name"], master in first["why"]) == ("eth0", True)
    assert other["why"].endswith(f"to MASTER_ADDR {master} uses it")
