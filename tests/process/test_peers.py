"""Nodes that are started by hand, here on one machine: what each tells the others, and how long it waits."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distlaunch.dropin.flags import parse_flags
from distlaunch.dropin.torchrun import Here, job_of
from distlaunch.errors import Exit
from distlaunch.launch.peers import keeper, meeting
from distlaunch.rim.signals import Signals
from tests.harness import PATIENCE_S, wait_gone
from tests.process.torchruns import OURS, free_port, going, script

pytest.importorskip("torch", reason="torch is not installed")


def peers(port: int, node_rank: int) -> meeting.Peers:
    """One of two nodes' ends of the store."""
    words = ("--nnodes=2", f"--master-port={port}", f"--node-rank={node_rank}", "x.py")
    spec = job_of(parse_flags(words, {}), Here("/", "host", sys.executable, ("/tmp",), 0, 1, {}))
    assert spec.by_hand is not None
    assert spec.by_hand.wait_s == 600.0
    return meeting.Peers(spec, spec.by_hand, print)


def test_nodes_on_one_machine_meet_over_loopback_and_are_told_that_others_can_not(tmp_path: Path) -> None:
    script(tmp_path, "import os; os.write(1, os.environ['RANK'].encode() + b'\\n')")
    port = free_port()
    shape = ("--nnodes=2", f"--master-port={port}")
    with going(OURS, tmp_path, *shape, "--node-rank=0", "worker.py") as first:
        assert first.process.stderr is not None
        line = first.process.stderr.readline().decode()
        assert line.startswith("distlaunch: --master-addr 127.0.0.1 is reachable only from this machine")
        line = first.process.stderr.readline().decode()
        assert line == f"distlaunch: waiting for node 1 at 127.0.0.1:{port}\n"
        with going(OURS, tmp_path, *shape, "--node-rank=1", "worker.py") as second:
            assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
            assert first.stdout + second.stdout == "0\n1\n"


def test_a_node_that_has_ended_well_ends_as_the_others_do(tmp_path: Path) -> None:
    """torchrun's first node would end with 0, after five minutes."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script(
        tmp_path,
        """
        import os, sys
        os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
        if os.environ["RANK"] == "1":
            open("fifo").read()
            sys.exit(7)
        """,
    )
    shape = ("--nnodes=2", f"--master-port={free_port()}")
    with (
        going(OURS, tmp_path, *shape, "--node-rank=0", "worker.py") as first,
        going(OURS, tmp_path, *shape, "--node-rank=1", "worker.py") as second,
    ):
        wait_gone(list(first.wait_ready(1).values()), PATIENCE_S)
        fifo.write_text("end")
        assert (first.wait(), second.wait()) == (7, 7), first.stderr
        assert "node 1 failed: rank 1 " in first.stderr


def test_nodes_that_were_started_with_different_numbers_of_nodes_are_told(tmp_path: Path) -> None:
    script(tmp_path, "print('started')")
    port = f"--master-port={free_port()}"
    with going(OURS, tmp_path, "--nnodes=3", port, "--node-rank=0", "worker.py") as first:
        first.wait_for("waiting for nodes 1, 2")
        with going(OURS, tmp_path, "--nnodes=2", port, "--node-rank=1", "worker.py") as second:
            assert (first.wait(), second.wait()) == (Exit.USAGE, Exit.USAGE)
            words = "node 1: was started with --nnodes 2, another node with 3"
            assert words in first.stderr and words in second.stderr
            assert "started\n" not in first.stdout + second.stdout


def test_a_first_node_that_does_not_have_the_masters_address_is_told(tmp_path: Path) -> None:
    script(tmp_path, "print('started')")
    address = "192.0.2.1"  # of a network for documentation (RFC 5737)
    shape = ("--nnodes=2", f"--master-addr={address}", f"--master-port={free_port()}")
    with going(OURS, tmp_path, *shape, "--node-rank=0", "worker.py") as node:
        assert node.wait() == Exit.USAGE
        assert f"{address} is not an address of this machine: is --node-rank 0 right" in node.stderr


def test_the_wait_for_the_others_ends_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meeting.BARRIER_S == 300.0
    monkeypatch.setattr(meeting, "BARRIER_S", 0.5)
    port = free_port()
    with (
        Signals() as signals,
        contextlib.closing(peers(port, 0)) as first,
        contextlib.closing(peers(port, 1)) as second,
    ):
        assert first.meet(signals) == second.meet(signals) == [1, 1]
        first.tell(0, "")
        ended = first.wait_for_all(signals)
        assert ended is not None
        assert ended.status == Exit.TIMEOUT
        assert ended.words == "gave up after 0.5 s: this node is done, but others are still running"


def test_the_wait_for_nodes_that_do_not_come_is_bounded() -> None:
    argv = [sys.executable, str(keeper.__file__), "127.0.0.1", *map(str, (free_port(), 0, 3, 1, 0.5))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        process.communicate(timeout=PATIENCE_S)
    text = "did not come within 0.5 s; nor did 2"
    assert said == {"ended": {"node": 1, "status": Exit.TIMEOUT, "text": text}}
