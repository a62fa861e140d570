"""Nodes that are started by hand, here on one machine: what each tells the others, and how long it waits."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distlaunch.by_hand import peers as meeting
from distlaunch.by_hand import store as keeper
from distlaunch.by_hand.peers import Met, PeerEnded

from distlaunch.dropin.parsing import parse_flags
from distlaunch.dropin.torchrun_job import Here, job_of
from distlaunch.errors import Exit
from distlaunch.system.signals import Signals
from tests.harness import PATIENCE_S, ROOT, wait_gone
from tests.process.torchruns import NEEDS_TORCH, OURS, free_port, going, script

pytestmark = NEEDS_TORCH


def peers(port: int, node_rank: int) -> meeting.Peers:
    """One of two nodes' ends of the store."""
    words = ("--nnodes=2", f"--master-port={port}", f"--node-rank={node_rank}", "x.py")
    spec = job_of(parse_flags(words, {}), Here("/", "host", sys.executable, ("/tmp",), 0, 1, {}))
    assert spec.invocation.by_hand is not None
    assert spec.invocation.by_hand.wait_s == 600.0
    return meeting.Peers(spec, spec.invocation.by_hand, print)


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
            words = "node 1: was started with --nnodes 2, but another node with 3"
            assert words in first.stderr and words in second.stderr
            assert "started\n" not in first.stdout + second.stdout


def test_a_first_node_that_does_not_have_the_masters_address_is_told(tmp_path: Path) -> None:
    script(tmp_path, "print('started')")
    address = "192.0.2.1"  # of a network for documentation (RFC 5737)
    shape = ("--nnodes=2", f"--master-addr={address}", f"--master-port={free_port()}")
    with going(OURS, tmp_path, *shape, "--node-rank=0", "worker.py") as node:
        assert node.wait() == Exit.USAGE
        assert f"{address} is not an address of this machine: check --node-rank 0" in node.stderr


def test_the_wait_for_the_others_ends_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meeting.BARRIER_S == 300.0
    monkeypatch.setattr(meeting, "BARRIER_S", 0.5)
    port = free_port()
    with (
        Signals() as signals,
        contextlib.closing(peers(port, 0)) as first,
        contextlib.closing(peers(port, 1)) as second,
    ):
        assert (first.meet(signals), second.meet(signals)) == (Met(0, (1, 1)), Met(1, (1, 1)))
        first.tell(0, "")
        ended = first.wait_for_all(signals)
        assert ended is not None
        assert ended.status == Exit.TIMEOUT
        assert ended.words == "gave up after 0.5 s: this node is done, but others are still running"


def test_the_wait_for_nodes_that_do_not_come_is_bounded() -> None:
    argv = [sys.executable, str(keeper.__file__), "127.0.0.1", *map(str, (free_port(), 0, 3, 1, 0.5)), "null"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        process.communicate(timeout=PATIENCE_S)
    text = "did not join within 0.5 s; nor did 2"
    assert said == {"ended": {"node": 1, "status": Exit.TIMEOUT, "text": text}}


def test_a_store_that_is_gone_is_the_first_nodes_failure() -> None:
    port = free_port()
    with (
        Signals() as signals,
        contextlib.closing(peers(port, 0)) as first,
        contextlib.closing(peers(port, 1)) as second,
    ):
        assert (first.meet(signals), second.meet(signals)) == (Met(0, (1, 1)), Met(1, (1, 1)))
        first._process.kill()
        second.tell(0, "")
        assert second.wait_for_all(signals) == PeerEnded(0, 71, "its store closed the connection")


def test_signals_to_all_processes_of_a_step_do_not_end_the_helper() -> None:
    """As Slurm sends them: the launcher decides what they mean."""
    port = free_port()
    with (
        Signals() as signals,
        contextlib.closing(peers(port, 0)) as first,
        contextlib.closing(peers(port, 1)) as second,
    ):
        assert (first.meet(signals), second.meet(signals)) == (Met(0, (1, 1)), Met(1, (1, 1)))
        for name in keeper.ENDING:
            second._process.send_signal(signal.Signals[name])
        for each in (first, second):
            each.tell(0, "")
        assert first.wait_for_all(signals) is second.wait_for_all(signals) is None


# What it costs to stay together, and who is lost


class Counting:
    """A store that counts its calls."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self._store, name)


def keepers_of(nodes: int) -> list[keeper.Keeper]:
    """Of nodes that are all there; without a command, and without the program around them."""
    from torch.distributed import HashStore

    store = Counting(HashStore())
    keepers = [keeper.Keeper(store, rank, nodes) for rank in range(nodes)]
    for rank, each in enumerate(keepers):
        each.join(rank + 1)
    return keepers


def calls_of(each: keeper.Keeper) -> int:
    """Of one beat."""
    before = each.store.calls
    assert not each.turn()
    calls: int = each.store.calls - before
    return calls


def test_a_beat_takes_no_more_calls_of_many_nodes_than_of_few() -> None:
    few, many = keepers_of(2), keepers_of(64)
    assert calls_of(many[0]) == calls_of(few[0]) == 3
    assert calls_of(many[63]) == calls_of(few[1]) == 2


def test_meeting_takes_no_more_calls_of_many_nodes_than_of_few() -> None:
    def calls(nodes: int, rank: int) -> int:
        keepers = keepers_of(nodes)
        before = keepers[0].store.calls
        assert keepers[0].meet(1, 1.0) == [1, *range(2, nodes + 1)]
        if rank:
            before = keepers[0].store.calls
            keepers[rank].meet(rank + 1, 1.0)
        taken: int = keepers[0].store.calls - before
        return taken

    assert calls(64, 0) == calls(2, 0)
    assert calls(64, 63) == calls(2, 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The keepers' time, to be set."""
    now = [1000.0]
    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_node_without_a_beat_is_lost_after_a_while_and_all_are_told(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert keeper.LOST_S == 15.0
    first, second, third = keepers_of(3)
    assert not any(each.turn() for each in (third, second, first))
    clock[0] += 15.0
    assert not any(each.turn() for each in (second, first))
    clock[0] += 0.1
    assert all(each.turn() for each in (first, second))
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said == [{"ended": {"node": 2, "status": 71, "text": "no heartbeat for 15 s"}}] * 2


def test_a_node_that_is_done_is_not_lost_and_when_all_are_done_all_are_told(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = keepers_of(2)
    second.done = True
    assert not any(each.turn() for each in (second, first))
    clock[0] += 100.0
    assert not first.turn(), "the second one waits for it"
    assert capsys.readouterr().out == ""
    first.done = True
    assert all(each.turn() for each in (first, second))
    assert capsys.readouterr().out == '{"over": true}\n' * 2


def test_the_first_verdict_counts(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = keepers_of(2)
    second.end(keeper.ended(1, 7, "rank 1 failed"))
    first.done = second.done = True
    assert all(each.turn() for each in (first, second))
    told = {"ended": {"node": 1, "status": 7, "text": "rank 1 failed"}}
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [told] * 2


def test_a_first_node_waits_until_its_name_is_known(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """A pod starts before its cluster's name server knows it."""

    def resolve(name: str, _: None) -> list[object]:
        if clock[0] < 1007:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(keeper, "pause", lambda: clock.__setitem__(0, clock[0] + 1))
    keeper.await_name("job-0.job", 600)
    assert clock[0] == 1007
    assert json.loads(capsys.readouterr().out) == {
        "waiting": [],
        "why": "job-0.job: Name or service not known",
    }
    clock[0] = 0.0
    keeper.await_name("no-such-name", 600)
    assert clock[0] == keeper.NAME_S + 1


def python(script: str, **environ: str) -> str:
    """What Python prints of a script."""
    argv, env = [sys.executable, "-c", script], {**os.environ, **environ}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_keeper_needs_little_of_torch() -> None:
    """The rest takes a second to import, for which all nodes would wait."""
    script = """
import sys
from distlaunch.by_hand import store
store.prepare_torch()
from torch.distributed import DistError, PrefixStore, TCPStore
kept = PrefixStore("x/", TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False))
kept.set("a", "b")
print(kept.get("a"), issubclass(DistError, RuntimeError), "torch.nn" in sys.modules)
"""
    assert python(script) == "b'b' True False\n"


@pytest.mark.parametrize("version", ["9.9.9", "2.13.0"], ids=["not tried", "without what is needed"])
def test_of_another_torch_all_is_imported(version: str, tmp_path: Path) -> None:
    package = tmp_path / "torch"
    (package / "distributed").mkdir(parents=True)
    (package / "version.py").write_text(f"__version__ = '{version}'\n")
    (package / "__init__.py").touch()
    (package / "distributed" / "__init__.py").write_text("TCPStore = 'all of it'\n")
    script = """
from distlaunch.by_hand import store
store.prepare_torch()
from torch.distributed import TCPStore
print(TCPStore)
"""
    assert python(script, PYTHONPATH=f"{tmp_path}:{ROOT}") == "all of it\n"
