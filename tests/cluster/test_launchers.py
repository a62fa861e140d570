"""`distlaunch torchrun` that somebody else starts on each of several hosts: they join one run."""

import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Bed
from tests.harness import PATIENCE_S, Going, all_ended_well, kill, wait_gone, wait_until, write_job

PORT = "29522"
SLEEPER = """
    import os, signal
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    place = "".join(os.environ[name] for name in names)
    os.write(1, f"ready {place[0]} {os.getpid()} {place}\\n".encode())
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
    """One launcher, on one host."""

    def __init__(self, bed: Bed, number: int, directory: Path, *words: str) -> None:
        argv = [sys.executable, "-m", "distlaunch.torchrun", *words, "worker.py"]
        super().__init__(directory, bed.argv("exec", f"host{number + 1}", "--", *argv), cwd=directory)

    def places(self) -> list[str]:
        """What its workers have told, one digit for each variable."""
        return sorted(re.findall(r"ready \d \d+ (\d+)\n", self.stdout))


def static(bed: Bed, number: int) -> list[str]:
    """Where launchers that are told their numbers meet."""
    first = bed.hosts["host1"].address
    return [f"--node-rank={number}", f"--master-addr={first}", f"--master-port={PORT}"]


@pytest.fixture(autouse=True)
def nobody_listens(bed: Bed) -> Iterator[None]:
    """The port is free again after each test."""
    yield
    table = ("host1", "cat", "/proc/net/tcp", "/proc/net/tcp6")
    wait_until(lambda: not LISTENS.search(bed.inside(*table).stdout), lambda: "somebody still listens")


@contextlib.contextmanager
def launchers(
    bed: Bed, directory: Path, worker: str, *procs: int, words: tuple[str, ...] = (), endpoint: str = ""
) -> Iterator[list[Launcher]]:
    """Launchers with so many workers each, on host1 …, ended with the block; by c10d at an endpoint."""
    write_job(directory, worker)
    with contextlib.ExitStack() as stack:
        started = []
        for number, count in enumerate(procs):
            where = static(bed, number)
            if endpoint:
                where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}:{PORT}"]
            shape = [f"--nnodes={max(2, len(procs))}", f"--nproc-per-node={count}"]
            started.append(Launcher(bed, number, directory, *shape, *where, *words))
            stack.callback(started[-1].kill)
        yield started


def test_unequal_nodes_are_numbered_and_train(bed: Bed, tmp_path: Path) -> None:
    with launchers(bed, tmp_path, SLEEPER.replace("signal.pause()", "") + TRAINS, 2, 1) as runs:
        all_ended_well(runs, last="sum 6\n")
        assert [run.stdout.count("sum 6\n") for run in runs] == [2, 1]
        assert [run.places() for run in runs] == [["003022", "113022"], ["203121"]]
        assert not any("MASTER_ADDR" in run.stderr for run in runs)


def test_the_host_of_a_c10d_endpoint_is_node_0_and_a_failure_restarts_all(bed: Bed, tmp_path: Path) -> None:
    """One same command on all: the others are numbered by name."""
    ends = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' or signal.pause()"
    worker, procs, endpoint = SLEEPER.replace("signal.pause()", ends), (2, 1, 1), bed.hosts["host2"].address
    with launchers(bed, tmp_path, worker, *procs, words=("--max-restarts=1",), endpoint=endpoint) as runs:
        workers = [run.wait_ready(count) for run, count in zip(runs, procs, strict=True)]
        assert [run.places() for run in runs] == [["104132", "214132"], ["004031"], ["304231"]]
        kill(workers[0][1])
        assert [run.wait() for run in runs] == [0, 0, 0]
        assert [run.stdout.count("ready") for run in runs] == [4, 2, 2]
        for number, run in enumerate(runs):
            again = "restart 1 of 1" if number == 1 else "restarting"
            told = rf"rank [12] \(host1\) failed: killed by signal 9 \(SIGKILL\).*; {again}$"
            assert len(re.findall(told, run.stderr, re.MULTILINE)) == 1, run.stderr


@pytest.mark.long
def test_nodes_wait_for_one_that_is_late_or_cut_off_until_all_have_joined(bed: Bed, tmp_path: Path) -> None:
    """Later than a silent node is given; all say for whom they wait after 5, 10 and 20 s."""
    with launchers(bed, tmp_path, SLEEPER, 1, 1, words=("--nnodes=3",)) as runs:
        for run in runs:
            run.wait_until(
                lambda: len(re.findall(r"waiting for node 2 at \S+:29522\n", run.stderr)) >= 3,  # noqa: B023
                "three lines",
            )
            assert run.stderr.count("waiting for") in (3, 4), "the first may have been for another node, too"
        bed.call("cut", "host2")
        try:
            runs[0].wait_for("waiting for nodes 1-2 at")
        finally:
            bed.call("heal", "host2")
        with contextlib.ExitStack() as stack:
            third = Launcher(bed, 2, tmp_path, "--nnodes=3", *static(bed, 2))
            stack.callback(third.kill)
            runs.append(third)
            pids = [pid for run in runs for pid in run.wait_ready(1).values()]
            bed.call("cut", "host2")
            stack.callback(bed.call, "heal", "host2")
            wait_gone(pids, CUT_S)
            assert [run.wait() for run in runs] == [71, 71, 71]
            assert all("host2 was lost: " in runs[i].stderr for i in (0, 2)), third.stderr
            where = bed.hosts["host1"].address
            assert f"lost the controller on {where}: " in runs[1].stderr, runs[1].stderr


@pytest.mark.parametrize("done", [0, 1])
def test_stopping_a_node_whose_ranks_have_ended_ends_the_others(bed: Bed, tmp_path: Path, done: int) -> None:
    """Ctrl-Z is answered, and ends nothing."""
    ends_first = SLEEPER.replace("signal.pause()", f"os.environ['GROUP_RANK'] == '{done}' or signal.pause()")
    with launchers(bed, tmp_path, ends_first, 1, 1) as both:
        pids = [pid for run in both for pid in run.wait_ready(1).values()]
        wait_gone([pids[done]], PATIENCE_S)
        kill(both[done].process.pid, signal.SIGTSTP)
        both[done].wait_for("can't be suspended")
        kill(both[done].process.pid, signal.SIGQUIT)
        wait_gone(pids, 5.0)
        assert [run.wait() for run in both] == [131, 131]
        assert all("stopped by SIGQUIT" in run.stderr for run in both)
