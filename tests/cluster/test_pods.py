"""`launcher: kubernetes`. No cluster runs here: a stand-in for kubectl reaches the testbed's hosts."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import Bed
from tests.harness import distlaunch, kill, program, running, wait_gone, write_job

WAITS = """
import os, signal
e = os.environ
os.write(1, f"ready {e['RANK']} {os.getpid()} {e['LOCAL_RANK']} {e['MASTER_ADDR']}\\n".encode())
signal.pause()
"""
JOB = """
launcher: kubernetes
nodes: 2
gpus_per_node: 0
kubernetes: {selector: app=train, namespace: ml, container: main}
"""
Env = Callable[[str], dict[str, str]]


@pytest.fixture
def kubectl(bed: Bed, tmp_path: Path) -> Env:
    """An environment with a stand-in whose pods trainer-1 … trainer-3 are host1 … host3."""
    pods = [
        {
            "metadata": {"name": f"trainer-{number}"},
            "spec": {"containers": [{"name": "sidecar"}, {"name": "main"}]},
            "status": {"phase": "Running", "podIP": bed.hosts[f"host{number}"].address},
        }
        for number in (1, 2, 3)
    ]
    (directory := tmp_path / "bin").mkdir()
    (directory / "pods.json").write_text(json.dumps({"items": pods}))
    enter = " ".join(bed.argv("exec", "HOST", "--"))
    program(
        directory / "kubectl",
        f"""
        case "$KUBECTL_FAILS$*" in
            "get pods --selector=app=train --namespace=ml --output=json") exec cat {directory}/pods.json;;
            "exec --stdin --namespace=ml --container=main trainer-"[123]" -- "*)
                host=host${{5#trainer-}}; shift 6; exec {enter.replace("HOST", '"$host"')} "$@";;
            "get pods --selector=none"*) echo '{{"items": []}}';;
            *) echo "error: $KUBECTL_FAILS$*" >&2; exit 1;;
        esac""",
    )
    path = f"{directory}:{os.environ['PATH']}"
    return lambda fails: {**os.environ, "PATH": path, "KUBECTL_FAILS": fails}


def job_in(directory: Path) -> Path:
    return write_job(directory, WAITS, f"{JOB}python: {sys.executable}\n")


def test_ranks_run_in_pods_and_end_with_a_killed_one(bed: Bed, tmp_path: Path, kubectl: Env) -> None:
    before = bed.processes()
    with running(job_in(tmp_path), env=kubectl("")) as run:
        ranks, first = run.wait_ready(2), bed.hosts["host1"].address
        assert sorted(run.stdout.splitlines()) == [
            f"[trainer-1:0] ready 0 {ranks[0]} 0 {first}",
            f"[trainer-2:1] ready 1 {ranks[1]} 0 {first}",
        ]
        assert "2 nodes from Kubernetes (app=train): trainer-1, trainer-2" in run.stderr
        kill(ranks[1])
        wait_gone(list(ranks.values()), 2.0)
        assert run.wait() == 137
        assert "rank 1 (trainer-2) failed first: killed by signal 9 (SIGKILL)" in run.stderr
        wait_gone(sorted(bed.processes() - before), 2.0)


NO_LOGIN = "You must be logged in to the server (Unauthorized) "
LISTS_NONE = "kubectl get pods --selector=none --namespace=ml"


@pytest.mark.parametrize(
    ("fails", "setting", "told"),
    [
        (NO_LOGIN, "nodes=2", "--namespace=ml --output=json` failed: error: You must be logged in"),
        ("", "kubernetes.selector=none", f"no running pod matches none: see `{LISTS_NONE}`"),
    ],
)
def test_says_what_stands_in_the_way(
    tmp_path: Path, kubectl: Env, fails: str, setting: str, told: str
) -> None:
    done = distlaunch("run", str(job_in(tmp_path)), "--set", setting, env=kubectl(fails), status=2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_says_what_else_to_do_without_kubectl(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = distlaunch("run", str(job_in(tmp_path)), env={**os.environ, "PATH": str(tmp_path / "empty")})
    assert done.returncode == 2
    assert "can't run kubectl: No such file or directory" in done.stderr
