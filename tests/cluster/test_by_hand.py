"""`distlaunch torchrun` started by hand on each of two hosts: they meet, and end together."""

import contextlib
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Bed
from tests.harness import PATIENCE_S, children_of, ended_well, kill, wait_gone, write_job

PORT = "29522"
SLEEPER = """
    import os, signal
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.write(1, f"ready {os.getpid()} {' '.join(os.environ[name] for name in names)}\\n".encode())
    signal.pause()
"""
TRAINS = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.full((1,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    print(f"sum {x.item():g}\\n", end="")  # one write, also under python -u: ranks share a pipe
    dist.destroy_process_group()
"""


class Launcher:
    """One launcher, on one host; with an `endpoint` by c10d."""

    def __init__(
        self,
        bed: Bed,
        number: int,
        procs: int,
        folder: Path,
        *,
        host: int | None = None,
        nodes: int = 2,
        endpoint: str = "",
        restarts: int = 0,
    ) -> None:
        first = bed.hosts["host1"].address
        where = [f"--node-rank={number}", f"--master-addr={first}", f"--master-port={PORT}"]
        if endpoint:
            where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}:{PORT}"]
        shape = [f"--nnodes={nodes}", f"--nproc-per-node={procs}", f"--max-restarts={restarts}"]
        words = [sys.executable, "-m", "distlaunch.torchrun", *shape, *where, "worker.py"]
        self.process = subprocess.Popen(
            bed.argv("exec", f"host{(number if host is None else host) + 1}", "--", *words),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )

    def ready(self, count: int) -> dict[int, list[str]]:
        """pid → what each of so many workers said."""
        assert self.process.stdout is not None
        lines = []
        for _ in range(count):
            assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], "no word from the workers"
            lines.append(self.process.stdout.readline().decode().split())
        assert all(line[:1] == ["ready"] for line in lines), (lines, self.end())
        return {int(line[1]): line[2:] for line in lines}

    def end(self, within_s: float = PATIENCE_S) -> tuple[int, str, str]:
        """The status, and what it said."""
        out, err = self.process.communicate(timeout=within_s)
        return self.process.returncode, out.decode(), err.decode()


LISTENS = re.compile(rf":{int(PORT):04X} 0+:0000 0A ")
"""A line of /proc/net/tcp."""


@pytest.fixture(autouse=True)
def no_store_is_left(bed: Bed) -> Iterator[None]:
    """The port is free again after each test: a store outlives its launcher for moments only."""
    yield
    tables = bed.argv("exec", "host1", "--", "cat", "/proc/net/tcp", "/proc/net/tcp6")
    deadline = time.monotonic() + PATIENCE_S
    while LISTENS.search(subprocess.run(tables, capture_output=True, text=True, check=True).stdout):
        assert time.monotonic() < deadline, "a store is still served"
        time.sleep(0.05)


def serving(launcher: int) -> int:
    """The keeper of the store below a launcher, once it listens."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for child in children_of(launcher):
            with contextlib.suppress(OSError):  # another child of it that has just ended
                if any(
                    LISTENS.search(Path(f"/proc/{child}/net/{name}").read_text()) for name in ("tcp", "tcp6")
                ):
                    return child
        time.sleep(0.05)
    raise AssertionError("no store was served")


@contextlib.contextmanager
def launchers(
    bed: Bed, folder: Path, worker: str, *procs: int, endpoint: str = "", restarts: int = 0
) -> Iterator[list[Launcher]]:
    """Launchers with so many workers each, on host1, host2 …, ended with the block."""
    write_job(folder, worker)
    nodes = max(2, len(procs))
    started = [
        Launcher(bed, number, count, folder, nodes=nodes, endpoint=endpoint, restarts=restarts)
        for number, count in enumerate(procs)
    ]
    try:
        yield started
    finally:
        for launcher in started:
            launcher.process.kill()
            launcher.process.communicate()


def test_unequal_nodes_meet_and_train(bed: Bed, tmp_path: Path) -> None:
    with launchers(bed, tmp_path, TRAINS, 2, 1) as (first, second):
        for launcher, ranks in ((first, 2), (second, 1)):
            status, out, err = launcher.end()
            ended_well(status, out, err, last="sum 6\n", times=ranks)
            assert out == "sum 6\n" * ranks
            assert "MASTER_ADDR" not in err


def test_ranks_are_numbered_over_all_nodes(bed: Bed, tmp_path: Path) -> None:
    with launchers(bed, tmp_path, SLEEPER, 2, 1) as (first, second):
        said = sorted([*first.ready(2).values(), *second.ready(1).values()])
        assert said == [list("003022"), list("113022"), list("203121")]


def test_with_c10d_the_host_that_has_the_address_is_node_0(bed: Bed, tmp_path: Path) -> None:
    """One same command on all: the others are numbered by name. A failure ends all."""
    endpoint = bed.hosts["host2"].address
    with launchers(bed, tmp_path, SLEEPER, 2, 1, 1, endpoint=endpoint) as three:
        said = [launcher.ready(procs) for launcher, procs in zip(three, (2, 1, 1), strict=True)]
        first, second, third = (sorted(each.values()) for each in said)
        assert (second, third) == ([list("004031")], [list("304231")])
        assert first == [list("104132"), list("214132")]
        pids = [pid for each in said for pid in each]
        kill(pids[0])
        wait_gone(pids, 5.0)
        (status, _, err), *others = (launcher.end() for launcher in three)
        assert status == 137
        assert re.search(r"rank [12] \(host1\) failed first: killed by signal 9", err)
        for status, _, err in others:
            assert status == 137
            assert re.search(r"node 1 failed: rank [12] \(host1\) failed first", err)


def test_with_c10d_a_host_that_is_cut_off_is_named(bed: Bed, tmp_path: Path) -> None:
    with launchers(bed, tmp_path, SLEEPER, 1, 1, endpoint=bed.hosts["host1"].address) as both:
        pids = [next(iter(launcher.ready(1))) for launcher in both]
        bed.call("cut", "host2")
        try:
            wait_gone(pids, 25.0)
            (status, _, err), (others, _, others_err) = (launcher.end() for launcher in both)
        finally:
            bed.call("heal", "host2")
        assert (status, others) == (71, 71), (err, others_err)
        assert "node 1 (host2) failed: no heartbeat for 15 s" in err
        assert "node 0 (host1) failed: no heartbeat for 15 s" in others_err


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_dies_and_the_other_node_ends_too(bed: Bed, tmp_path: Path, dies: int) -> None:
    with launchers(bed, tmp_path, SLEEPER, 1, 1) as both:
        pids = [next(iter(launcher.ready(1))) for launcher in both]
        kill(pids[dies])
        began = time.monotonic()
        wait_gone(pids, 5.0)
        (status, _, err), (others, _, others_err) = (both[i].end() for i in (dies, 1 - dies))
        assert time.monotonic() - began < 10.0
        assert (status, others) == (137, 137)
        assert f"rank {dies} (host{dies + 1}) failed first: killed by signal 9" in err
        assert f"node {dies} failed: rank {dies} (host{dies + 1}) failed first" in others_err


@pytest.mark.parametrize("endpoint", ["", "host1"], ids=["static", "c10d"])
def test_a_rank_dies_and_those_of_all_hosts_start_again(bed: Bed, tmp_path: Path, endpoint: str) -> None:
    worker = SLEEPER.replace(
        "signal.pause()", "os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' or signal.pause()"
    )
    with launchers(bed, tmp_path, worker + TRAINS, 1, 2, 1, endpoint=endpoint, restarts=1) as nodes:
        first, *_ = [next(iter(node.ready(count))) for node, count in zip(nodes, (1, 2, 1), strict=True)]
        kill(first)
        for node, ranks in zip(nodes, (1, 2, 1), strict=True):
            status, out, err = node.end()
            assert (status, out.count("sum 10")) == (0, ranks), err
            assert err.count("killed by signal 9 (SIGKILL); the kernel reports no OOM kill") == 1
            assert err.count("restart 1 of 1") == 1


@pytest.mark.parametrize("dies", [0, 1])
def test_a_launcher_is_killed_and_the_other_node_ends_too(bed: Bed, tmp_path: Path, dies: int) -> None:
    with launchers(bed, tmp_path, SLEEPER, 1, 1) as both:
        pids = [next(iter(launcher.ready(1))) for launcher in both]
        kill(both[dies].process.pid)
        wait_gone(pids, 12.0)
        status, _, err = both[1 - dies].end()
        assert status in (70, 71)
        assert f"node {dies} failed: " in err


@pytest.mark.long
def test_a_host_is_cut_off_and_both_nodes_end(bed: Bed, tmp_path: Path) -> None:
    with launchers(bed, tmp_path, SLEEPER, 1, 1) as both:
        pids = [next(iter(launcher.ready(1))) for launcher in both]
        bed.call("cut", "host2")
        try:
            wait_gone(pids, 25.0)
            (status, _, err), (others, _, others_err) = (launcher.end() for launcher in both)
        finally:
            bed.call("heal", "host2")
        assert (status, others) == (71, 71), (err, others_err)
        assert "node 1 failed: no heartbeat for 15 s" in err
        assert "node 0 failed: no heartbeat for 15 s" in others_err


def test_a_keeper_that_is_killed_is_told(bed: Bed, tmp_path: Path) -> None:
    with launchers(bed, tmp_path, SLEEPER, 1, 1) as both:
        pids = [next(iter(launcher.ready(1))) for launcher in both]
        second = both[1]
        (keeper,) = [
            child
            for child in children_of(second.process.pid)
            if b"by_hand/store.py" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        kill(keeper)
        status, _, err = second.end()
        wait_gone(pids[1:], 0.0)
        assert status == 1
        assert "the helper that connects this node to the others" in err
        assert "Traceback" not in err


def test_an_interrupt_of_one_ends_both(bed: Bed, tmp_path: Path) -> None:
    with launchers(bed, tmp_path, SLEEPER, 1, 1) as (first, second):
        pids = [*first.ready(1), *second.ready(1)]
        kill(first.process.pid, signal.SIGTERM)
        wait_gone(pids, 5.0)
        assert first.end()[0] == 143
        status, _, err = second.end()
        assert status == 143
        assert "node 0 failed: stopped by SIGTERM" in err


def test_a_node_that_is_stopped_while_it_waits_for_the_others_ends_them(bed: Bed, tmp_path: Path) -> None:
    """Its own ranks had ended well. Ctrl-Z is answered, and ends nothing."""
    ends_first = SLEEPER.replace("signal.pause()", "os.environ['GROUP_RANK'] == '1' and signal.pause()")
    with launchers(bed, tmp_path, ends_first, 1, 1) as (first, second):
        (ended,), (pid,) = first.ready(1), second.ready(1)
        wait_gone([ended], PATIENCE_S)
        assert first.process.stderr is not None
        deadline = time.monotonic() + PATIENCE_S
        while len(children_of(first.process.pid)) > 1:  # its agent ends; the keeper stays
            assert time.monotonic() < deadline
            time.sleep(0.05)
        kill(first.process.pid, signal.SIGTSTP)
        assert b"can't be suspended" in first.process.stderr.readline()
        kill(first.process.pid, signal.SIGQUIT)
        wait_gone([pid], 5.0)
        assert first.end()[:2] == (131, "")
        status, _, err = second.end()
        assert status == 131
        assert "node 0 failed: stopped by SIGQUIT" in err


def test_killed_launchers_can_be_started_again_at_once(bed: Bed, tmp_path: Path) -> None:
    for _ in range(2):
        with launchers(bed, tmp_path, SLEEPER, 1, 1) as both:
            for launcher in both:
                launcher.ready(1)


def test_a_launcher_killed_while_it_waits_leaves_nothing_that_is_in_the_way(bed: Bed, tmp_path: Path) -> None:
    with launchers(bed, tmp_path, SLEEPER, 1) as (first,):
        keeper = serving(first.process.pid)
    with launchers(bed, tmp_path, SLEEPER, 1, 1) as both:  # the first one's store may be there still
        wait_gone([keeper], PATIENCE_S)
        for launcher in both:
            launcher.ready(1)


def test_two_nodes_of_one_rank_are_told(bed: Bed, tmp_path: Path) -> None:
    with launchers(bed, tmp_path, SLEEPER, 1, 1) as (first, second):
        for launcher in (first, second):
            launcher.ready(1)
        third = Launcher(bed, 1, 1, tmp_path, host=2)
        status, _, err = third.end()
        assert status == 2
        assert re.search(r"node 1: another launcher with --node-rank 1 has already joined", err)
        assert first.process.poll() is second.process.poll() is None


def test_a_first_node_that_does_not_come_is_told(bed: Bed, tmp_path: Path) -> None:
    write_job(tmp_path, SLEEPER)
    first = re.escape(bed.hosts["host1"].address)
    waiting = Launcher(bed, 1, 1, tmp_path)
    assert waiting.process.stderr is not None
    try:
        line = waiting.process.stderr.readline().decode()
        assert re.search(rf"waiting for node 0 at {first}:{PORT}: Connection refused$", line)
    finally:
        kill(waiting.process.pid, signal.SIGTERM)
        assert waiting.end()[0] == 143


@pytest.mark.long
def test_a_node_that_comes_late_finds_the_others_alive(bed: Bed, tmp_path: Path) -> None:
    write_job(tmp_path, SLEEPER)
    with contextlib.ExitStack() as stack:
        three: list[Launcher] = []
        for number in range(3):
            if number == 2:  # said after 5, 10 and 20 s: longer than a silent node is given
                for _ in range(3):
                    assert three[0].process.stderr is not None
                    line = three[0].process.stderr.readline()
                    assert re.search(rb"waiting for (node|nodes 1,) 2 at \S+:29522$", line), line
            three.append(Launcher(bed, number, 1, tmp_path, nodes=3))
            stack.callback(three[-1].process.communicate)
            stack.callback(three[-1].process.kill)
        for launcher in three:
            launcher.ready(1)


def test_a_port_that_is_taken_is_told(bed: Bed, tmp_path: Path) -> None:
    listens = f"import socket, signal; s = socket.create_server(('0.0.0.0', {PORT})); print(); signal.pause()"
    thief = subprocess.Popen(
        bed.argv("exec", "host1", "--", sys.executable, "-c", f"{listens}"),
        stdout=subprocess.PIPE,
        env={"PYTHONUNBUFFERED": "1"},
        bufsize=0,
    )
    assert thief.stdout is not None
    try:
        assert thief.stdout.readline() == b"\n", "it did not get the port"
        with launchers(bed, tmp_path, SLEEPER, 1) as (first,):
            status, _, err = first.end()
        assert status == 75, err
        assert re.search(rf"node 0: can't serve the store at \S+:{PORT}: ", err)
    finally:
        thief.kill()
        thief.wait()
        thief.stdout.close()
