"""Ranks that never join the rendezvous."""

import re
from pathlib import Path

import pytest

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
        ("signal.pause()", r"pid \d+: has not imported torch yet"),
        ("sys.exit(0)", "exited with status 0 without joining"),
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
    job = write_job(tmp_path, "print('done')", "gpus_per_node: 0\nrendezvous: none")
    assert distlaunch("run", str(job)).returncode == 0
