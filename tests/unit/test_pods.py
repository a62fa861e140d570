"""Running pods as nodes of a job: the list from kubectl, command lines and errors."""

import json
import re
from functools import partial
from typing import Any

import pytest

from distlaunch.agent.wire import LEFT_EARLY
from distlaunch.errors import JobError, UsageError
from distlaunch.job.build import build_spec
from distlaunch.job.nodes import Surroundings
from distlaunch.job.spec import JobSpec
from distlaunch.job.yaml_document import parse
from distlaunch.kubernetes.pods import Kubectl, exec_words, pods_argv, pods_listed, reach_pod
from distlaunch.schedulers.grid_engine import Qrsh
from distlaunch.transports.failure import Kind, ProcessEnd
from distlaunch.transports.transport import Command


def pod(name: str, address: str, **changes: Any) -> dict[str, Any]:
    """As `kubectl get pods --output=json` has it, but for what nobody reads."""
    main = {"name": "main", "resources": {"limits": {"cpu": "8", "nvidia.com/gpu": "4"}}}
    return {
        "metadata": {"name": name},
        "spec": {"containers": [main, {"name": "sidecar", "resources": {}}]},
        "status": {"phase": "Running", "podIP": address},
        **changes,
    }


def listing(*pods: dict[str, Any]) -> str:
    return json.dumps({"kind": "List", "items": pods})


ENDING = pod("old-0", "10.0.0.9", metadata={"name": "old-0", "deletionTimestamp": "2026-01-01T00:00:00Z"})
PENDING = pod("new-0", "", status={"phase": "Pending"})
THREE = listing(pod("t-10", "10.0.0.3"), ENDING, pod("t-2", "10.0.0.2"), PENDING, pod("t-1", "10.0.0.1"))


def job(text: str, listed: str = THREE) -> JobSpec:
    document = parse(f"script: t.py\n{text}", "job.yaml")
    found, reach = pods_listed(listed, "app=t", None), partial(reach_pod, "ml")
    around = Surroundings("/p", "/home/me", {}, allocation=found, reach=reach)
    return build_spec(document, "job.yaml", around)


def test_running_pods_are_nodes_in_natural_order() -> None:
    found = pods_listed(THREE, "app=t", None)
    nodes = [(node.host, node.address, node.gpus, node.container) for node in found.nodes]
    assert nodes == [(f"t-{name}", f"10.0.0.{last}", 4, "main") for name, last in ((1, 1), (2, 2), (10, 3))]
    assert found.name == "Kubernetes (app=t)"
    assert pods_listed(THREE, "app=t", "sidecar").nodes[0].gpus is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<html>", "Expecting value"),
        ("[]", "not a list of pods"),
        ('{"items": [{}]}', "not a list of pods"),
        (listing(pod("a", "10.0.0.1", spec={"containers": [{"name": "x"}]})), "pod a has no container main"),
    ],
)
def test_refuses_a_malformed_pod_list(text: str, told: str) -> None:
    with pytest.raises((ValueError, UsageError), match=told):
        pods_listed(text, "app=t", "main")


@pytest.mark.parametrize(
    ("limits", "gpus"),
    [({"nvidia.com/gpu": 2, "nvidia.com/gpumem": "3k"}, 2), ({"aliyun.com/gpu-mem": 8}, None)],
)
def test_the_memory_of_gpus_is_not_counted_as_gpus(limits: dict[str, Any], gpus: int | None) -> None:
    one = pod("a", "10.0.0.1", spec={"containers": [{"name": "main", "resources": {"limits": limits}}]})
    assert pods_listed(listing(one), "app=t", None).nodes[0].gpus == gpus


def test_the_command_lines_of_kubectl() -> None:
    words = "kubectl get pods --selector=app=t --namespace=ml --output=json"
    assert pods_argv("app=t", "ml") == words.split()
    assert exec_words(None, "main") == ("kubectl", "exec", "--stdin", "--container=main", "{host}", "--")


def test_a_jobs_nodes_are_pods() -> None:
    section = "launcher: kubernetes\nkubernetes: {selector: app=t, namespace: ml}\n"
    spec = job(f"{section}nodes: 2\nspares: rest")
    words = (*("kubectl", "exec", "--stdin", "--namespace=ml", "--container=main"), "{host}", "--")
    assert [(node.reach, node.address, node.gpus) for node in spec.pool] == [
        (Kubectl(f"t-{name}", words), f"10.0.0.{last}", 4) for name, last in ((1, 1), (2, 2), (10, 3))
    ]
    assert len(spec.nodes) == 2
    assert job(f"{section}gpus_per_node: 1").nodes[2].gpus == 1


SELECTED = "\nkubernetes: {selector: app=t}\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "launcher: this launcher uses running pods: set kubernetes.selector"),
        (
            f"{SELECTED}nodes: [a]",
            "nodes: kubernetes.selector selects the pods: remove nodes; to list pods, write",
        ),
        (f"{SELECTED}nodes: 4", "nodes: the job requests 4 nodes, but Kubernetes (app=t) has 3 running pods"),
    ],
)
def test_refuses_a_job_that_cannot_have_pods(text: str, told: str) -> None:
    with pytest.raises(JobError, match=re.escape(told)):
        job(f"launcher: kubernetes{text}")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Kind.UNRESOLVED, 'Error from server (NotFound): pods "t-1" not found'),
        (
            Kind.TASK_REFUSED,
            'Error from server (Forbidden): pods "t-1" is forbidden: User "me" cannot create',
        ),
        (Kind.NODE_DOWN, 'error: unable to upgrade connection: container not found ("main")'),
        (Kind.UNREACHABLE, "Unable to connect to the server: dial tcp 10.0.0.1:6443: i/o timeout"),
        (
            Kind.NODE_DOWN,
            "error: cannot exec into a container in a completed pod; current phase is Succeeded",
        ),
    ],
)
def test_understands_kubectl_errors(kind: Kind, words: str) -> None:
    reach = job(f"launcher: kubernetes{SELECTED}").nodes[0].reach
    assert reach.failure(ProcessEnd(words, status=1)).kind is kind


@pytest.mark.parametrize("reach", ["kubernetes", "command", "qrsh"])
def test_a_command_that_fails_by_itself_says_nothing_of_the_ranks_on_its_node(reach: str) -> None:
    """Many exit with status 1. The next attempt has to wait for the ranks of the last one."""
    known = job(f"launcher: kubernetes{SELECTED}").nodes[0].reach
    way = {"kubernetes": known, "command": Command("a", ("tsh",)), "qrsh": Qrsh("a", ("qrsh",))}[reach]
    broken = way.failure(ProcessEnd("error: unexpected EOF", booted=True, status=1))
    assert (broken.kind, broken.clean) == (Kind.LOST, False)
    assert way.failure(ProcessEnd("", booted=True, status=LEFT_EARLY)).clean
