"""`distlaunch torchrun` that somebody else starts on each of several hosts: they join one run."""

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
from tests.harness import PATIENCE_S, Going, all_ended_well, kill, wait_gone, write_job

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
LISTENS = re.compile(rf":{int(PORT):04X} 0+:0000 0A ")
"""A line of /proc/net/tcp."""
CUT_S = 25.0
"""Within this time both sides of a cut have ended: 15 s without an answer, and the workers' end."""


class Launcher(Going):
    """One launcher, on one host; with an `endpoint` by c10d."""

    def __init__(
        self,
        bed: Bed,
        number: int,
        folder: Path,
        *words: str,
        procs: int = 1,
        nodes: int | str = 2,
        endpoint: str = "",
    ) -> None:
        first = bed.hosts["host1"].address
        where = [f"--node-rank={number}", f"--master-addr={first}", f"--master-port={PORT}"]
        if endpoint:
            where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}:{PORT}"]
        shape = [f"--nnodes={nodes}", f"--nproc-per-node={procs}"]
        argv = [sys.executable, "-m", "distlaunch.torchrun", *shape, *where, *words, "worker.py"]
        super().__init__(folder, bed.argv("exec", f"host{number + 1}", "--", *argv), cwd=folder)

    def ready(self, count: int = 1) -> dict[int, list[str]]:
        """pid → what each of so many workers said, in all."""
        found: list[list[str]] = []

        def whole() -> bool:
            found[:] = [line.split() for line in self.stdout.splitlines(keepends=True) if line.endswith("\n")]
            return sum(line[:1] == ["ready"] for line in found) >= count

        self.wait_until(whole, f"{count} ready workers")
        return {int(line[1]): line[2:] for line in found if line[:1] == ["ready"]}


@pytest.fixture(autouse=True)
def nobody_listens(bed: Bed) -> Iterator[None]:
    """The port is free again after each test."""
    yield
    tables = bed.argv("exec", "host1", "--", "cat", "/proc/net/tcp", "/proc/net/tcp6")
    deadline = time.monotonic() + PATIENCE_S
    while LISTENS.search(subprocess.run(tables, capture_output=True, text=True, check=True).stdout):
        assert time.monotonic() < deadline, "somebody still listens"
        time.sleep(0.05)


@contextlib.contextmanager
def launchers(
    bed: Bed, folder: Path, worker: str, *procs: int, words: tuple[str, ...] = (), endpoint: str = ""
) -> Iterator[list[Launcher]]:
    """Launchers with so many workers each, on host1, host2 …, ended with the block."""
    write_job(folder, worker)
    with contextlib.ExitStack() as stack:
        started = []
        for number, count in enumerate(procs):
            one = Launcher(
                bed, number, folder, *words, procs=count, nodes=max(2, len(procs)), endpoint=endpoint
            )
            stack.callback(one.kill)
            started.append(one)
        yield started


def statuses(runs: list[Launcher]) -> list[int]:
    return [run.wait() for run in runs]


# Starts


def test_unequal_nodes_meet_and_train(bed: Bed, tmp_path: Path) -> None:
    with launchers(bed, tmp_path, TRAINS, 2, 1) as runs:
        all_ended_well(runs, last="sum 6\n")
        assert [run.stdout for run in runs] == ["sum 6\n" * 2, "sum 6\n"]
        assert not any("MASTER_ADDR" in run.stderr for run in runs)


def test_ranks_are_numbered_over_all_nodes(bed: Bed, tmp_path: Path) -> None:
    with launchers(bed, tmp_path, SLEEPER, 2, 1) as (first, second):
        said = sorted([*first.ready(2).values(), *second.ready(1).values()])
        assert said == [list("003022"), list("113022"), list("203121")]


def test_with_c10d_the_host_that_has_the_address_is_node_0(bed: Bed, tmp_path: Path) -> None:
    """One same command on all: the others are numbered by name. A failure ends all."""
    endpoint = bed.hosts["host2"].address
    with launchers(bed, tmp_path, SLEEPER, 2, 1, 1, endpoint=endpoint) as three:
        said = [run.ready(procs) for run, procs in zip(three, (2, 1, 1), strict=True)]
        first, second, third = (sorted(each.values()) for each in said)
        assert (second, third) == ([list("004031")], [list("304231")])
        assert first == [list("104132"), list("214132")]
        pids = [pid for each in said for pid in each]
        kill(pids[0])
        wait_gone(pids, 5.0)
        assert statuses(three) == [137, 137, 137]
        for run in three:
            assert re.search(r"rank [12] \(host1\) failed first: killed by signal 9", run.stderr)


@pytest.mark.parametrize("endpoint", ["", "host1"], ids=["static", "c10d"])
def test_a_first_node_that_does_not_come_is_told(bed: Bed, tmp_path: Path, endpoint: str) -> None:
    write_job(tmp_path, SLEEPER)
    with contextlib.closing(_Ended(Launcher(bed, 1, tmp_path, endpoint=endpoint))) as waiting:
        who = f"the node that has this address at {endpoint}" if endpoint else "node 0 at "
        waiting.run.wait_for(f"waiting for {who}")
        assert re.search(rf":{PORT}: Connection refused$", waiting.run.stderr.rstrip())
        kill(waiting.run.process.pid, signal.SIGTERM)
        assert waiting.run.wait() == 143


class _Ended:
    """A launcher that ends with a block."""

    def __init__(self, run: Launcher) -> None:
        self.run = run

    def close(self) -> None:
        self.run.kill()


@pytest.mark.long
def test_a_node_that_comes_late_finds_the_others_alive(bed: Bed, tmp_path: Path) -> None:
    """Longer than a silent node is given; all say for whom they wait after 5, 10 and 20 s."""
    with launchers(bed, tmp_path, SLEEPER, 1, 1, words=("--nnodes=3",)) as runs:
        for run in runs:
            run.wait_until(
                lambda: len(re.findall(r"waiting for node 2 at \S+:29522\n", run.stderr)) >= 3,  # noqa: B023
                "three lines",
            )
            assert run.stderr.count("waiting for") in (3, 4), "the first may have been for another node, too"
        with contextlib.closing(_Ended(Launcher(bed, 2, tmp_path, nodes=3))) as third:
            for run in (*runs, third.run):
                run.ready()


@pytest.mark.long
def test_a_host_that_is_cut_off_while_nodes_gather_is_waited_for_again(bed: Bed, tmp_path: Path) -> None:
    with launchers(bed, tmp_path, SLEEPER, 1, 1, words=("--nnodes=3",)) as runs:
        for run in runs:
            run.wait_for("waiting for node 2 at")
        bed.call("cut", "host2")
        try:
            runs[0].wait_for("waiting for nodes 1-2 at")
        finally:
            bed.call("heal", "host2")
        with contextlib.closing(_Ended(Launcher(bed, 2, tmp_path, nodes=3))) as third:
            for run in (*runs, third.run):
                run.ready()


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
        assert select.select([thief.stdout], [], [], PATIENCE_S)[0]
        assert thief.stdout.readline() == b"\n", "it did not get the port"
        with launchers(bed, tmp_path, SLEEPER, 1) as (first,):
            assert first.wait() == 75
            words = rf"can't listen at \S+:{PORT} for the other nodes: Address already in use"
            assert re.search(words, first.stderr)
    finally:
        thief.kill()
        thief.wait()
        thief.stdout.close()


# Ends


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_dies_and_the_other_node_ends_too(bed: Bed, tmp_path: Path, dies: int) -> None:
    with launchers(bed, tmp_path, SLEEPER, 1, 1) as both:
        pids = [next(iter(run.ready())) for run in both]
        kill(pids[dies])
        began = time.monotonic()
        wait_gone(pids, 5.0)
        assert statuses(both) == [137, 137]
        assert time.monotonic() - began < 10.0
        for run in both:
            assert f"rank {dies} (host{dies + 1}) failed first: killed by signal 9" in run.stderr


@pytest.mark.parametrize("dies", [0, 1])
def test_a_launcher_is_killed_and_the_other_node_ends_too(bed: Bed, tmp_path: Path, dies: int) -> None:
    with launchers(bed, tmp_path, SLEEPER, 1, 1) as both:
        pids = [next(iter(run.ready())) for run in both]
        kill(both[dies].process.pid)
        wait_gone(pids, 12.0)
        assert both[1 - dies].wait() == 71
        words = "host2 was lost: its launcher was killed" if dies else "lost the controller on "
        assert words in both[1 - dies].stderr


@pytest.mark.long
@pytest.mark.parametrize("endpoint", ["", "host1"], ids=["static", "c10d"])
def test_a_host_is_cut_off_and_both_sides_end(bed: Bed, tmp_path: Path, endpoint: str) -> None:
    with launchers(bed, tmp_path, SLEEPER, 1, 1, endpoint=endpoint) as both:
        pids = [next(iter(run.ready())) for run in both]
        bed.call("cut", "host2")
        try:
            wait_gone(pids, CUT_S)
            assert statuses(both) == [71, 71]
        finally:
            bed.call("heal", "host2")
        assert re.search(r"host2 was lost: ", both[0].stderr), both[0].stderr
        where = endpoint or bed.hosts["host1"].address
        assert f"lost the controller on {where}: " in both[1].stderr, both[1].stderr


@pytest.mark.parametrize("told", [0, 1])
def test_an_interrupt_of_one_ends_both(bed: Bed, tmp_path: Path, told: int) -> None:
    with launchers(bed, tmp_path, SLEEPER, 1, 1) as both:
        pids = [next(iter(run.ready())) for run in both]
        kill(both[told].process.pid, signal.SIGTERM)
        wait_gone(pids, 5.0)
        assert statuses(both) == [143, 143]
        assert all("stopped by SIGTERM" in run.stderr for run in both)


@pytest.mark.parametrize("done", [0, 1])
def test_a_node_that_is_stopped_while_it_waits_for_the_others_ends_them(
    bed: Bed, tmp_path: Path, done: int
) -> None:
    """Its own ranks had ended well. Ctrl-Z is answered, and ends nothing."""
    ends_first = SLEEPER.replace("signal.pause()", f"os.environ['GROUP_RANK'] == '{done}' or signal.pause()")
    with launchers(bed, tmp_path, ends_first, 1, 1) as both:
        pids = [next(iter(run.ready())) for run in both]
        wait_gone([pids[done]], PATIENCE_S)
        kill(both[done].process.pid, signal.SIGTSTP)
        both[done].wait_for("can't be suspended")
        kill(both[done].process.pid, signal.SIGQUIT)
        wait_gone(pids, 5.0)
        assert statuses(both) == [131, 131]
        assert all("stopped by SIGQUIT" in run.stderr for run in both)


def test_killed_launchers_can_be_started_again_at_once(bed: Bed, tmp_path: Path) -> None:
    for _ in range(2):
        with launchers(bed, tmp_path, SLEEPER, 1, 1) as both:
            for run in both:
                run.ready()


# Restarts


@pytest.mark.parametrize("endpoint", ["", "host1"], ids=["static", "c10d"])
def test_a_rank_dies_and_those_of_all_hosts_start_again(bed: Bed, tmp_path: Path, endpoint: str) -> None:
    worker = SLEEPER.replace(
        "signal.pause()", "os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' or signal.pause()"
    )
    words = ("--max-restarts=1",)
    with launchers(bed, tmp_path, worker + TRAINS, 1, 2, 1, words=words, endpoint=endpoint) as runs:
        first, *_ = [next(iter(run.ready(count))) for run, count in zip(runs, (1, 2, 1), strict=True)]
        kill(first)
        all_ended_well(runs, last="sum 10\n")
        assert [run.stdout.count("sum 10") for run in runs] == [1, 2, 1]
        for number, run in enumerate(runs):
            again = "restarting" if number else "restart 1 of 1"
            words_ = rf"rank \d \(host1\) failed first: killed by signal 9 \(SIGKILL\).*; {again}$"
            assert len(re.findall(words_, run.stderr, re.MULTILINE)) == 1, run.stderr


@pytest.mark.parametrize("endpoint", ["", "host1"], ids=["static", "c10d"])
def test_a_launcher_that_is_killed_and_started_again_trains_on(
    bed: Bed, tmp_path: Path, endpoint: str
) -> None:
    worker = SLEEPER.replace(
        "signal.pause()", "os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' or signal.pause()"
    )
    words = ("--max-restarts=1",)
    with launchers(bed, tmp_path, worker + TRAINS, 1, 1, words=words, endpoint=endpoint) as both:
        pids = [next(iter(run.ready())) for run in both]
        kill(both[1].process.pid)
        wait_gone(pids, 12.0)
        with contextlib.closing(_Ended(Launcher(bed, 1, tmp_path, *words, endpoint=endpoint))) as again:
            all_ended_well([both[0], again.run], last="sum 3\n")
        assert "host2 was lost: its launcher was killed; restart 1 of 1" in both[0].stderr


def test_an_elastic_job_takes_a_late_host_in_and_goes_on_when_it_is_lost(bed: Bed, tmp_path: Path) -> None:
    worker = SLEEPER.replace("signal.pause()", "")
    train = TRAINS.replace("dist.destroy", "os.write(1, b'trained\\n'); signal.pause(); dist.destroy")
    write_job(tmp_path, worker + train)
    words = ("--rdzv-conf=last_call_timeout=1", "--max-restarts=1")
    with contextlib.ExitStack() as stack:

        def started(number: int) -> Launcher:
            run = Launcher(bed, number, tmp_path, *words, nodes="1:2", endpoint="host1")
            stack.callback(run.kill)
            return run

        first = started(0)
        first.wait_for("sum 1\ntrained\n")
        second = started(1)
        for run in (first, second):
            run.wait_for("sum 3\ntrained\n")
        assert "the launcher on host2 joins as node 1" in first.stderr
        kill(second.process.pid)
        first.wait_for("sum 1\ntrained\n", times=2)
        kill(first.process.pid, signal.SIGTERM)
        assert first.wait() == 143
