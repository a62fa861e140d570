"""Interface variables that name what a node does not have: told once, with the interface that would do."""

import pytest

from distlaunch.agent.messages import PortHeld, RouteFound
from distlaunch.supervisor.actions import Notice
from tests.unit.test_supervisor import MASTER, History

HAS = (("lo", True), ("eth0", True), ("eth1", True), ("ib0", False), ("docker0", True))
WAY = "; the route to the other nodes uses eth0"


def warnings(
    env: str = "", backend: str = "gloo", named: tuple[tuple[str, str], ...] = (), node_env: str = ""
) -> list[str]:
    """What is said at the start of a job on three nodes, each of which has the same interfaces."""
    text = f"""
nodes: [a, {{host: b, env: {{{node_env}}}}}, c]
gpus_per_node: 1
backend: {backend}
script: x.py
env: {{{env}}}
"""
    job = History(text).to_preparing(gpus=1)
    routes = [
        RouteFound(node, MASTER, MASTER, "eth0", f"10.0.0.{node + 1}", HAS, named) for node in (1, 2, 0)
    ]
    said = job.feed(PortHeld(0, 29400), *routes).of(Notice)
    assert all(isinstance(notice, Notice) and notice.level == "warning" for notice in said)
    return [notice.text for notice in said if isinstance(notice, Notice)]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("eth0", ""),
        ("docker0", ""),
        ("eth0,eth1", ""),
        ("eth9", "no such interface"),
        ("eth", "no such interface"),
        ("eth0,eth9", "no such interface"),
        ("ib0", "that interface has no address"),
        ("lo", "lo does not reach other machines"),
        ("", ""),
    ],
)
def test_gloo_takes_whole_names_and_needs_all(value: str, why: str) -> None:
    expected = [f"GLOO_SOCKET_IFNAME={value} on a, b, c: {why}{WAY}"] if why else []
    assert warnings(f'GLOO_SOCKET_IFNAME: "{value}"') == expected


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("eth", ""),
        ("eth0", ""),
        ("=eth0", ""),
        ("=eth1:12345", ""),
        ("wlan,eth", ""),
        ("ib,eth", ""),
        ("^docker", ""),
        ("^=lo,docker0", ""),
        ("=eth", "no such interface"),
        ("en", "no such interface"),
        ("ib", "that interface has no address"),
        ("^eth,docker", "that interface has no address"),
        ("^eth,docker,ib", "no such interface"),
        ("lo", "lo does not reach other machines"),
    ],
)
def test_nccl_takes_prefixes_and_needs_one(value: str, why: str) -> None:
    expected = [f"NCCL_SOCKET_IFNAME={value} on a, b, c: {why}{WAY}"] if why else []
    assert warnings(f'NCCL_SOCKET_IFNAME: "{value}"', "nccl") == expected


def test_what_is_not_used_is_not_looked_at() -> None:
    assert warnings("NCCL_SOCKET_IFNAME: eth9", "gloo") == []
    assert len(warnings("GLOO_SOCKET_IFNAME: eth9", "nccl")) == 1


def test_a_nodes_own_environment_counts_where_the_job_says_nothing() -> None:
    own = (("GLOO_SOCKET_IFNAME", "eth9"),)
    assert warnings(named=own) == [f"GLOO_SOCKET_IFNAME=eth9 on a, b, c: no such interface{WAY}"]
    assert warnings("GLOO_SOCKET_IFNAME: eth1", named=own) == []


def test_the_settings_of_one_node_count_there_alone() -> None:
    expected = [f"GLOO_SOCKET_IFNAME=eth9 on b: no such interface{WAY}"]
    assert warnings("GLOO_SOCKET_IFNAME: eth0", node_env="GLOO_SOCKET_IFNAME: eth9") == expected
