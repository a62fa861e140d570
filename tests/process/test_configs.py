"""Runs of every job file in configs/."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distlaunch.job.keys import json_schema
from distlaunch.schedulers import job_keys
from tests.harness import ROOT, completed, distlaunch, ended_well

CONFIGS = ROOT / "configs"
EXPECTED = {
    "quickstart.yaml": "quickstart: ok, 2 ranks",
    "basics/all_reduce.yaml": "all_reduce: ok, 4 ranks",
    "basics/init_method.yaml": "init_method: ok",
    "basics/send_recv.yaml": "send_recv: ok",
    "hosts/simulated.yaml": "all_reduce: ok, 2 ranks",
    "migrate/local_rank_flag.yaml": "local_rank_flag: ok",
    "migrate/own_spawn.yaml": "own_spawn: ok, 2 nodes with 2 processes each",
    "migrate/rank_flags.yaml": "rank_flags: ok, 2 ranks",
    "training/pipeline_parallel.yaml": "pipeline_parallel: ok, 2 stages",
    "training/sync_sgd.yaml": "sync_sgd: ok, 2 ranks",
    "training/tensor_parallel.yaml": "tensor_parallel: ok, 2 ranks",
}
SHORTER = {
    "quickstart.yaml": "args=[--steps, 30, --sample, 20]",
    "hosts/simulated.yaml": "procs_per_node=1",  # each rank imports torch; all_reduce.yaml runs four of these
}
"""What takes its time, with settings under which it does the same sooner."""
ELSEWHERE = {
    "hosts/two_nodes.yaml",  # in tests/cluster
    "hosts/elastic.yaml",  # there too
    "hosts/etcd.yaml",  # in test_torch_run.py
    "training/ddp_snapshot.yaml",  # below, twice
    "training/fsdp_checkpoint.yaml",  # below, with its reader
}


READERS = """
import runpy, sys
_, scripts, checkpoint = sys.argv
for name, *options in (("fsdp_load_shard.py", "--shard", "1"), ("fsdp_checkpoint.py", "--load")):
    sys.argv = [name, "--dir", checkpoint, *options]
    runpy.run_path(f"{scripts}/{name}", run_name="__main__")
"""
"""One after the other in one process: what they import takes longer than what they do."""


def test_every_job_file_is_run_by_a_test() -> None:
    elsewhere = {"runs", "cookbook"}  # the cookbook: in test_cookbook.py
    files = (path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml"))
    assert {str(path) for path in files if elsewhere.isdisjoint(path.parts)} == {*EXPECTED} | ELSEWHERE


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_job_file_runs(name: str, tmp_path: Path) -> None:
    settings = [f"logs.dir={tmp_path}", *([SHORTER[name]] if name in SHORTER else [])]
    done = distlaunch("run", str(CONFIGS / name), *(part for one in settings for part in ("--set", one)))
    ended_well(done.returncode, done.stdout, done.stderr, last=EXPECTED[name])
    if "loss" in done.stdout:  # it trains for long enough to be seen joining
        assert "joined the rendezvous at 127.0.0.1:" in done.stderr


def run_in(tmp_path: Path, name: str, checkpoint: Path, *more: str) -> subprocess.CompletedProcess[str]:
    settings = [f"logs.dir={tmp_path / 'logs'}", f"args=[--dir, {checkpoint}]", *more]
    return distlaunch("run", str(CONFIGS / name), *(part for one in settings for part in ("--set", one)))


def test_a_second_run_with_fewer_ranks_resumes_from_the_snapshot(tmp_path: Path) -> None:
    first = run_in(tmp_path, "training/ddp_snapshot.yaml", tmp_path / "snapshot")
    ended_well(first.returncode, first.stdout, first.stderr, last="ddp_snapshot: ok")
    assert "resumed" not in first.stdout
    again = run_in(tmp_path, "training/ddp_snapshot.yaml", tmp_path / "snapshot", "procs_per_node=1")
    ended_well(again.returncode, again.stdout, again.stderr, last="ddp_snapshot: ok")
    assert again.stdout.count("resumed from epoch") == 1


def test_one_process_loads_one_shard_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    done = run_in(tmp_path, "training/fsdp_checkpoint.yaml", checkpoint)
    ended_well(done.returncode, done.stdout, done.stderr, last="fsdp_checkpoint: ok, 2 shards")
    argv = [sys.executable, "-c", READERS, f"{ROOT}/scripts/training", str(checkpoint)]
    read = completed(argv)
    assert read.returncode == 0, read.stdout + read.stderr
    for words in ("fsdp_load_shard: ok, shard 1", "fsdp_checkpoint: ok, read by one process"):
        assert words in read.stdout


def test_the_published_schema_is_the_one_that_the_command_prints() -> None:
    ran = distlaunch("schema")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout) == json_schema(job_keys())
    assert (CONFIGS / "job.schema.json").read_text() == ran.stdout
