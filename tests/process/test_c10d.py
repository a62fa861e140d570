"""`--rdzv-backend c10d` on several nodes, here on one machine: how launchers meet, and who may not join."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from distlaunch.by_hand import store as keeper

from distlaunch.errors import Exit
from tests.harness import Going
from tests.process.torchruns import (
    BOTH,
    MAY_DIFFER,
    NEEDS_TORCH,
    OURS,
    TELL,
    WAITING,
    environment,
    free_port,
    going,
    our_lines,
    script,
    scripts,
)

pytestmark = NEEDS_TORCH


@contextlib.contextmanager
def launcher(folder: Path, port: int, *words: str, argv: list[str] = OURS, **environ: str) -> Iterator[Going]:
    """One of the launchers that meet at `port`."""
    meet = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}")
    run = Going(folder, [*argv, *meet, *words], cwd=folder, env=environment(folder, **environ))
    try:
        yield run
        run.process.terminate()
        run.wait()
    finally:
        run.kill()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a worker that says its place and waits."""
    script(tmp_path, WAITING)
    return tmp_path


@pytest.mark.once
def test_workers_get_what_two_torchruns_give(tmp_path: Path, port: int) -> None:
    """But that torch's node 0 is any, and MASTER_PORT one of its own."""
    scripts(tmp_path, TELL)
    for name, argv in zip(("torchrun", "ours"), BOTH, strict=True):
        words = ("--nnodes=2", "--nproc-per-node=2", "--rdzv-id=a b", "worker.py", ".")
        with (
            launcher(tmp_path / name, port, *words, argv=argv) as first,
            launcher(tmp_path / name, port, *words, argv=argv) as second,
        ):
            assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
    for rank in range(4):
        theirs, mine = (
            json.loads((tmp_path / name / str(rank)).read_text())["env"] for name in ("torchrun", "ours")
        )
        differing = {key for key in {*theirs, *mine} if theirs.get(key) != mine.get(key)}
        assert differing - {"PWD", "TMPDIR"} <= {*MAY_DIFFER, "MASTER_ADDR", "MASTER_PORT"}
        assert theirs["TORCHELASTIC_USE_AGENT_STORE"] == mine["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert (mine["MASTER_ADDR"], mine["MASTER_PORT"]) == ("localhost", str(port))


def test_node_ranks_that_all_have_are_kept(tmp_path: Path, port: int) -> None:
    """Also where somebody else than the first is to serve the store."""
    script(tmp_path, 'import os; os.write(1, (os.environ["GROUP_RANK"] + os.environ["MINE"]).encode())')
    words = ("--nnodes=2", "worker.py")
    with (
        launcher(tmp_path, port, "--node-rank=1", "--rdzv-conf=is_host=0", *words, MINE="1") as first,
        launcher(tmp_path, port, "--node-rank=0", "--rdzv-conf=is_host=1", *words, MINE="0") as second,
    ):
        assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
        assert (first.stdout, second.stdout) == ("11", "00")


def test_a_node_rank_that_two_have_does_not_count(place: Path, port: int) -> None:
    """As where the shell of the batch script fills in $SLURM_NODEID for all."""
    words = ("--nnodes=2", "--node-rank=0", "worker.py")
    with launcher(place, port, *words) as first, launcher(place, port, *words) as second:
        for run in (first, second):
            run.wait_ready(1)
        assert ["this is node 1, not --node-rank 0: with c10d" in run.stderr for run in (first, second)] in (
            [True, False],
            [False, True],
        )


def test_those_who_wait_say_for_how_many(place: Path, port: int) -> None:
    with launcher(place, port, "--nnodes=4", "--rdzv-id=12", "worker.py") as first:
        here = re.escape(socket.gethostname())
        first.wait_for("waiting for ")
        assert re.search(
            rf"waiting for 3 of 4 nodes at localhost:{port} \(joined: {here}\)$", our_lines(first)[-1]
        )
        with launcher(place, port, "--nnodes=4", "--rdzv-id=17", "worker.py") as other:
            assert other.wait() == Exit.USAGE
            assert "--rdzv-id is 17 here, but 12 where others have joined" in other.stderr
            assert f"(store at localhost:{port})" in other.stderr
        first.wait_for("a launcher with --rdzv-id 17 was refused, since the others have 12")
        assert first.process.poll() is None


def test_one_more_than_there_are_nodes_is_refused(place: Path, port: int) -> None:
    words = ("--nnodes=2", "worker.py")
    with launcher(place, port, *words) as first, launcher(place, port, *words) as second:
        first.wait_ready(1)
        second.wait_ready(1)
        with launcher(place, port, "--nnodes=3", "worker.py") as third:
            assert third.wait() == Exit.USAGE
            assert "2 of 2 nodes have already joined: start one launcher on each node" in third.stderr
        assert first.process.poll() is second.process.poll() is None


def test_the_wait_is_that_of_the_join_timeout(place: Path, port: int) -> None:
    with launcher(
        place, port, "--nnodes=3", "--rdzv-conf=join_timeout=1,last_call_timeout=9", "worker.py"
    ) as run:
        assert run.wait() == Exit.TIMEOUT
        idle, _, last = our_lines(run)
        assert idle.startswith("distlaunch: --rdzv-conf last_call_timeout has no effect: ")
        gave_up = f"distlaunch: 2 of 3 nodes did not join at localhost:{port} within 1 s; joined: "
        assert last == gave_up + socket.gethostname()


def test_different_numbers_of_nodes_are_told(place: Path, port: int) -> None:
    with launcher(place, port, "--nnodes=3", "worker.py") as first:
        first.wait_for("waiting for 2 of 3")
        with launcher(place, port, "--nnodes=2", "worker.py") as second:
            assert (first.wait(), second.wait()) == (Exit.USAGE, Exit.USAGE)
            words = f"{socket.gethostname()}: was started with --nnodes 2, but another node with 3"
            assert words in first.stderr and words in second.stderr


def test_a_launcher_that_is_killed_while_it_waits_ends_the_others(place: Path, port: int) -> None:
    words = ("--nnodes=3", "worker.py")
    with launcher(place, port, *words) as first:
        first.wait_for("waiting for 2 of 3")
        with launcher(place, port, *words) as second:
            first.wait_for("waiting for 1 of 3")
            second.process.kill()
        assert first.wait() == 70
        assert f"distlaunch: {socket.gethostname()}: its launcher was killed" in our_lines(first)


def test_killed_launchers_can_be_started_again_at_once(place: Path, port: int) -> None:
    for job in ("1", "2"):
        words = ("--nnodes=2", f"--rdzv-id={job}", "worker.py")
        with launcher(place, port, *words) as first, launcher(place, port, *words) as second:
            first.wait_ready(1)
            second.wait_ready(1)
            if job == "1":
                first.process.kill()
                second.process.kill()


def test_a_port_that_another_program_has_is_told(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        closes = threading.Thread(target=_turn_away, args=[stranger])
        closes.start()
        port = stranger.getsockname()[1]
        with launcher(place, port, "--nnodes=2", "worker.py") as run:
            assert run.wait() == Exit.PORT_TAKEN
            assert f"can't serve the store at localhost:{port}: another program uses that port" in run.stderr
        stranger.shutdown(socket.SHUT_RDWR)
        closes.join()


SERVES = """
    import os, sys
    from torch.distributed import TCPStore
    store = TCPStore("127.0.0.1", int(sys.argv[1]), None, True, wait_for_workers=False)
    os.write(1, b"serves")
    sys.stdin.read()
"""


def test_a_store_that_is_no_launchers_is_told(place: Path, port: int) -> None:
    """As that of another job's rank 0."""
    argv = [sys.executable, "-c", textwrap.dedent(SERVES), str(port)]
    stranger = Going(place, argv, stdin=subprocess.PIPE)
    try:
        stranger.wait_for("serves")
        with launcher(place, port, "--nnodes=2", "worker.py") as run:
            assert run.wait() == Exit.USAGE
            words = "another program serves a store there: choose another port"
            assert our_lines(run)[-1] == f"distlaunch: {words} (store at localhost:{port})"
    finally:
        assert stranger.process.stdin
        stranger.process.stdin.close()
        stranger.kill()


def _turn_away(stranger: socket.socket) -> None:
    """Accept connections, and close them, until the socket is shut down."""
    with contextlib.suppress(OSError):
        while True:
            stranger.accept()[0].close()


def test_who_listens_and_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's own client would be, without limit."""
    monkeypatch.setattr(keeper, "LINGER_S", 0.1)
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = keeper.Store("127.0.0.1", silent.getsockname()[1], keeper.UNNUMBERED, False, 1.0)
        with pytest.raises(TimeoutError, match="connected, but got no answer"):
            where.opened(0.5)
        for _ in range(2):  # the one that looks whether somebody listens, and the client's
            silent.accept()[0].close()
    for thread in set(threading.enumerate()) - before:
        thread.join()


def test_nobody_serves_what_is_no_nodes_address(place: Path) -> None:
    """An endpoint of another machine where no launcher runs."""
    where = ("--rdzv-endpoint=192.0.2.77:29500", "--rdzv-conf=join_timeout=1,is_host=0")
    with going(OURS, place, "--nnodes=2", "--rdzv-backend=c10d", *where, "worker.py") as run:
        assert run.wait() == Exit.UNREACHABLE
        assert "can't reach the store at 192.0.2.77:29500: " in run.stderr
        assert "a node must have the address 192.0.2.77, or get --rdzv-conf is_host=1" in run.stderr
