"""Faults that restarts answer, where their number and patience end, and what watching tells."""

import re
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Site, parent_of
from tests.cluster.workers import SLEEPER, worker
from tests.faults import scenes
from tests.faults.figures import Figures, Pace
from tests.faults.networks import closed, fell
from tests.faults.scenes import NOISE_S, RANKS, earlier_seen, here, interrupted, started_run, starts, there
from tests.harness import ended_well, kill, open_gate, running, wait_gone


@pytest.mark.fault(59, "a crash loop", promise="9")
def test_a_crash_loop_ends_after_its_restarts(tmp_path: Path, figures: Figures) -> None:
    job = here(tmp_path, worker("ready()\nsys.exit(3)"), restarts={"max": 3, "backoff": "10ms"})
    with running(job) as run:
        assert run.wait() == 3
        attempts = run.stdout.count(" of attempt ")
        figures("attempts, with three restarts", attempts, at_most=4, unit="")
        assert attempts == 4
        assert "failed first: exit status 3; not restarting: already restarted 3 times" in run.stderr
        assert run.holders() == []


STORE = worker("""
    import torch.distributed as dist
    os.write(1, f"port {os.environ['MASTER_PORT']} of attempt {ATTEMPT}\\n".encode())
    open("gate").read()
    dist.init_process_group("gloo")
    os.write(1, b"joined\\n")
    dist.destroy_process_group()
""")


@pytest.mark.fault(60, "the rendezvous port is stolen between hold and listen", promise="9")
def test_a_stolen_port_is_replaced_without_a_restart(tmp_path: Path, gate: Path, figures: Figures) -> None:
    with running(here(tmp_path, STORE)) as run:

        def ports() -> list[int]:
            return [int(port) for port in re.findall(r"port (\d+) of attempt", run.stdout)]

        run.wait_for(" of attempt 0\n")
        (port,) = ports()
        with socket.create_server(("", port)):  # sets SO_REUSEADDR, and listens at once
            began = time.monotonic()
            open_gate(gate)
            run.wait_for(f"port {port} on node0 was taken by ")
            figures("noticed", time.monotonic() - began, at_most=10.0)
            run.wait_for(" of attempt 0\n", times=2)
            open_gate(gate)
            ended_well(run.wait(), run.stdout, run.stderr, last="joined\n")
        first, second = ports()  # and both are the attempt of no restart: it is not counted
        assert first != second
        assert "failed first" not in run.stderr


@pytest.mark.everywhere
@pytest.mark.fault(61, "a node is lost, no spare is there, and it does not return", promise="8")
def test_gives_up_where_no_node_can_replace_a_lost_one(site: Site, pace: Pace, figures: Figures) -> None:
    timeouts = {"rejoin": "3s"}
    job = there(site, ["host1", "host2"], SLEEPER, pace, restarts={"max": 1}, timeouts=timeouts)
    with started_run(job, 2) as (run, started):
        with closed(site.bed, "host2"):
            began = time.monotonic()
            kill(parent_of(started[1]))  # its guardian says that the node is clean: no fence
            assert run.wait() == scenes.NODE_LOST
            took_s = time.monotonic() - began
        # A slurmd that refuses is asked again by srun for ten seconds.
        limit_s = 30.0 if site.bed.launcher else 3.0 + pace.stop_s + 2.0
        figures("gave up", took_s, at_most=limit_s)
        assert took_s >= 3.0
        assert "host2 was lost: its agent was killed by signal 9 (SIGKILL);" in run.stderr
        assert "only 1 of 2 required nodes available after waiting 3 s (timeouts.rejoin)" in run.stderr
        assert run.stdout.count(" of attempt ") == 2
        assert run.holders() == []


THERE = ["host1", "host2", "host3"]
SHELL = ["/bin/sh", "-c", "echo ready $RANK $$ of attempt $TORCHELASTIC_RESTART_COUNT; exec sleep 1000"]
"""A worker that ends at SIGTERM, and whose start costs next to nothing."""


@pytest.mark.fault(74, "a worker is killed, restart in place", promise="6")
@pytest.mark.parametrize("nodes", ["here", "ssh", "slurm"], indirect=True)
def test_restarts_in_place(tmp_path: Path, nodes: str, figures: Figures) -> None:
    """All start again, soon, on the nodes where they were."""
    job = tmp_path / "job.yaml"
    job.write_text(f"{nodes}restarts: {{max: 1}}\ncommand: {SHELL!r}\n")
    with running(job) as run:
        run.wait_for(" of attempt 0\n", RANKS)
        pids = run.worker_pids()
        agents = {rank: parent_of(pid) for rank, pid in pids.items()}
        killed_at = time.time()
        kill(pids[1])
        run.wait_for(" of attempt 1\n", RANKS)
        assert {rank: parent_of(pid) for rank, pid in run.worker_pids().items()} == agents, "other agents"
        interrupted(run)
        started_at = [event["time"] for event in run.events("WorkerStarted")]
    assert len(started_at) == 2 * RANKS
    # The promise is a tenth of this, on a machine that does nothing else, where the others end at SIGTERM.
    took_ms = 1000 * (max(started_at) - killed_at)
    figures("until the last exec of the next attempt", took_ms, at_most=500.0, unit="ms")


MEETS = worker("""
    ready()
    print("the master is", os.environ["MASTER_ADDR"], "on", os.uname().nodename, flush=True)
    wait()
""")
MASTERS = re.compile(rb"the master is (\S+) on \S+\n")


@pytest.mark.long
@pytest.mark.everywhere
@pytest.mark.fault(75, "the first host falls, a spare is there", promise="6")
def test_a_spare_takes_the_place_of_a_lost_node(site: Site, pace: Pace, figures: Figures) -> None:
    before = site.processes()
    job = there(site, THERE[:2], MEETS, pace, spares=THERE[2:])
    with started_run(job, 2) as (run, started):
        with closed(site.bed, "host1"):
            began = time.monotonic()
            fell(site.bed, "host1", before)
            run.wait_for("host1 was lost")
            told_s = time.monotonic() - began
            # sshd's end reaches us at once; srun tells of slurmstepd's only when Slurm has noticed.
            figures("told", told_s, at_most=pace.lease_s * 1.5 if site.bed.launcher else 1.0)
            wait_gone([started[0]], 2.0)
            starts(run, 1, 2)
            limit_s = told_s + pace.fence_s + 5.0  # it can't say any more that it is empty
            figures("goes on with the spare", time.monotonic() - began, at_most=limit_s)
            run.wait_until(lambda: len(MASTERS.findall(run.out)) >= 4, "four masters")
        assert earlier_seen(run, 1) == 0
        run.wait_for("continuing with 2 of 2 nodes: host2, host3")
        # ssh knows a host's address, Slurm its name.
        addresses = [site.bed.hosts[host].address for host in THERE]
        first, second, _ = (name.encode() for name in (THERE if site.bed.launcher else addresses))
        assert MASTERS.findall(run.out) == [first, first, second, second]
        interrupted(run)


STANDS = worker("""
    def wait_for_nobody():
        wait()
    ready()
    if ATTEMPT == "1":
        sys.exit()
    if RANK == "1":
        wait_for_nobody()
    while True:
        print("at work", flush=True)
        time.sleep(0.1)
""")
PY_SPY = shutil.which("py-spy", path=str(Path(sys.executable).parent))
TOLD_S, DUMP_S = 2.0 * 1.25 + 2.0 + 2.0 / 8, 10.0
"""So long may a stall of 2 s take to be told, which is let spread for 2 s; so long stacks may take."""


@pytest.mark.skipif(PY_SPY is None, reason="py-spy is missing")
@pytest.mark.fault(78, "a rank stalls, with on_stall: restart", promise="8")
def test_names_and_restarts_a_stalled_rank(tmp_path: Path, figures: Figures) -> None:
    keys = {"timeouts": {"stall": "2s"}, "on_stall": "restart", "restarts": {"max": 1}}
    with running(here(tmp_path, STANDS, nodes=2, **keys)) as run:
        pid = starts(run, 0, 2)[1]
        began = time.monotonic()
        run.wait_for("stalled: ")
        figures("told", time.monotonic() - began, at_most=TOLD_S + NOISE_S)
        run.wait_for("rank 1 is blocked in: ")
        figures("its stack told", time.monotonic() - began, at_most=TOLD_S + DUMP_S)
        assert run.wait() == 0, run.stderr
        words = f"rank 1 (node1, pid {pid}): no output, CPU or GPU use"
        assert f"stalled: {words} for 2 s; rank 0 is still active" in run.stderr
        stack = r"wait \(worker.py:\d+\) < wait_for_nobody \(worker.py:\d+\)"
        assert re.search(f"is blocked in: {stack}", run.stderr)
        assert re.search(
            r"rank 1 \(node1\) stalled for 2 s in wait \(worker.py:\d+\); restart 1 of 1", run.stderr
        )
        assert "finished" in run.stderr
        assert "wait_for_nobody" in (run.run_directory() / "rank1.stack").read_text()
