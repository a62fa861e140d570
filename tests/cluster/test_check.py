"""`check` on hosts with planted faults: each is named on the right node, and nowhere else."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Node, Site, find
from tests.harness import distlaunch, on_time, program

NODES: list[Node] = ["host1", "host2", "host3"]


def checked(
    site: Site, nodes: list[Node] | None = None, *options: str, **job: Any
) -> tuple[int, dict[str, Any]]:
    (site.folder / "worker.py").write_text("import torch\n")
    path = site.job(nodes or NODES, **job)
    document = {**json.loads(path.read_text()), "script": "worker.py"}
    path.write_text(json.dumps({key: value for key, value in document.items() if key != "command"}))
    done = distlaunch("check", str(path), "--json", *options)
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
    assert found(report) == [("error", "place", ["host3"]), ("error", "network", ["host3"])]


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
    status, report = checked(site, FOUR, "--links")
    assert (status, found(report)) == (0, [])
    assert report["fine"][-1].startswith("links (4 nodes, 6 pairs, median ")
    with slowed(site, "host2", "0.0.0.0/0"):
        status, report = checked(site, FOUR, "--links")
    assert (status, found(report)) == (0, [("warning", "links", ["host2"])])
    with slowed(site, "host2", f"{site.bed.hosts['host3'].address}/32"):
        status, report = checked(site, FOUR, "--links")
    assert (status, found(report)) == (0, [("warning", "links", ["host2", "host3"])])


@pytest.mark.long
def test_a_pair_that_hangs_after_connecting_is_an_error(site: Site) -> None:
    address, began = site.bed.hosts["host2"].address, time.monotonic()
    large = ("-p", "tcp", "-s", address, "-m", "length", "--length", "1400:65535", "-j", "DROP")
    with site.bed.rule("host3", "INPUT", *large):
        status, report = checked(site, FOUR, "--links")
    on_time("check --links", time.monotonic() - began, 60)
    assert (status, found(report)) == (1, [("error", "links", ["host2", "host3"])])
    assert report["findings"][0]["what"] == "an all-reduce between them doesn't complete"


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
    assert (status, found(report)) == (1, [("error", "links", ["host3"])])
    assert report["findings"][0]["what"] == "stopped answering in the link test"
