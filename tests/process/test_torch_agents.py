"""torch's elastic agents on this machine: all ranks agree, failures are told, nothing is left."""

import re
import signal
from pathlib import Path

import pytest

from tests.harness import agents_of, distlaunch, ended_well, running, wait_gone, write_job

NODES = """
nodes: 2
procs_per_node: 2
gpus_per_node: 0
rendezvous: {backend: c10d}
"""
FAILS = """
    import os, signal, sys
    # Each line in one write: torch's agent gives all its workers the same pipe.
    def main():
        os.write(1, f"ready {os.environ['RANK']} {os.getpid()} of {os.environ['WORLD_SIZE']}\\n".encode())
        while not os.path.exists("all-ready"):
            signal.sigtimedwait([], 0.02)
        if os.environ["RANK"] == "3":
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
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    ours = os.environ["DISTLAUNCH_BACKEND"], os.environ["TOKEN"]
    os.write(1, f"sum {total} of {dist.get_world_size()} {ours} restarted {count}\\n".encode())
    dist.barrier()
    dist.destroy_process_group()
    if count == "0":
        raise SystemExit(7)  # so that torch starts all again, once
"""


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR of all that runs: nothing may be left there."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_all_ranks_agree_and_torch_restarts_them(tmp_path: Path, env: Path) -> None:
    job = write_job(tmp_path, AGREES, f"{NODES}restarts: {{max: 1}}\nenv: {{TOKEN: secret}}\n")
    done = distlaunch("run", str(job), "--set", "procs_per_node=1")
    ended_well(done.returncode, done.stdout, done.stderr, last="restarted 1\n", times=2)
    for count in (0, 1):
        line = f"sum 1 of 2 ('gloo', 'secret') restarted {count}\n"
        assert done.stdout.count(f"[node0] {line}") == done.stdout.count(f"[node1] {line}") == 1
    assert "both torch agents joined the rendezvous at 127.0.0.1:" in done.stderr
    assert "2 torch agents on 2 nodes finished" in done.stderr
    assert list(env.iterdir()) == []


@pytest.mark.parametrize("arguments", [["recorded"], []])
def test_the_root_cause_of_a_failing_rank_is_told(tmp_path: Path, env: Path, arguments: list[str]) -> None:
    job = write_job(tmp_path, FAILS, f"{NODES}args: {arguments}\n")
    with running(job) as run:
        pids = run.wait_ready(4)
        (tmp_path / "all-ready").touch()
        assert run.wait() == 1
        wait_gone(list(pids.values()), 0.5)
        assert run.holders() == []
        # torch numbers agents of one address by their PIDs.
        (node,) = map(int, re.findall(r"\[node(\d)\] ready 3 ", run.stdout))
        first = f"distlaunch: torch's agent on node{node} failed first: exit status 1\n"
        told = run.stderr.rpartition(first)[2]
        assert "distlaunch:   | ValueError: rank 3 is sad\n" in told
        assert re.search(rf"\| root cause: rank 3 \(local rank 1, pid {pids[3]}\): exit status 1\n", told)
        assert "launch_agent" not in told, "torch's own traceback"
        assert f"torch's agent on node{1 - node}: stopped by distlaunch" in told
        (ended,) = [e for e in run.events("WorkerExited") if e["node"] == node]
        record = ended["error_record"]
        assert (record["message"] if record else None) == ("ValueError: rank 3 is sad" if arguments else None)
    assert list(env.iterdir()) == []


def test_an_interrupt_ends_torchs_agents_and_their_workers(tmp_path: Path, env: Path) -> None:
    with running(write_job(tmp_path, FAILS, NODES)) as run:
        pids = run.wait_ready(4)
        run.process.send_signal(signal.SIGINT)
        wait_gone(list(pids.values()), 5.0)
        assert run.wait() == 130
        assert run.holders() == []
    assert list(env.iterdir()) == []


def test_a_killed_controller_leaves_nothing(tmp_path: Path, env: Path) -> None:
    with running(write_job(tmp_path, FAILS, f"{NODES}timeouts: {{stop: 2s}}")) as run:
        pids = run.wait_ready(4)
        agents = agents_of(run.process.pid)
        run.process.kill()
        wait_gone([*pids.values(), *run.holders(), *agents], 5.0)
    assert list(env.iterdir()) == []


def test_what_torch_can_not_do_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path, FAILS, f"{NODES}spares: [z]\n")
    refused = distlaunch("run", str(job))
    assert refused.returncode == 2
    assert "job.yaml:7:9: spares: torch's elastic agents don't support spares" in refused.stderr
