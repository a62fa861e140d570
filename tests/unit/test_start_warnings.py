"""Warnings at the start about interfaces and GPUs that a node lacks."""

import pytest

from distlaunch.agent.messages import PortHeld, RouteFound
from distlaunch.supervisor.actions import ShowMessage
from tests.unit.test_supervisor import MASTER, History, texts, up

HAS = (("lo", True), ("eth0", True), ("eth1", True), ("ib0", False), ("docker0", True))
WAY = "; the route to the other nodes uses eth0"


def interface_warnings(
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
    said = job.feed(PortHeld(0, 29400), *routes).of(ShowMessage)
    assert all(isinstance(message, ShowMessage) and message.level == "warning" for message in said)
    return [message.text for message in said if isinstance(message, ShowMessage)]


GLOO = {
    "": ("eth0", "docker0", "eth0,eth1", ""),
    "no such interface": ("eth9", "eth", "eth0,eth9"),
    "that interface has no address": ("ib0",),
    "lo can't reach other machines": ("lo",),
}
NCCL = {
    "": ("eth", "eth0", "=eth0", "=eth1:12345", "wlan,eth", "ib,eth", "^docker", "^=lo,docker0"),
    "no such interface": ("=eth", "en", "^eth,docker,ib"),
    "that interface has no address": ("ib", "^eth,docker"),
    "lo can't reach other machines": ("lo",),
}
"""What is wrong, and the values of the variable of which it is said."""


@pytest.mark.parametrize(
    ("backend", "value", "why"),
    [
        (name, value, why)
        for name, each in (("gloo", GLOO), ("nccl", NCCL))
        for why in each
        for value in each[why]
    ],
)
def test_gloo_takes_whole_names_and_needs_all_nccl_prefixes_and_one(
    backend: str, value: str, why: str
) -> None:
    setting = f"{backend.upper()}_SOCKET_IFNAME"
    expected = [f"{setting}={value} on a, b, c: {why}{WAY}"] if why else []
    assert interface_warnings(f'{setting}: "{value}"', backend) == expected


def test_a_setting_counts_for_its_backend_and_its_nodes() -> None:
    assert interface_warnings("NCCL_SOCKET_IFNAME: eth9", "gloo") == []
    assert len(interface_warnings("GLOO_SOCKET_IFNAME: eth9", "nccl")) == 1
    own = (("GLOO_SOCKET_IFNAME", "eth9"),)
    assert interface_warnings(named=own) == [f"GLOO_SOCKET_IFNAME=eth9 on a, b, c: no such interface{WAY}"]
    assert interface_warnings("GLOO_SOCKET_IFNAME: eth1", named=own) == [], "the job's own wins"
    expected = [f"GLOO_SOCKET_IFNAME=eth9 on b: no such interface{WAY}"]
    assert interface_warnings("GLOO_SOCKET_IFNAME: eth0", node_env="GLOO_SOCKET_IFNAME: eth9") == expected


# GPUs

LOOK = "visible there; check with `nvidia-smi -L`"


def gpu_warnings(keys: str, *visible: int) -> list[str]:
    """What is said at the start of a job on three nodes, which show so many GPUs each."""
    job = History(f"script: t.py\nprocs_per_node: 2\nnodes: [a, b, c]\n{keys}")
    job.feed(*(up(node, gpus) for node, gpus in enumerate(visible)), PortHeld(0, 29400))
    job.feed(*(RouteFound(node, MASTER, MASTER, "eth0") for node in (1, 2, 0)))
    return texts(job.actions, "warning")


@pytest.mark.parametrize(
    ("keys", "visible", "told"),
    [
        ("gpus_per_node: 2", (0, 0, 0), [f"a, b, c: the job file says 2 GPUs, but none is {LOOK}"]),
        ("gpus_per_node: 1", (1, 0, 1), [f"b: the job file says 1 GPU, but none is {LOOK}"]),
        ("gpus_per_node: 8", (8, 4, 8), [f"b: the job file says 8 GPUs, but only 4 are {LOOK}"]),
        (
            "gpus_per_node: 2",
            (1, 0, 1),
            [
                f"a, c: the job file says 2 GPUs, but only 1 is {LOOK}",
                f"b: the job file says 2 GPUs, but none is {LOOK}",
            ],
        ),
        ("gpus_per_node: 2", (2, 2, 8), []),
        ("gpus_per_node: 0", (0, 0, 0), []),
        ("gpus_per_node: auto", (0, 0, 0), []),
        ("gpus_per_node: 2\nbackend: nccl", (0, 2, 2), [f"a: the job file says 2 GPUs, but none is {LOOK}"]),
        ("gpus_per_node: 2\nenv: {CUDA_VISIBLE_DEVICES: '0,1'}", (0, 0, 0), []),
    ],
)
def test_warns_once_about_missing_gpus(keys: str, visible: tuple[int, ...], told: list[str]) -> None:
    assert gpu_warnings(keys, *visible) == told
