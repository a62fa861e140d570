"""One suite over every transport: six workers as 2 + 1 + 3 on three nodes, and what happens to them."""

import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.containers import Podman
from tests.cluster.hosts import Bed, Site
from tests.cluster.odd_hosts import installed
from tests.harness import (
    PATIENCE_S,
    ROOT,
    Run,
    children_of,
    cookie_holders,
    distlaunch,
    distlaunch_argv,
    ended_well,
    kill,
    nothing_was_dropped,
    running,
    wait_gone,
    write_job,
)

SLEEPER = """
    import os, signal, socket
    os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
    signal.pause()
"""
STUBBORN = """
    import os, signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
    while True:
        signal.pause()
"""
TRAINS = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.linspace(-1, 1, 60)[rank::size]
    weights = torch.full((2,), float(rank), requires_grad=True)
    dist.broadcast(weights.data, src=0)
    losses = []
    for _ in range(30):
        loss = (weights[0] * x + weights[1] - 3 * x).square().mean()
        weights.grad = None
        loss.backward()
        dist.all_reduce(weights.grad)
        weights.data -= 0.3 * weights.grad / size
        losses.append(loss.item())
    mine, all_of_them = weights.detach(), [torch.empty(2) for _ in range(size)]
    dist.all_gather(all_of_them, mine)
    assert all(torch.equal(mine, theirs) for theirs in all_of_them), all_of_them
    assert losses[-1] < losses[0] / 10, losses
    if rank == 0:
        print(f"trained: ok, {size} ranks")
    dist.destroy_process_group()
"""
"""By hand: the transport is the same to DistributedDataParallel, whose import takes a second of each rank."""
RANKS = 6


PODMAN = pytest.param("podman", marks=pytest.mark.together("containers on hosts"))


@pytest.fixture(params=["local", "ssh", "slurm", "command", PODMAN])
def nodes(request: pytest.FixtureRequest) -> str:
    """The part of a job file that says where it runs."""
    if request.param == "local":
        # Hosts of another name on this machine: `launcher: local` reaches each as a child process.
        where = "launcher: local"
    elif request.param == "slurm":
        request.getfixturevalue("allocation")
        where = "launcher: slurm"
    elif request.param == "podman":
        podman: Podman = request.getfixturevalue("containers")
        hosts: Bed = request.getfixturevalue("bed")
        # By way of the host: an exec has the network of who runs it, where the container has none of its own.
        words = hosts.argv("exec", "{host}", "--", *podman.words, "exec", "--interactive", "{host}")
        enter = json.dumps(words)
        where = f"launcher: {{command: {enter}}}\npython: {sys.executable}"
    elif request.param == "command":
        hosts = request.getfixturevalue("bed")
        enter = json.dumps(hosts.argv("exec", "{host}", "--"))
        where = f"launcher: {{command: {enter}}}"
    else:
        bed: Bed = request.getfixturevalue("bed")
        where = f"ssh: {{config: {bed.folder}/ssh_config}}"
    return f"""
gpus_per_node: 0
nodes:
  - {{host: host1, procs: 2}}
  - {{host: host2, procs: 1}}
  - {{host: host3, procs: 3}}
{where}
"""


@pytest.fixture(scope="module")
def containers(bed: Bed, podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """A container named like each host, on it; with the PIDs of all, by which the tests know processes."""
    with podman.running_on(bed, tmp_path_factory.getbasetemp()):
        yield podman


def parent_of(pid: int) -> int:
    """The parent's PID."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def all_ready(run: Run) -> dict[int, int]:
    """rank → pid, once all workers run."""
    return run.wait_ready(RANKS)


def test_the_layout(tmp_path: Path, nodes: str) -> None:
    worker = (
        "import os; e = os.environ; print(e['NODE_RANK'], e['LOCAL_RANK'], e['RANK'], e['LOCAL_WORLD_SIZE'])"
    )
    with running(write_job(tmp_path, worker, nodes)) as run:
        assert run.wait() == 0, run.stderr
        assert sorted(run.stdout.splitlines()) == [
            "[host1:0] 0 0 0 2",
            "[host1:1] 0 1 1 2",
            "[host2:2] 1 0 2 1",
            "[host3:3] 2 0 3 3",
            "[host3:4] 2 1 4 3",
            "[host3:5] 2 2 5 3",
        ]
        assert cookie_holders(run.run_folder().name) == []


def test_files_are_byte_exact(tmp_path: Path, nodes: str) -> None:
    worker = """
        import os, random, sys
        make = random.Random(int(os.environ["RANK"])).randbytes
        for stream in (sys.stdout, sys.stderr):
            for _ in range(50):
                stream.buffer.write(make(20011))
    """
    import random

    with running(write_job(tmp_path, worker, nodes + "logs: {console: none}")) as run:
        assert run.wait() == 0, run.stderr
        nothing_was_dropped(run.stderr)
        for rank in range(RANKS):
            make = random.Random(rank).randbytes
            for name in ("out", "err"):
                expected = b"".join(make(20011) for _ in range(50))
                assert (run.run_folder() / f"rank{rank}.{name}").read_bytes() == expected


def test_a_killed_worker_ends_all_within_two_seconds(tmp_path: Path, nodes: str) -> None:
    with running(write_job(tmp_path, SLEEPER, nodes)) as run:
        pids = all_ready(run)
        kill(pids[4])
        wait_gone(list(pids.values()), 2.0)
        assert run.wait() == 137
        assert "rank 4 (host3) failed first: killed by signal 9 (SIGKILL)" in run.stderr
        assert "ranks 0-3, 5: stopped by distlaunch" in run.stderr
        assert run.holders() == []


def test_stubborn_workers_are_gone_after_the_grace(tmp_path: Path, nodes: str) -> None:
    with running(write_job(tmp_path, STUBBORN, nodes), "--set", "timeouts.stop=1s") as run:
        pids = all_ready(run)
        kill(pids[0])
        wait_gone(list(pids.values()), 1.0 + 2.0)
        assert run.wait() == 137
        assert run.holders() == []


def test_the_controllers_death_ends_all(tmp_path: Path, nodes: str) -> None:
    with running(write_job(tmp_path, STUBBORN, nodes)) as run:
        pids = all_ready(run)
        run.process.kill()
        wait_gone(list(pids.values()), 10.0 + 2.0)
        wait_gone(run.holders(), 1.0)


def test_an_agents_death_ends_its_ranks_and_then_all(tmp_path: Path, nodes: str) -> None:
    with running(write_job(tmp_path, SLEEPER, nodes)) as run:
        pids = all_ready(run)
        kill(parent_of(pids[2]))
        wait_gone([pids[2]], 2.0)
        wait_gone(list(pids.values()), 2.0)
        assert run.wait() == 71
        assert "host2 was lost" in run.stderr
        assert run.holders() == []


def test_an_interrupt_ends_all(tmp_path: Path, nodes: str) -> None:
    with running(write_job(tmp_path, SLEEPER, nodes)) as run:
        pids = all_ready(run)
        run.process.send_signal(signal.SIGINT)
        wait_gone(list(pids.values()), 2.0)
        assert run.wait() == 130
        assert run.holders() == []


def test_daemons_of_workers_are_swept(tmp_path: Path, nodes: str) -> None:
    worker = """
        import os, signal, sys
        rank = os.environ["RANK"]
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(1, f"ready {100 + int(rank)} {os.getpid()}\\n".encode())
                signal.pause()
            os._exit(0)
        os.write(1, f"ready {rank} {os.getpid()}\\n".encode())
        signal.pause()
    """
    with running(write_job(tmp_path, worker, nodes)) as run:
        pids = run.wait_ready(2 * RANKS)
        assert len(pids) == 2 * RANKS
        kill(pids[5])
        wait_gone(list(pids.values()), 2.0)
        assert run.wait() == 137
        assert run.holders() == []


@pytest.mark.parametrize("nodes", ["ssh", "podman"], indirect=True)
def test_ddp_trains_and_all_ranks_agree(tmp_path: Path, nodes: str) -> None:
    # All hosts share this machine: fewer ranks, and none that takes all cores because its host has no other.
    where = nodes.replace("procs: 3", "procs: 1") + "env: {OMP_NUM_THREADS: 1}\n"
    job = tmp_path / "job.yaml"
    job.write_text(f"script: {ROOT}/scripts/quickstart.py\nargs: [--steps, 30, --sample, 20]\n{where}")
    done = distlaunch("run", str(job))
    ended_well(done.returncode, done.stdout, done.stderr, last="quickstart: ok, 4 ranks")
    assert "all 4 ranks joined the rendezvous at" in done.stderr


@pytest.mark.parametrize("nodes", ["command"], indirect=True)
def test_ranks_train_and_agree(tmp_path: Path, nodes: str) -> None:
    where = nodes.replace("procs: 3", "procs: 1") + "env: {OMP_NUM_THREADS: 1}\n"
    done = distlaunch("run", str(write_job(tmp_path, TRAINS, where)))
    ended_well(done.returncode, done.stdout, done.stderr, last="trained: ok, 4 ranks")
    assert "all 4 ranks joined the rendezvous at" in done.stderr


def test_pasted_shell_commands_run_the_same_job(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    bed: Bed = request.getfixturevalue("bed")
    job = tmp_path / "job.yaml"
    job.write_text(
        f"""
script: {ROOT}/scripts/basics/all_reduce.py
gpus_per_node: 0
nodes: [{{host: host1, procs: 2}}, {{host: host2, procs: 1}}, {{host: host3, procs: 1}}]
ssh: {{config: {bed.folder}/ssh_config}}
env: {{ODD: "it's $HOME `x`\\n\\"quoted\\""}}
"""
    )
    text = distlaunch("dry-run", str(job), "--format", "shell").stdout
    blocks = dict(block.split("\n", 1) for block in text.split("# node ")[1:])
    assert list(blocks) == ["host1", "host2", "host3"]
    plain = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    shells = [
        subprocess.Popen(
            bed.argv("exec", name, "--", "/bin/sh"),
            env=plain,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in blocks
    ]
    outputs = [""] * len(shells)
    for shell, block in zip(shells, blocks.values(), strict=True):
        assert shell.stdin is not None
        shell.stdin.write(block)
        shell.stdin.close()
        shell.stdin = None
    for i, shell in enumerate(shells):
        outputs[i] = shell.communicate(timeout=PATIENCE_S)[0]
    assert "all_reduce: ok, 4 ranks" in outputs[0], outputs


def test_check_port_on_all_nodes(tmp_path: Path, nodes: str) -> None:
    job = write_job(tmp_path, "", nodes)
    done = distlaunch("check-port", str(job), "--json")
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


def test_check_port_names_the_owner_on_another_host(tmp_path: Path, bed: Bed) -> None:
    serve = "import socket; s = socket.create_server(('', 29777)); print('up', flush=True); s.accept()"
    server = subprocess.Popen(
        bed.argv("exec", "host1", "--", sys.executable, "-c", serve), stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"up\n"
        where = f"""
            ssh: {{config: {bed.folder}/ssh_config}}
            gpus_per_node: 0
            nodes: [host1, host2]
            master_port: 29777
        """
        done = distlaunch("check-port", str(write_job(tmp_path, "", where)), "--json")
        (report,) = json.loads(done.stdout)
        assert done.returncode == 1
        assert report["free"] is False
        assert report["dials"] == []
        assert report["owners"][0]["command"].startswith("python")
        ran = distlaunch("run", str(write_job(tmp_path, "print('started')", where)))
        assert ran.returncode == 75
        assert f"(pid {report['owners'][0]['pid']})" in ran.stderr
        assert "started" not in ran.stdout
    finally:
        server.kill()
        server.communicate()


def test_the_job_file_for_two_nodes(tmp_path: Path, bed: Bed) -> None:
    settings = [f"ssh.config={bed.folder}/ssh_config", f"logs.dir={tmp_path}", "args=[--steps, 150]"]
    options = [part for one in settings for part in ("--set", one)]
    done = distlaunch("run", str(ROOT / "configs/hosts/two_nodes.yaml"), *options)
    ended_well(done.returncode, done.stdout, done.stderr, last="sync_sgd: ok, 3 ranks")


def test_an_agent_that_was_started_ahead_in_vain_leaves_no_zombie(tmp_path: Path, bed: Bed) -> None:
    where = f"ssh: {{config: {bed.folder}/ssh_config}}\ngpus_per_node: 0\nnodes: [host1]"
    with running(write_job(tmp_path, SLEEPER, where)) as run:
        run.wait_ready(1)
        names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in children_of(run.process.pid)]
        assert names == ["ssh"]


@pytest.mark.parametrize("shell", ["bash", "csh", "fish"])
@pytest.mark.parametrize("whose", ["the job's", "the node's"])
def test_a_home_is_that_of_the_user_on_the_node(site: Site, shell: str, whose: str) -> None:
    there = site.folder / "home-there"
    (there / "w").mkdir(parents=True)
    (there / "w" / "t.py").write_text("import os, sys; print(sys.argv[0], os.getcwd())")
    (there / "python").symlink_to(sys.executable)
    name = site.name("odd", "host2", site.sshd("host2", over=site.login(there, installed(shell))))
    paths = {"workdir": "~/w", "python": "~/python"}
    job = {"script": "t.py", "nodes": [{"host": name}], "gpus_per_node": 0, "ssh": {"config": "ssh_config"}}
    job |= {"nodes": [{"host": name, **paths}]} if whose == "the node's" else paths
    (site.folder / "job.yaml").write_text(json.dumps(job))
    done = distlaunch("run", str(site.folder / "job.yaml"))
    assert done.stdout == f"[odd:0] {there}/w/t.py {there}/w\n", done.stderr
    port = distlaunch("check-port", str(site.folder / "job.yaml"))
    assert port.returncode == 0, port.stderr


def _with_home(home: Path, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of a user whose home, as ssh has it from the user database, is that."""
    us = pwd.getpwuid(os.geteuid())
    users = folder / "passwd"
    users.write_text(f"{us.pw_name}:x:{us.pw_uid}:{us.pw_gid}::{home}:/bin/sh\n")
    inside = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/passwd && exec "$@"', str(users)]
    argv = [*inside, *distlaunch_argv(*words)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_a_connection_is_kept_for_a_user_who_had_no_ssh_folder(tmp_path: Path, bed: Bed) -> None:
    where = f"ssh: {{config: {bed.folder}/ssh_config, persist: 60s}}\ngpus_per_node: 0\nnodes: [host1]"
    job = write_job(tmp_path, "", where)
    with tempfile.TemporaryDirectory() as home:  # its path is short
        done = _with_home(Path(home), tmp_path, "run", str(job))
        kept = list(Path(home, ".ssh").glob("distlaunch-*"))
        for path in kept:
            subprocess.run(["ssh", "-S", str(path), "-O", "exit", "x"], capture_output=True, check=False)
        assert (done.returncode, len(kept)) == (0, 1), done.stderr
        assert Path(home, ".ssh").stat().st_mode & 0o777 == 0o700


def test_a_connection_that_can_not_be_kept_says_which_setting_asks_for_it(tmp_path: Path, bed: Bed) -> None:
    (home := tmp_path / ("h" * 60)).mkdir()
    where = f"ssh: {{config: {bed.folder}/ssh_config, persist: 60s}}\ngpus_per_node: 0\nnodes: [host1]"
    done = _with_home(home, tmp_path, "run", str(write_job(tmp_path, "", where)))
    assert done.returncode == 69
    told = "host1: connection can't be kept open; ssh.persist needs a socket in ~/.ssh on this machine: "
    assert told in done.stderr, done.stderr
    assert f"{home}/.ssh" in done.stderr, "ssh names the path"
