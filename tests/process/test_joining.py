"""Ranks that never join the rendezvous."""

import mmap
import os
import re
from pathlib import Path

import pytest

from distlaunch.agent.watches import doing
from tests.harness import distlaunch, running, write_job

ONE_IS_MISSING = """
    import os, signal, sys
    if os.environ["RANK"] == "0":
        {rank_0}
    from torch.distributed import destroy_process_group, init_process_group
    init_process_group("gloo")
    destroy_process_group()
"""
JOB = "gpus_per_node: 0\nprocs_per_node: 2\ntimeouts: {join: 20s}"

TWICE_A_SLOW_IMPORT_S = 40
"""Until then rank 1 has imported torch, also on two cores that run other tests."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank_0", "words"),
    [
        ("signal.pause()", r"pid \d+: has not imported torch or JAX yet"),
        ("sys.exit(0)", "exited with status 0"),
    ],
)
def test_gives_up_when_rank_0_does_not_join(tmp_path: Path, rank_0: str, words: str) -> None:
    job = JOB.replace("20s", f"{TWICE_A_SLOW_IMPORT_S}s")
    with running(write_job(tmp_path, ONE_IS_MISSING.format(rank_0=rank_0), job)) as run:
        assert run.wait() == 124
    told = rf"0/2 ranks joined; waiting for rank 0 \(node0.*{words}\), rank 1 \(node0, pid \d+: "
    refused = r"connection to the rendezvous refused\); the others are waiting for rank 0"
    at_the_end = rf"; gave up after {TWICE_A_SLOW_IMPORT_S} s \(timeouts\.join\)\n"
    notice, *_, end = re.findall(rf"{told}.*\n", run.stderr)
    assert "gave up" not in notice  # after 15 s; rank 1 may still import torch
    assert re.fullmatch(rf"{told}{refused}{at_the_end}", end), end


@pytest.mark.long
def test_gives_up_when_every_connection_is_refused(tmp_path: Path) -> None:
    worker = """
        import os
        os.environ["MASTER_ADDR"], os.environ["RANK"], os.environ["WORLD_SIZE"] = "127.0.0.9", "1", "2"
        from torch.distributed import init_process_group
        init_process_group("gloo")
    """
    done = distlaunch("run", str(write_job(tmp_path, worker, JOB)))
    assert done.returncode == 124
    assert "0/2 ranks joined; waiting for rank 0 (node0, pid " in done.stderr
    assert "gave up after 20 s (timeouts.join)" in done.stderr


def test_a_job_without_a_rendezvous_runs_to_its_end_without_the_limit(tmp_path: Path) -> None:
    job = write_job(tmp_path, "print('done')", "gpus_per_node: 0\ntimeouts: {join: none}")
    assert distlaunch("run", str(job)).returncode == 0


def test_says_which_library_a_rank_has_imported(tmp_path: Path) -> None:
    """A file in a folder of that name: what counts is the path of what a process has mapped."""
    (tmp_path / "jaxlib").mkdir()
    (tmp_path / "jaxlib" / "x.so").write_bytes(bytes(4096))
    assert doing([os.getpid()], 1) == [(False, "has not imported torch or JAX yet")]
    with (tmp_path / "jaxlib" / "x.so").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        ((_, words),) = doing([os.getpid()], 1)
    assert words.startswith("JAX imported, ")


TIMES_OUT = """
import os, socket, time
def init_process_group():
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = socket.create_server(place) if os.environ["RANK"] == "0" else None
    link = socket.socket()
    while link.connect_ex(place):
        time.sleep(0.02)
    time.sleep(1.5)
    raise RuntimeError("gloo/rendezvous: Timed out waiting 1500ms")
"""


def test_names_the_rank_that_never_joined_rather_than_one_that_timed_out(tmp_path: Path) -> None:
    """A stand-in for torch, in a folder of that name."""
    place = tmp_path / "torch" / "distributed"
    place.mkdir(parents=True)
    (place / "c10d.py").write_text(TIMES_OUT)
    worker = f"""
        import os, signal, sys
        sys.path.insert(0, {str(place)!r})
        import c10d
        signal.pause() if os.environ["RANK"] == "2" else c10d.init_process_group()
    """
    done = distlaunch("run", str(write_job(tmp_path, worker, "gpus_per_node: 0\nprocs_per_node: 4")))
    assert done.returncode == 1
    cause = r"rank 2 \(node0, pid \d+\) never joined the rendezvous; ranks 0-1, 3 were waiting in init_pro"
    assert len(re.findall(cause, done.stderr)) == 1, done.stderr
    assert "failed first" not in done.stderr
