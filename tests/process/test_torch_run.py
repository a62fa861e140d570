"""torch's own agents as workers on this machine."""

import importlib.util
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ROOT, Going, agents_of, distlaunch, ended_well, running, wait_gone, write_job

NODES = """
nodes: 2
procs_per_node: 2
gpus_per_node: 0
rendezvous: {{backend: etcd-v2, endpoint: {}}}
"""
FAILS = """
    import os, signal, sys
    # Each line in one write: torch's agent gives all its ranks the same pipe.
    def main():
        os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
        if os.environ["RANK"] == "3":
            open("gate").read()
            raise ValueError("rank 3 is sad")
        signal.pause()
    if "recorded" in sys.argv and os.environ["RANK"] == "3":  # the import takes a second
        from torch.distributed.elastic.multiprocessing.errors import record
        main = record(main)
    main()
"""
AGREES = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    attempt = os.environ["TORCHELASTIC_RUN_ID"].rpartition("-")[2]
    ours = os.environ["DISTLAUNCH_BACKEND"], os.environ["TOKEN"]
    os.write(1, f"sum {total} of {dist.get_world_size()} {ours} in attempt {attempt}\\n".encode())
    dist.barrier()
    dist.destroy_process_group()
    if attempt == "0" and os.environ["RANK"] == "1":
        raise SystemExit(7)  # so that all start again, once
"""


@pytest.fixture
def nothing_in_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TMPDIR of all that runs: nothing may be left there."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    yield
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """The endpoint of an etcd server with the v2 API, at an address that no other test's has."""
    if shutil.which("etcd") is None or importlib.util.find_spec("etcd") is None:
        pytest.skip("missing: etcd (etcd-server), or the Python package python-etcd")
    pid = os.getpid()
    address = f"127.{1 + pid // 65536}.{pid // 256 % 256}.{pid % 256}"
    clients, peers = f"http://{address}:2379", ["--listen-peer-urls", f"http://{address}:2380"]
    listen = ["--listen-client-urls", clients, "--advertise-client-urls", clients, *peers]
    server = Going(tmp_path, ["etcd", "--enable-v2", "--data-dir", str(tmp_path / "etcd"), *listen])
    try:
        server.wait_for("serving insecure client requests")
        yield f"{address}:2379"
    finally:
        server.kill()


@pytest.mark.usefixtures("nothing_in_tmpdir")
def test_all_ranks_agree_and_a_failure_restarts_all(tmp_path: Path, etcd: str) -> None:
    restarts = "restarts: {max: 1, backoff: 100ms}\nenv: {TOKEN: secret}\n"
    job = write_job(tmp_path, AGREES, NODES.format(etcd) + restarts)
    done = distlaunch("run", str(job), "--set", "procs_per_node=1")
    ended_well(done.returncode, done.stdout, done.stderr, last="in attempt 1\n", times=2)
    for attempt in (0, 1):
        line = f"sum 1 of 2 ('gloo', 'secret') in attempt {attempt}\n"
        assert done.stdout.count(f"[node0:0] {line}") == done.stdout.count(f"[node1:1] {line}") == 1
    assert re.search(r"torch agent \d \(node\d\) failed: exit status 1; restart 1 of 1", done.stderr)
    assert "2 torch agents on 2 nodes simulated on this machine finished" in done.stderr


@pytest.mark.parametrize("words", [["recorded"], []])
@pytest.mark.usefixtures("nothing_in_tmpdir")
def test_reports_the_root_cause_of_a_rank(tmp_path: Path, gate: Path, etcd: str, words: list[str]) -> None:
    with running(write_job(tmp_path, FAILS, f"{NODES.format(etcd)}args: {words}\n")) as run:
        pids = run.wait_ready(4)
        gate.write_text("")
        assert run.wait() == 1
        wait_gone(list(pids.values()), 0.5)
        assert run.holders() == []
    # torch numbers agents of one address by their PIDs.
    (node,) = map(int, re.findall(r"\[node(\d):\d\] ready 3 ", run.stdout))
    first = f"distlaunch: torch agent {node} (node{node}) failed first: exit status 1\n"
    told = run.stderr.rpartition(first)[2]
    assert "distlaunch:   | ValueError: rank 3 is sad\n" in told
    assert re.search(rf"\| root cause: rank 3 \(local rank 1, pid {pids[3]}\): exit status 1\n", told)
    assert "launch_agent" not in told, "torch's own traceback"
    assert f"torch agent {1 - node}: stopped by distlaunch" in told
    (ended,) = (event for event in run.events("WorkerExited") if event["node"] == node)
    record = ended["error_record"]
    assert (record["message"] if record else None) == ("ValueError: rank 3 is sad" if words else None)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
@pytest.mark.usefixtures("nothing_in_tmpdir", "gate")
def test_the_controllers_end_ends_torchs_agents(tmp_path: Path, etcd: str, signum: int, status: int) -> None:
    with running(write_job(tmp_path, FAILS, f"{NODES.format(etcd)}timeouts: {{stop: 2s}}")) as run:
        pids = run.wait_ready(4)
        agents = agents_of(run.process.pid)
        run.process.send_signal(signum)
        wait_gone([*pids.values(), *agents], 5.0)
        assert run.wait() == status
        wait_gone(run.holders(), 5.0)


def test_the_example_job_file_for_etcd_runs(tmp_path: Path, etcd: str) -> None:
    settings = (f"logs.dir={tmp_path / 'runs'}", f"rendezvous.endpoint={etcd}", "procs_per_node=1")
    job = str(ROOT / "configs" / "hosts" / "etcd.yaml")
    done = distlaunch("run", job, *(part for one in settings for part in ("--set", one)))
    ended_well(done.returncode, done.stdout, done.stderr, last="all_reduce: ok, 2 ranks")


def test_reports_a_missing_etcd_server(tmp_path: Path) -> None:
    job = write_job(tmp_path, "", f"{NODES.format('127.0.0.1:1')}")
    done = distlaunch("run", str(job), "--set", "procs_per_node=1", "--set", "nodes=1", status=1)
    assert "hint: that node reaches no etcd server at rendezvous.endpoint" in done.stderr
