"""`--max-restarts` on nodes that are started by hand, here on one machine: all start again, together."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.harness import PATIENCE_S, Going, wait_gone
from tests.process.torchruns import NEEDS_TORCH, OURS, free_port, going, script

pytestmark = NEEDS_TORCH

MEETINGS = {
    "c10d": "--rdzv-backend=c10d --rdzv-endpoint=localhost:{port}",
    "static": "--master-addr=localhost --master-port={port} --node-rank={node}",
}
SAYS_AND_WAITS = """
    import os, signal
    count, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    os.write(1, f"ready {count}.{rank} {os.getpid()}\\n".encode())
    signal.pause()
"""


@contextmanager
def nodes(folder: Path, *words: str, meeting: str = "c10d", count: int = 2) -> Iterator[list[Going]]:
    """The launchers of all nodes."""
    port = free_port()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                going(
                    OURS,
                    folder,
                    f"--nnodes={count}",
                    *MEETINGS[meeting].format(port=port, node=node).split(),
                    *words,
                    "worker.py",
                )
            )
            for node in range(count)
        ]


def statuses(runs: list[Going]) -> list[int]:
    return [run.wait() for run in runs]


def told(runs: list[Going]) -> str:
    return "\n".join(run.stderr for run in runs)


def pids_of(run: Going, count: int) -> dict[str, int]:
    """The workers that a node has started so far."""
    found = re.findall(r"^ready ([\d.]+) (\d+)$", run.stdout, re.MULTILINE)
    assert len(found) == count, run.stdout
    return {name: int(pid) for name, pid in found}


@pytest.mark.parametrize(("meeting", "fails"), [("c10d", 1), ("static", 0)])
def test_a_failing_rank_has_the_ranks_of_all_nodes_start_again(
    tmp_path: Path, meeting: str, fails: int
) -> None:
    script(
        tmp_path,
        """
        import os
        import torch, torch.distributed as dist
        count, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        os.write(1, f"generation {count}: rank {rank} of {int(total)}\\n".encode())
        if count == 0 and rank == FAILS:
            os._exit(5)
        dist.barrier()  # of which the other rank fails, too, often before its launcher is told
        dist.destroy_process_group()
        """.replace("FAILS", str(fails)),
    )
    with nodes(tmp_path, "--max-restarts=2", meeting=meeting) as runs:
        assert statuses(runs) == [0, 0], told(runs)
        said = "".join(run.stdout for run in runs).splitlines()
        assert len(said) == len({*said})
        last = [f"generation 1: rank {rank} of 2" for rank in range(2)]
        assert {f"generation 0: rank {fails} of 2", *last} <= {*said}
        failed = rf"rank {fails} .* failed first: exit status 5; restart 1 of 2$"
        for pattern in (f"^distlaunch: {failed}", rf"^distlaunch: node \d.* failed: {failed}"):
            assert re.search(pattern, told(runs), re.MULTILINE), told(runs)


def test_once_all_restarts_are_used_all_nodes_end(tmp_path: Path) -> None:
    script(tmp_path, "import os, signal, sys\nif os.environ['RANK'] == '1': sys.exit(5)\nsignal.pause()")
    with nodes(tmp_path, "--max-restarts=1") as runs:
        assert statuses(runs) == [5, 5], told(runs)
        for run in runs:
            assert run.stderr.count("restart 1 of 1") == 1
            assert "not restarting: already restarted once" in run.stderr


def test_failures_on_two_nodes_at_once_are_one_restart(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import os, sys
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.write(1, b"ready 0 1\\n")
            open("fifo").read()
            sys.exit(5)
        """,
    )
    os.mkfifo(tmp_path / "fifo")
    with nodes(tmp_path, "--max-restarts=1", count=3) as runs:
        for run in runs:
            run.wait_ready(1)
        (tmp_path / "fifo").write_text("end")
        assert statuses(runs) == [0, 0, 0], told(runs)


@pytest.mark.parametrize("generation", [0, 1])
def test_a_launcher_that_is_killed_ends_all_in_any_generation(tmp_path: Path, generation: int) -> None:
    script(tmp_path, SAYS_AND_WAITS)
    with nodes(tmp_path, "--max-restarts=3") as (first, second):
        for count in range(generation + 1):
            first.wait_for("ready", times=count + 1)
            second.wait_for("ready", times=count + 1)
            workers = [*pids_of(first, count + 1).values(), *pids_of(second, count + 1).values()]
            if count < generation:
                os.kill(workers[-1], signal.SIGUSR1)
        second.process.kill()
        assert first.wait() == 70, first.stderr
        assert "its launcher was killed" in first.stderr
        wait_gone(workers, PATIENCE_S)


def test_a_launcher_that_is_stopped_while_others_are_ready_to_start_again_ends_them(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import os, signal, sys
        if os.environ["RANK"] == "0":
            open("fifo").read()
            sys.exit(5)
        signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"told to end\\n"))
        os.write(1, b"ready 0 1\\n")
        while True:
            signal.pause()
        """,
    )
    os.mkfifo(tmp_path / "fifo")
    with nodes(tmp_path, "--max-restarts=3", "--shutdown-timeout=4", meeting="static") as (first, second):
        second.wait_ready(1)
        (tmp_path / "fifo").write_text("end")
        second.wait_for("told to end")
        first.wait_for("restart 1 of 3")
        second.process.send_signal(signal.SIGINT)
        assert first.wait() == 130, first.stderr
        second.process.send_signal(signal.SIGINT)
        assert second.wait() == 130, second.stderr
        assert "node 1 failed: stopped by SIGINT" in first.stderr


def test_a_node_that_is_done_cannot_start_again(tmp_path: Path) -> None:
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
    os.mkfifo(tmp_path / "fifo")
    with nodes(tmp_path, "--max-restarts=3", meeting="static") as (first, second):
        wait_gone(list(first.wait_ready(1).values()), PATIENCE_S)
        (tmp_path / "fifo").write_text("end")
        assert statuses([first, second]) == [7, 7], told([first, second])
        assert "node 0 failed: it had succeeded already, and can't start again" in second.stderr
