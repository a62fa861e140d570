"""Faults that restarts answer, and where their number and their patience end."""

import re
import socket
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Site, parent_of
from tests.faults.attempts import NODE_LOST, SLEEPER, here, starts, there
from tests.faults.figures import Figures, Pace
from tests.faults.networks import closed
from tests.faults.scenes import open_gate
from tests.harness import ended_well, kill, running

CONNECT_S = 30.0
REJOIN_S = 3.0


@pytest.mark.fault(59, "a crash loop", promise="9")
def test_a_crash_loop_ends_after_its_restarts(tmp_path: Path, figures: Figures) -> None:
    job = here(tmp_path, "ready()\nsys.exit(3)", restarts={"max": 3, "backoff": "10ms"})
    with running(job) as run:
        assert run.wait() == 3
        attempts = run.stdout.count(" of attempt ")
        figures("attempts, with three restarts", attempts, at_most=4, unit="")
        assert attempts == 4
        assert "failed first: exit status 3; not restarting: already restarted 3 times" in run.stderr
        assert run.holders() == []


STORE = """
import torch.distributed as dist
os.write(1, f"port {os.environ['MASTER_PORT']} of attempt {ATTEMPT}\\n".encode())
open("gate").read()
dist.init_process_group("gloo")
os.write(1, b"joined\\n")
dist.destroy_process_group()
"""


@pytest.mark.fault(60, "the rendezvous port is stolen between hold and listen", promise="9")
def test_a_stolen_port_is_replaced_without_a_restart(tmp_path: Path, gate: Path, figures: Figures) -> None:
    with running(here(tmp_path, STORE)) as run:
        run.wait_for(" of attempt 0\n")
        port = _ports(run.stdout)[0]
        with socket.create_server(("", port)):  # sets SO_REUSEADDR, and listens at once
            began = time.monotonic()
            open_gate(gate)
            run.wait_for(f"port {port} on node0 was taken by ")
            figures("noticed", time.monotonic() - began, at_most=10.0)
            run.wait_for(" of attempt 0\n", times=2)
            open_gate(gate)
            ended_well(run.wait(), run.stdout, run.stderr, last="joined\n")
        first, second = _ports(run.stdout)  # and both are the attempt of no restart: it is not counted
        assert first != second
        assert "failed first" not in run.stderr


def _ports(text: str) -> list[int]:
    return [int(port) for port in re.findall(r"port (\d+) of attempt", text)]


@pytest.mark.everywhere
@pytest.mark.fault(61, "a node is lost, no spare is there, and it does not return", promise="8")
def test_gives_up_where_no_node_can_replace_a_lost_one(site: Site, pace: Pace, figures: Figures) -> None:
    timeouts = {"rejoin": f"{REJOIN_S:g}s"}
    job = there(site, ["host1", "host2"], SLEEPER, pace, restarts={"max": 1}, timeouts=timeouts)
    with running(job) as run:
        started = starts(run, 0, 2)
        with closed(site.bed, "host2"):
            began = time.monotonic()
            kill(parent_of(started[1].pid))  # its guardian says that the node is clean: no fence
            assert run.wait() == NODE_LOST
            took_s = time.monotonic() - began
        # A slurmd that refuses is asked again by srun for ten seconds.
        limit_s = CONNECT_S if site.bed.launcher else REJOIN_S + pace.stop_s + 2.0
        figures("gave up", took_s, at_most=limit_s)
        assert took_s >= REJOIN_S
        assert "host2 was lost: its agent exited;" in run.stderr
        assert "only 1 of 2 required nodes available after waiting 3 s (timeouts.rejoin)" in run.stderr
        assert run.stdout.count(" of attempt ") == 2
        assert run.holders() == []
