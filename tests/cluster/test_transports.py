"""One suite over every transport: six workers as 2 + 1 + 3 on three nodes, and what happens to them."""

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.containers import Podman
from tests.cluster.hosts import Bed, Site, hiding_argv, parent_of
from tests.cluster.workers import DAEMONS, SLEEPER, STUBBORN
from tests.harness import (
    ROOT,
    Done,
    Going,
    all_ended_well,
    completed,
    distlaunch,
    distlaunch_argv,
    ended_well,
    kill,
    nothing_was_dropped,
    program,
    running,
    wait_gone,
    write_job,
)

RANKS = 6


PODMAN = pytest.param("podman", marks=pytest.mark.together("containers on hosts"))


@pytest.fixture(params=["local", "ssh", "slurm", "command", PODMAN])
def nodes(request: pytest.FixtureRequest) -> str:
    """The part of a job file that says where it runs."""
    # Hosts of another name on this machine: `launcher: local` reaches each as a child process.
    where = f"launcher: {request.param}"
    if request.param == "slurm":
        request.getfixturevalue("allocation")
    elif request.param != "local":
        bed: Bed = request.getfixturevalue("bed")
        enter = bed.argv("exec", "{host}", "--")
        if request.param == "podman":
            podman: Podman = request.getfixturevalue("containers")
            # By way of the host: the container has the network of who runs the exec.
            enter += [*podman.words, "exec", "--interactive", "{host}"]
        where = f"launcher: {{command: {json.dumps(enter)}}}\npython: {sys.executable}"
        if request.param == "ssh":
            where = f"ssh: {{config: {bed.directory}/ssh_config}}"
    hosts = "{host: host1, procs: 2}, {host: host2, procs: 1}, {host: host3, procs: 3}"
    return f"gpus_per_node: 0\nnodes: [{hosts}]\n{where}\n"


@pytest.fixture(scope="module")
def containers(bed: Bed, podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """A container named like each host, on it; with the PIDs of all, by which the tests know processes."""
    with podman.running_on(bed, str(tmp_path_factory.getbasetemp())):
        yield podman


def test_ranks_are_laid_out_as_told_and_their_files_are_byte_exact(tmp_path: Path, nodes: str) -> None:
    worker = """
        import os, random, sys
        names = ("NODE_RANK", "LOCAL_RANK", "RANK", "LOCAL_WORLD_SIZE")
        make = random.Random(int(os.environ["RANK"])).randbytes
        for stream in (sys.stdout, sys.stderr):
            stream.buffer.write(" ".join(os.environ[name] for name in names).encode())
            for _ in range(50):
                stream.buffer.write(make(20011))
    """
    places = (b"0 0 0 2", b"0 1 1 2", b"1 0 2 1", b"2 0 3 3", b"2 1 4 3", b"2 2 5 3")
    with running(write_job(tmp_path, worker, nodes + "logs: {console: none}")) as run:
        assert run.wait() == 0, run.stderr
        nothing_was_dropped(run.stderr)
        for rank, place in enumerate(places):
            make = random.Random(rank).randbytes
            for name in ("out", "err"):
                expected = place + b"".join(make(20011) for _ in range(50))
                assert (run.run_directory() / f"rank{rank}.{name}").read_bytes() == expected
        assert run.holders() == []


def test_placeholders_name_endpoints_that_all_ranks_can_reach(tmp_path: Path, nodes: str) -> None:
    worker = """
        import json, os, socket, time
        def connected(end):
            while True:
                try:
                    return socket.create_connection(end)
                except ConnectionRefusedError:
                    time.sleep(0.05)  # its rank doesn't listen yet
        names, rank, free = json.loads(os.environ["ENDS"]), int(os.environ["RANK"]), int(os.environ["FREE"])
        ends = [(host, int(port)) for host, _, port in (name.rpartition(":") for name in names)]
        mine = [ends[rank], ("", free)] if rank == 0 else [ends[rank]]
        servers = [socket.create_server(end) for end in mine]
        links = [connected(end) for end in (*ends, (ends[0][0], free))]
        peers = [server.accept() for server in servers for _ in ends]
    """
    env = 'env: {ENDS: "{hosts_json:7411}", FREE: "{port:free}"}\n'
    distlaunch("run", str(write_job(tmp_path, worker, nodes + env)), status=0)


def test_code_gets_to_the_nodes_and_files_come_back(tmp_path: Path, nodes: str) -> None:
    """Also into containers, which don't have the directory of the job file."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "big.bin").write_bytes(big := random.Random(7).randbytes(1 << 20))
    worker = """
        import hashlib, os, pathlib
        pathlib.Path(f"made-{os.environ['RANK']}.txt").write_text(os.environ["RANK"])
        print(hashlib.sha256(pathlib.Path("package/big.bin").read_bytes()).hexdigest())
    """
    keys = f"sync: {{to: {tmp_path}/there}}\ncollect: {{paths: ['made-*.txt'], from: all}}\n"
    job = write_job(tmp_path, worker, nodes + keys)
    with running(job, env={**os.environ, "HOME": f"{tmp_path}/home"}) as run:
        assert run.wait() == 0, run.stderr
        assert run.stdout.count(hashlib.sha256(big).hexdigest()) == RANKS
        collected = run.run_directory() / "collected"
        made = {path.name: path.read_text() for path in collected.rglob("*.txt")}
        assert made == {f"made-{rank}.txt": str(rank) for rank in range(RANKS)}
        assert {path.name for path in collected.iterdir()} == {"host1", "host2", "host3"}


KILLED = "rank 4 (host3) failed first: killed by signal 9 (SIGKILL)"
STRIKES = {
    "a rank among daemons": (DAEMONS, 137, KILLED),
    "a stubborn rank": (STUBBORN, 137, KILLED),
    "an agent": (SLEEPER, 71, "host2 was lost"),
    "the controller": (STUBBORN, -9, ""),
    "an interrupt": (SLEEPER, 130, "stopped by SIGINT"),
}
"""Who is hit: the workers, the run's exit status, and what it says."""


@pytest.mark.parametrize("nodes", ["command", PODMAN], indirect=True)
@pytest.mark.parametrize("strike", STRIKES)
def test_no_process_of_a_job_outlives_it(tmp_path: Path, nodes: str, strike: str) -> None:
    """For ssh and Slurm the fault catalog does all this, and more."""
    worker, status, told = STRIKES[strike]
    with running(write_job(tmp_path, worker, nodes), "--set", "timeouts.stop=1s") as run:
        pids = run.wait_ready(2 * RANKS if worker == DAEMONS else RANKS)
        victim = {71: parent_of(pids[2]), 137: pids[4]}.get(status, run.process.pid)
        kill(victim, signal.SIGINT if status == 130 else signal.SIGKILL)
        wait_gone(list(pids.values()), 1.0 + 2.0 if worker == STUBBORN else 2.0)
        assert run.wait() == status
        assert told in run.stderr
        if status == 137:
            assert "ranks 0-3, 5: stopped by distlaunch" in run.stderr
        wait_gone(run.holders(), 1.0 if status < 0 else 0.0)


def test_the_job_file_for_two_nodes(tmp_path: Path, bed: Bed) -> None:
    settings = f"ssh.config={bed.directory}/ssh_config", f"logs.dir={tmp_path}", "args=[--steps, 150]"
    options = [part for one in settings for part in ("--set", one)]
    done = distlaunch("run", str(ROOT / "configs/hosts/two_nodes.yaml"), *options)
    ended_well(done.returncode, done.stdout, done.stderr, last="sync_sgd: ok, 3 ranks")
    assert "all 3 ranks joined the rendezvous at" in done.stderr


def test_pasted_shell_commands_run_the_same_job(tmp_path: Path, bed: Bed) -> None:
    job = tmp_path / "job.yaml"
    nodes = f"nodes: [{{host: host1, procs: 2}}, host2]\nssh: {{config: {bed.directory}/ssh_config}}\n"
    keys = f'procs_per_node: 1\ngpus_per_node: 0\nenv: {{ODD: "it\'s $HOME `x`\\n\\"quoted\\""}}\n{nodes}'
    job.write_text(f"script: {ROOT}/scripts/basics/all_reduce.py\n{keys}")
    text = distlaunch("dry-run", str(job), "--format", "shell").stdout
    blocks = dict(block.split("\n", 1) for block in text.split("# node ")[1:])
    assert list(blocks) == ["host1", "host2"]
    plain = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    with contextlib.ExitStack() as stack:
        shells = []
        for name, block in blocks.items():
            (tmp_path / name).write_text(block)
            pasted = stack.enter_context((tmp_path / name).open())
            shells.append(Going(tmp_path, bed.argv("exec", name, "--", "/bin/sh"), env=plain, stdin=pasted))
            stack.callback(shells[-1].kill)
        all_ended_well(shells[:1], last="all_reduce: ok, 3 ranks")
        assert [shell.wait() for shell in shells] == [0, 0]


def test_check_port_on_all_nodes(tmp_path: Path, nodes: str) -> None:
    job = write_job(tmp_path, "", nodes)
    if "launcher: local" in nodes:
        job.write_text(job.read_text() + "master_addr: 127.0.0.1\n")
    done = distlaunch("check-port", str(job), "--json")
    (report,) = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["free"]
    assert {dial["source"] for dial in report["dials"]} >= {"host1", "host2", "host3"}
    # From outside of these hosts their names mean nothing.
    outside = "slurm" in nodes or "command" in nodes
    assert all(dial["ok"] for dial in report["dials"] if dial["source"] != "here" or not outside)


# ssh alone


def run_persistently(site: Site, home: Path) -> Done:
    """A run that keeps its connections, of a user with this home, as ssh has it from the user database."""
    job = site.job(["host1"], ssh={"config": site.ssh_config.name, "persist": "60s"})
    return completed(hiding_argv(site.login(home, "/bin/sh"), distlaunch_argv("run", str(job))))


def test_keeps_a_connection_for_a_user_who_had_no_ssh_directory(site: Site) -> None:
    with tempfile.TemporaryDirectory() as home:  # its path is short
        done = run_persistently(site, Path(home))
        kept = list(Path(home, ".ssh").glob("distlaunch-*"))
        for path in kept:
            completed(["ssh", "-S", str(path), "-O", "exit", "x"])
        assert (done.returncode, len(kept)) == (0, 1), done.stderr
        assert Path(home, ".ssh").stat().st_mode & 0o777 == 0o700


def test_names_the_setting_where_a_connection_cannot_be_kept(site: Site) -> None:
    (home := site.directory / ("h" * 60)).mkdir()
    done = run_persistently(site, home)
    assert done.returncode == 69
    told = "host1: connection can't be kept open; ssh.persist needs a socket in ~/.ssh on this machine: "
    assert told in done.stderr, done.stderr
    assert f"{home}/.ssh" in done.stderr, "ssh names the path"


# `launcher: kubernetes`. No cluster runs here: a stand-in for kubectl reaches the testbed's hosts

WAITS = """
import os, signal
e = os.environ
tree = os.getcwd().partition("/runs/")[0]
os.write(1, f"ready {e['RANK']} {os.getpid()} {e['LOCAL_RANK']} {e['MASTER_ADDR']} {tree}\\n".encode())
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
    pods: list[dict[str, Any]] = [{"metadata": {"name": f"trainer-{number}"}} for number in (1, 2, 3)]
    for number, pod in enumerate(pods, 1):
        pod["spec"] = {"containers": [{"name": "sidecar"}, {"name": "main"}]}
        pod["status"] = {"phase": "Running", "podIP": bed.hosts[f"host{number}"].address}
    (directory := tmp_path / "bin").mkdir()
    (directory / "pods.json").write_text(json.dumps({"items": pods}))
    enter = " ".join(bed.argv("exec", "HOST", "--")).replace("HOST", '"$host"')
    text = f"""
        case "$KUBECTL_FAILS$*" in
            "get pods --selector=app=train --namespace=ml --output=json") exec cat {directory}/pods.json;;
            "exec --stdin --namespace=ml --container=main trainer-"[123]" -- "*)
                host=host${{5#trainer-}}; shift 6; exec {enter} "$@";;
            "get pods --selector=none"*) echo '{{"items": []}}';;
            *) echo "error: $KUBECTL_FAILS$*" >&2; exit 1;;
        esac"""
    program(directory / "kubectl", text)
    path = f"{directory}:{os.environ['PATH']}"
    return lambda fails: {**os.environ, "PATH": path, "KUBECTL_FAILS": fails}


def job_in(directory: Path) -> Path:
    return write_job(directory, WAITS, f"{JOB}python: {sys.executable}\n")


def test_ranks_run_in_pods_and_end_with_a_killed_one(bed: Bed, tmp_path: Path, kubectl: Env) -> None:
    before, store = bed.processes(), f"{tmp_path}/there"
    with running(job_in(tmp_path), "--set", f"sync.to={store}", env=kubectl("")) as run:
        ranks, first = run.wait_ready(2), bed.hosts["host1"].address
        assert sorted(run.stdout.splitlines()) == [
            f"[trainer-1:0] ready 0 {ranks[0]} 0 {first} {store}",
            f"[trainer-2:1] ready 1 {ranks[1]} 0 {first} {store}",
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
    done = distlaunch("run", str(job_in(tmp_path)), env={**os.environ, "PATH": "/nowhere"}, status=2)
    assert "can't run kubectl: No such file or directory" in done.stderr
