"""The network between the nodes: `check-port` where it is broken, and interfaces that are wrong."""

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.hosts import Bed, Site, why_not
from tests.harness import PATIENCE_S, distlaunch, on_time

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

NODES = ["host1", "host2", "host3", "host4"]


@contextlib.contextmanager
def filtered(bed: Bed, host: str, *rule: str) -> Iterator[None]:
    """A rule for what comes into a host."""
    add, delete = (bed.argv("exec", host, "--", "iptables", how, "INPUT", *rule) for how in ("-A", "-D"))
    subprocess.run(add, check=True, timeout=PATIENCE_S)
    try:
        yield
    finally:
        subprocess.run(delete, check=True, timeout=PATIENCE_S)


def checked(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = distlaunch("check-port", *arguments, "--json")
    assert "Traceback" not in done.stderr, done.stderr
    (report,) = json.loads(done.stdout)
    return done.returncode, report


def test_every_pair_of_nodes_is_tried(site: Site) -> None:
    status, report = checked(str(site.job(NODES)))
    assert (status, report["pairs"]) == (0, {"tried": 12, "of": 12, "failed": []})
    done = distlaunch("check-port", str(site.job(NODES)))
    assert "pairs of nodes that can connect: 12 of 12\n" in done.stdout


def test_two_nodes_that_cannot_reach_each_other_are_named(site: Site) -> None:
    job = str(site.job(NODES))
    address = site.bed.hosts["host2"].address
    with filtered(site.bed, "host3", "-s", address, "-j", "DROP"):
        status, report = checked(job)
        assert status == 1
        assert [dial["ok"] for dial in report["dials"]] == [True] * 5, "not even the master was reached"
        failed = [(each["source"], each["target"]) for each in report["pairs"]["failed"]]
        assert failed == [("host2", "host3"), ("host3", "host2")]
        began = time.monotonic()
        done = distlaunch("check-port", job)
        on_time("the check, of which 5 s for the pair that fails", time.monotonic() - began, 12.0)
        lines = done.stdout.splitlines()
        assert "pairs of nodes that can connect: 10 of 12" in lines
        told = (
            f"  host3 ({site.bed.hosts['host3'].address}) can't be reached from host2: no answer within 5 s"
        )
        assert [line for line in lines if line.startswith(told)], done.stdout


def test_a_firewall_that_lets_in_nothing_but_the_master_port_is_seen(site: Site) -> None:
    job = str(site.job(NODES, rendezvous={"endpoint": f"{site.bed.hosts['host1'].address}:29511"}))
    rule = ("-p", "tcp", "--syn", "-m", "multiport", "!", "--dports", "22,29511", "-j", "REJECT")
    with filtered(site.bed, "host1", *rule):
        status, report = checked(job)
    assert (status, report["free"]) == (1, True)
    assert [dial["ok"] for dial in report["dials"]] == [True] * 5
    assert {each["target"] for each in report["pairs"]["failed"]} == {"host1"}
    assert len(report["pairs"]["failed"]) == 3


def test_spares_are_said_to_be_left_out(site: Site) -> None:
    done = distlaunch("check-port", str(site.job(NODES[:3], spares=["host4"])))
    assert done.returncode == 0, done.stdout
    assert "spares not tested: host4\n" in done.stdout
    assert "6 of 6\n" in done.stdout


def test_a_lone_port_on_a_host_that_only_an_ssh_config_knows(site: Site) -> None:
    site.name("behind-an-alias", "host2")
    status, report = checked("behind-an-alias:29512", "--ssh-config", str(site.ssh_config))
    assert (status, report["free"], report["host"]) == (0, True, site.bed.hosts["host2"].address)
    status, report = checked("behind-an-alias:29512")
    assert (status, report["failures"][0]["kind"]) == (1, "unknown host")
    assert "~/.ssh/config" in report["failures"][0]["advice"]


def test_an_interface_that_a_node_lacks_is_told_with_the_one_that_would_do(site: Site) -> None:
    odd = {"host": "host2", "env": {"GLOO_SOCKET_IFNAME": "eth99"}}
    ended = site.run(["host1", odd, "host3"])
    assert ended.status == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if "GLOO_SOCKET_IFNAME" in line]
    told = "GLOO_SOCKET_IFNAME=eth99 on host2: no such interface; the route to the other nodes uses "
    assert len(lines) == 1 and told in lines[0]
    (host2,) = [event for event in ended.events("RouteFound") if event["node"] == 1]
    assert lines[0].endswith(told + host2["interface"])
    assert dict(host2["interfaces"])[host2["interface"]] is True


def test_an_interface_that_is_right_is_not_mentioned(site: Site) -> None:
    first = site.run(["host1", "host2"])
    (route,) = [event for event in first.events("RouteFound") if event["node"] == 1]
    odd = {"host": "host2", "env": {"GLOO_SOCKET_IFNAME": route["interface"]}}
    second = site.run(["host1", odd])
    assert (second.status, "GLOO_SOCKET_IFNAME" in second.stderr) == (0, False), second.stderr
