"""What a run finds before its ranks start: interfaces, GPUs, programs and directories that a node lacks."""

from typing import Any

import pytest

from distlaunch.agent.messages import Needs, PortHeld, RouteFound
from distlaunch.job.spec import Invocation
from distlaunch.supervisor.actions import StartWorkers
from distlaunch.supervisor.checking import needs_of, problems, warning
from distlaunch.supervisor.nodes import unfit_words
from tests.unit.orders import Close, FindRoute
from tests.unit.test_restarts import Job, text_of
from tests.unit.test_supervisor import MASTER, Actions, History, texts, up

HAS = (("lo", True), ("eth0", True), ("eth1", True), ("ib0", False), ("docker0", True))
WAY = "; the route to the other nodes uses eth0"


def findings(said: Actions) -> list[str]:
    """What is found, of all levels, without its consequences and advice."""
    assert not (texts(said, "error") and said.count_of(StartWorkers(0)))
    lines = [line for text in texts(said) for line in text.splitlines() if "--no-check" not in line]
    return [line.split(" · ")[0] for line in lines]


def interface_findings(
    env: str = "", backend: str = "gloo", named: Any = (), node_env: str = ""
) -> list[str]:
    """What is found at the start of a job on three nodes, each of which has the same interfaces."""
    nodes = f"nodes: [a, {{host: b, env: {{{node_env}}}}}, c]\ngpus_per_node: 1\nbackend: {backend}"
    job = History(f"{nodes}\nscript: x.py\nenv: {{{env}}}").to_preparing(gpus=1)
    place = (MASTER, MASTER, "eth0")
    routes = [RouteFound(node, *place, f"10.0.0.{node + 1}", HAS, named) for node in (1, 2, 0)]
    return findings(job.feed(PortHeld(0, 29400), *routes))


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


@pytest.mark.parametrize(("backend", "reasons"), [("gloo", GLOO), ("nccl", NCCL)], ids=["gloo", "nccl"])
def test_gloo_takes_whole_names_and_needs_all_nccl_prefixes_and_one(backend: str, reasons: Any) -> None:
    for why, value in ((why, value) for why, values in reasons.items() for value in values):
        setting = f"{backend.upper()}_SOCKET_IFNAME"
        expected = [f"network: a, b, c: {setting}={value}: {why}{WAY}"] if why else []
        assert interface_findings(f'{setting}: "{value}"', backend) == expected


def test_a_setting_counts_for_its_backend_and_its_nodes() -> None:
    assert interface_findings("NCCL_SOCKET_IFNAME: eth9", "gloo") == []
    assert len(interface_findings("GLOO_SOCKET_IFNAME: eth9", "nccl")) == 1
    own, wrong = (("GLOO_SOCKET_IFNAME", "eth9"),), f"GLOO_SOCKET_IFNAME=eth9: no such interface{WAY}"
    assert interface_findings(named=own) == [f"network: a, b, c: {wrong}"]
    assert interface_findings("GLOO_SOCKET_IFNAME: eth1", named=own) == [], "the job's own wins"
    assert interface_findings("GLOO_SOCKET_IFNAME: 'eth{local_rank}'") == [], "each rank has its own"
    found = interface_findings("GLOO_SOCKET_IFNAME: eth0", node_env="GLOO_SOCKET_IFNAME: eth9")
    assert found == [f"network: b: {wrong}"]


# GPUs


UNSEEN = "the job needs 2 GPUs, but no NVIDIA or AMD GPU is visible on the node"


@pytest.mark.parametrize(
    ("keys", "visible", "told"),
    [
        ("gpus_per_node: 2", (0, 0, 0), [f"devices: a, b, c: {UNSEEN}"]),
        ("gpus_per_node: 1", (1, 0, 1), [f"devices: b: {UNSEEN.replace('2 GPUs', '1 GPU')}"]),
        ("gpus_per_node: 8", (8, 4, 8), ["devices: b: 4 GPUs instead of 8"]),
        ("gpus_per_node: 2", (1, 0, 1), ["devices: a, c: 1 GPU instead of 2"]),
        ("gpus_per_node: 2", (2, 2, 8), []),
        ("gpus_per_node: 0", (0, 0, 0), []),
        ("gpus_per_node: auto", (0, 0, 0), []),
        ("gpus_per_node: 2\nbackend: nccl", (0, 2, 2), [f"devices: a: {UNSEEN}"]),
        ("gpus_per_node: 2\nenv: {CUDA_VISIBLE_DEVICES: '0,1'}", (0, 0, 0), []),
    ],
)
def test_some_missing_gpus_end_the_job_and_hidden_ones_are_a_warning(
    keys: str, visible: tuple[int, ...], told: list[str]
) -> None:
    job = History(f"script: t.py\nprocs_per_node: 2\nnodes: [a, b, c]\n{keys}")
    job.feed(*(up(node, gpus) for node, gpus in enumerate(visible)), PortHeld(0, 29400))
    job.feed(*(RouteFound(node, MASTER, MASTER, "eth0") for node in (1, 2, 0)))
    assert findings(job.actions) == told


# Programs and directories

PLACE = {"workdir": "/w", "exists": True, "script": "/w/x.py", "digest": "1"}
NO_SCRIPT = {**PLACE, "unreadable": "No such file or directory", "errno": 2}
LOST = "place: b: can't read the script /w/x.py: No such file or directory"


def seen(node: int, place: Any = PLACE, **parts: Any) -> RouteFound:
    """The answer of a node that has found these facts."""
    return RouteFound(node, MASTER, MASTER, "eth0", f"10.0.0.{node + 1}", seen={"place": place, **parts})


def prepared(place: Any, keys: str = "", **parts: Any) -> History:
    """A job on a, b and c, of which b has found something else."""
    text = f"script: x.py\nworkdir: /w\nnodes: [a, b, c]\ngpus_per_node: 0\n{keys}"
    job = History(text).to_preparing()
    job.feed(PortHeld(0, 29400), seen(1, place, **parts), seen(2), seen(0))
    return job


@pytest.mark.parametrize(
    ("place", "status", "words"),
    [
        (NO_SCRIPT, 127, LOST),
        ({**NO_SCRIPT, "errno": 13}, 126, LOST),
        ({**PLACE, "exists": False}, 127, "place: b: the workdir /w does not exist or can't be accessed"),
        ({**PLACE, "unrecorded": "no room"}, 126, "place: b: no room"),
    ],
)
def test_what_a_rank_cannot_start_without_ends_the_job(place: Any, status: int, words: str) -> None:
    job = prepared(place)
    assert (job.state.outcome, findings(job.actions)) == (status, [words])
    assert job.actions.count_of(Close(1, 10.0)) == 1


def test_the_rest_is_one_warning() -> None:
    job = prepared({**PLACE, "digest": "2"}, limits={"nofile": 64})
    (said,) = texts(job.actions, "warning")
    both = "2 warnings about the nodes: b: the script differs; b: only 64 open files are allowed"
    assert said == f"{both}; `distlaunch check job.yaml` shows details"
    assert job.actions.count_of(StartWorkers(1)) == 1
    job.state = job.state._replace(spec=job.state.spec._replace(invocation=Invocation()))
    lines = [shown.text for shown in warning(job.state, problems(job.state))]
    assert [line.partition(" · ")[0] for line in lines] == [
        "place: b: the script differs",
        "limits: b: only 64 open files are allowed",
    ], "no job file to check"
    silent = prepared("no answer within 2 s")
    assert findings(silent.actions) == ["place: b: no answer within 2 s about its directories"]


@pytest.mark.parametrize(("keys", "count"), [("", 1), ("python: python3.12\n", 0)])
def test_names_a_node_where_another_python_takes_the_place_of_a_missing_one(keys: str, count: int) -> None:
    job = History(f"script: x.py\nnodes: [a, b]\ngpus_per_node: 0\n{keys}")
    first, other = up(0), up(1)
    other = other._replace(facts=other.facts._replace(python="/usr/bin/python3.11"))
    job.feed(first, other, PortHeld(0, 29400), seen(1), seen(0))
    words = f"software: b: its ranks run with /usr/bin/python3.11, but those on a with {first.facts.python}"
    assert [said.startswith(f"{words} · ") for said in texts(job.actions, "warning")] == [True] * count


def test_facts_of_any_type_are_survived() -> None:
    for junk in (1, "x", {}, {"disks": 1, "exists": True}, {"exists": True, "digest": {}}):
        prepared(junk, limits=junk, devices=junk, network=junk, software=junk, load=junk)


def test_parts_to_skip_are_neither_asked_for_nor_judged_and_a_node_is_asked_once() -> None:
    assert prepared(NO_SCRIPT, "checks: {skip: [place]}").actions.count_of(StartWorkers(1)) == 1
    assert needs_of(prepared(NO_SCRIPT, "checks: {skip: all}").state, 1) is None
    assert needs_of(prepared(PLACE).state, 1) is None
    fresh = History("script: x.py\nworkdir: /w\nnodes: [a, b]\nenv: {TMPDIR: t}")
    assert needs_of(fresh.state, 1) == Needs("/w", "/w/x.py", "t")


def test_a_spare_that_lacks_the_script_is_not_used_in_a_restart() -> None:
    job = Job(text_of("[a, b]", "spares: [c]")).to_running()
    job.lose(1)
    actions = job.wait(60.0)
    assert actions.count_of(FindRoute(2, MASTER)) == 1
    job.obey(Actions(each for each in actions if each != FindRoute(2, MASTER)))
    job.feed(seen(2, NO_SCRIPT))
    assert job.state.plan is not None
    assert unfit_words(job.state.nodes[2]).startswith(LOST.replace("b:", "c:"))
