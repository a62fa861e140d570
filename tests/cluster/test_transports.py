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
from typing import NamedTuple

import pytest

from tests.cluster.containers import Podman
from tests.cluster.hosts import Bed, Site, hiding_argv, parent_of
from tests.cluster.workers import DAEMONS, SLEEPER, STUBBORN
from tests.harness import (
    ROOT,
    Done,
    Going,
    Run,
    all_ended_well,
    completed,
    distlaunch,
    distlaunch_argv,
    ended_well,
    kill,
    nothing_was_dropped,
    running,
    wait_gone,
    write_job,
)

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
    else:
        bed: Bed = request.getfixturevalue("bed")
        enter = bed.argv("exec", "{host}", "--")
        where = f"ssh: {{config: {bed.directory}/ssh_config}}"
        if request.param == "command":
            where = f"launcher: {{command: {json.dumps(enter)}}}"
        elif request.param == "podman":
            podman: Podman = request.getfixturevalue("containers")
            # By way of the host: the container has the network of who runs the exec.
            enter += [*podman.words, "exec", "--interactive", "{host}"]
            where = f"launcher: {{command: {json.dumps(enter)}}}\npython: {sys.executable}"
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

        def connected(host, port):
            while True:
                try:
                    return socket.create_connection((host, port))
                except ConnectionRefusedError:
                    time.sleep(0.05)  # its rank doesn't listen yet

        ends = [end.rpartition(":") for end in json.loads(os.environ["ENDS"])]
        host, _, port = ends[int(os.environ["RANK"])]
        servers = [socket.create_server((host, int(port)))]
        if os.environ["RANK"] == "0":
            servers.append(socket.create_server(("", int(os.environ["FREE"]))))
        ends.append((ends[0][0], ":", os.environ["FREE"]))
        links = [connected(host, int(port)) for host, _, port in ends]
        for server in servers:
            for _ in ends[:-1]:
                server.accept()
        """
    env = 'env: {ENDS: "{hosts_json:7411}", FREE: "{port:free}"}\n'
    distlaunch("run", str(write_job(tmp_path, worker, nodes + env)), status=0)


def test_code_gets_to_the_nodes_and_files_come_back(tmp_path: Path, nodes: str) -> None:
    """Also into containers, which don't have the directory of the job file."""
    home = tmp_path / "home"
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "big.bin").write_bytes(random.Random(7).randbytes(1 << 20))
    worker = """
        import hashlib, os, pathlib
        pathlib.Path(f"made-{os.environ['RANK']}.txt").write_text(os.environ["RANK"])
        print(hashlib.sha256(pathlib.Path("package/big.bin").read_bytes()).hexdigest())
    """
    keys = f"sync: {{to: {tmp_path}/there}}\ncollect: {{paths: ['made-*.txt'], from: all}}\n"
    job = write_job(tmp_path, worker, nodes + keys)
    with running(job, env={**os.environ, "HOME": str(home)}) as run:
        assert run.wait() == 0, run.stderr
        digest = hashlib.sha256((tmp_path / "package" / "big.bin").read_bytes()).hexdigest()
        assert run.stdout.count(digest) == RANKS
        collected = run.run_directory() / "collected"
        made = {path.name: path.read_text() for path in collected.rglob("*.txt")}
        assert made == {f"made-{rank}.txt": str(rank) for rank in range(RANKS)}
        assert {path.name for path in collected.iterdir()} == {"host1", "host2", "host3"}


class Strike(NamedTuple):
    """Who of a run gets a signal, and how it ends then."""

    worker: str
    whom: Callable[[Run, dict[int, int]], int]
    signum: int
    status: int
    told: str
    within_s: float = 2.0


KILLED = "rank 4 (host3) failed first: killed by signal 9 (SIGKILL)"
STRIKES = {
    "a rank among daemons": Strike(DAEMONS, lambda _, pids: pids[4], signal.SIGKILL, 137, KILLED),
    "a stubborn rank": Strike(STUBBORN, lambda _, pids: pids[4], signal.SIGKILL, 137, KILLED, 1.0 + 2.0),
    "an agent": Strike(SLEEPER, lambda _, pids: parent_of(pids[2]), signal.SIGKILL, 71, "host2 was lost"),
    "the controller": Strike(STUBBORN, lambda run, _: run.process.pid, signal.SIGKILL, -9, "", 1.0 + 2.0),
    "an interrupt": Strike(SLEEPER, lambda run, _: run.process.pid, signal.SIGINT, 130, "stopped by SIGINT"),
}


@pytest.mark.parametrize("nodes", ["command", PODMAN], indirect=True)
@pytest.mark.parametrize("strike", STRIKES.values(), ids=STRIKES)
def test_no_process_of_a_job_outlives_it(tmp_path: Path, nodes: str, strike: Strike) -> None:
    """For ssh and Slurm the fault catalogue does all this, and more."""
    with running(write_job(tmp_path, strike.worker, nodes), "--set", "timeouts.stop=1s") as run:
        pids = run.wait_ready(2 * RANKS if strike.worker == DAEMONS else RANKS)
        kill(strike.whom(run, pids), strike.signum)
        wait_gone(list(pids.values()), strike.within_s)
        assert run.wait() == strike.status
        assert strike.told in run.stderr
        if strike.status == 137:
            assert "ranks 0-3, 5: stopped by distlaunch" in run.stderr
        wait_gone(run.holders(), 1.0 if strike.status < 0 else 0.0)


def test_the_job_file_for_two_nodes(tmp_path: Path, bed: Bed) -> None:
    settings = [f"ssh.config={bed.directory}/ssh_config", f"logs.dir={tmp_path}", "args=[--steps, 150]"]
    options = [part for one in settings for part in ("--set", one)]
    done = distlaunch("run", str(ROOT / "configs/hosts/two_nodes.yaml"), *options)
    ended_well(done.returncode, done.stdout, done.stderr, last="sync_sgd: ok, 3 ranks")
    assert "all 3 ranks joined the rendezvous at" in done.stderr


def test_pasted_shell_commands_run_the_same_job(tmp_path: Path, bed: Bed) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        f"""
script: {ROOT}/scripts/basics/all_reduce.py
gpus_per_node: 0
nodes: [{{host: host1, procs: 2}}, {{host: host2, procs: 1}}]
ssh: {{config: {bed.directory}/ssh_config}}
env: {{ODD: "it's $HOME `x`\\n\\"quoted\\""}}
"""
    )
    text = distlaunch("dry-run", str(job), "--format", "shell").stdout
    blocks = dict(block.split("\n", 1) for block in text.split("# node ")[1:])
    assert list(blocks) == ["host1", "host2"]
    plain = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    with contextlib.ExitStack() as stack:
        shells = []
        for name, block in blocks.items():
            (tmp_path / name).write_text(block)
            pasted = stack.enter_context((tmp_path / name).open())
            argv = bed.argv("exec", name, "--", "/bin/sh")
            shells.append(Going(tmp_path, argv, env=plain, stdin=pasted))
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


def test_names_the_owner_of_the_port_on_another_host(site: Site) -> None:
    port = site.server("host1", "server.accept()")
    job = str(site.job(["host1", "host2"], master_port=port))
    done = distlaunch("check-port", job, "--json")
    (report,) = json.loads(done.stdout)
    assert (done.returncode, report["free"], report["dials"]) == (1, False, [])
    assert report["owners"][0]["command"].startswith("python")
    ran = distlaunch("run", job, status=75)
    assert f"(pid {report['owners'][0]['pid']})" in ran.stderr
    assert site.started() == []


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
