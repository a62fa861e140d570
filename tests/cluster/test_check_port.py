"""The network between the nodes: `check-port` where it is broken, and interfaces that are wrong."""

import json
import time
from typing import Any

from tests.cluster.hosts import Ended, Node, Site
from tests.harness import distlaunch, on_time

NODES = ["host1", "host2", "host3", "host4"]


def checked(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = distlaunch("check-port", *arguments, "--json")
    assert "Traceback" not in done.stderr, done.stderr
    (report,) = json.loads(done.stdout)
    return done.returncode, report


def test_tries_every_pair_of_nodes_but_spares_and_names_two_that_cannot_connect(site: Site) -> None:
    job = str(site.job(NODES[:3], spares=["host4"]))
    status, report = checked(job)
    assert (status, report["pairs"]) == (0, {"tried": 6, "of": 6, "failed": []})
    address = site.bed.hosts["host2"].address
    with site.bed.rule("host3", "INPUT", "-s", address, "-j", "DROP"):
        status, report = checked(job)
        assert status == 1
        assert [dial["ok"] for dial in report["dials"]] == [True] * 4, "not even the master was reached"
        failed = [(each["source"], each["target"]) for each in report["pairs"]["failed"]]
        assert failed == [("host2", "host3"), ("host3", "host2")]
        began = time.monotonic()
        done = distlaunch("check-port", job)
        on_time("the check, of which 5 s for the pair that fails", time.monotonic() - began, 12.0)
        lines = done.stdout.splitlines()
        assert {"pairs of nodes that can connect: 4 of 6", "spares not tested: host4"} <= {*lines}
        host3 = f"host3 ({site.bed.hosts['host3'].address})"
        told = f"  {host3} can't be reached from host2: no answer within 5 s"
        assert [line for line in lines if line.startswith(told)], done.stdout


def test_sees_a_firewall_that_lets_in_nothing_but_the_master_port(site: Site) -> None:
    job = str(site.job(NODES, rendezvous={"endpoint": f"{site.bed.hosts['host1'].address}:29511"}))
    rule = ("-p", "tcp", "--syn", "-m", "multiport", "!", "--dports", "22,29511", "-j", "REJECT")
    with site.bed.rule("host1", "INPUT", *rule):
        status, report = checked(job)
    assert (status, report["free"]) == (1, True)
    assert [dial["ok"] for dial in report["dials"]] == [True] * 5
    assert {each["target"] for each in report["pairs"]["failed"]} == {"host1"}
    assert len(report["pairs"]["failed"]) == 3


def test_says_that_the_endpoint_is_not_the_first_node(site: Site) -> None:
    first, other = (site.bed.hosts[name].address for name in ("host1", "host2"))
    job = str(site.job(NODES[:3], rendezvous={"endpoint": f"{other}:29514"}))
    status, report = checked(job)
    assert (status, report["own_address"], report["pairs"]["failed"]) == (1, first, [])
    assert f"\n{other} is not an address of host1, but {first} is\n" in distlaunch("check-port", job).stdout
    done = distlaunch("check", job, status=1)
    assert f"set rendezvous.endpoint to {first}: {other} is not host1's" in " ".join(done.stdout.split())
    nowhere = str(site.job(NODES[:3], rendezvous={"endpoint": "203.0.113.9:29514"}))  # no route leads there
    said = " ".join(distlaunch("check", nowhere, status=1).stdout.split())
    assert "set rendezvous.endpoint to an IP address of the first node" in said
    assert "firewall" not in said


def test_checks_a_port_on_a_host_that_only_an_ssh_config_knows(site: Site) -> None:
    site.name("behind-an-alias", "host2")
    status, report = checked("behind-an-alias:29512", "--ssh-config", str(site.ssh_config))
    assert (status, report["free"], report["host"]) == (0, True, site.bed.hosts["host2"].address)
    status, report = checked("behind-an-alias:29512")
    assert (status, report["failures"][0]["kind"]) == (1, "unknown host")
    assert "~/.ssh/config" in report["failures"][0]["advice"]


def test_names_a_missing_interface_with_the_one_that_would_do(site: Site) -> None:
    def told(interface: str) -> tuple[Ended, list[str]]:
        odd: Node = {"host": "host2", "env": {"GLOO_SOCKET_IFNAME": interface}}
        ended = site.run(["host1", odd, "host3"])
        assert ended.status == (2 if interface == "eth99" else 0), ended.stderr
        return ended, [line for line in ended.stderr.splitlines() if "GLOO_SOCKET_IFNAME" in line]

    ended, (line,) = told("eth99")
    (host2,) = [event for event in ended.events("RouteFound") if event["node"] == 1]
    right = host2["interface"]
    reason = "no such interface; the route to the other nodes uses"
    assert f"host2: GLOO_SOCKET_IFNAME=eth99: {reason} {right} · " in line
    assert site.started() == []
    assert dict(host2["interfaces"])[right] is True
    assert told(right)[1] == []
