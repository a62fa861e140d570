"""Runs of every job file in configs/; of the cookbook, those that need only torch: the others are planned."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from distlaunch.job.keys import json_schema
from distlaunch.schedulers import job_keys
from tests.harness import ROOT, Done, completed, distlaunch, ended_well, program

CONFIGS = ROOT / "configs"
EXPECTED = {
    "quickstart.yaml": "quickstart: ok, 2 ranks",
    "basics/all_reduce.yaml": "all_reduce: ok, 3 ranks",
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
    "quickstart.yaml": ["args=[--steps, 30, --sample, 20]"],
    "basics/all_reduce.yaml": ["procs_per_node=3"],  # each rank imports torch
    "hosts/simulated.yaml": ["procs_per_node=1"],
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
    elsewhere = {"runs", "cookbook"}  # the cookbook: below
    files = (path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml"))
    assert {str(path) for path in files if elsewhere.isdisjoint(path.parts)} == {*EXPECTED} | ELSEWHERE


def run_well(directory: Path, name: str, last: str, *settings: str) -> Done:
    """Run a job file under these settings, as `ended_well` says."""
    words = (part for one in (f"logs.dir={directory}", *settings) for part in ("--set", one))
    done = distlaunch("run", str(CONFIGS / name), *words)
    ended_well(done.returncode, done.stdout, done.stderr, last)
    return done


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_job_file_runs(name: str, tmp_path: Path) -> None:
    run_well(tmp_path, name, EXPECTED[name], *SHORTER.get(name, ()))


def test_a_second_run_with_fewer_ranks_resumes_from_the_snapshot(tmp_path: Path) -> None:
    name, last = "training/ddp_snapshot.yaml", "ddp_snapshot: ok"
    args = f"args=[--dir, {tmp_path}/snapshot]"
    assert "resumed" not in run_well(tmp_path, name, last, args).stdout
    again = run_well(tmp_path, name, last, args, "procs_per_node=1")
    assert again.stdout.count("resumed from epoch") == 1


def test_one_process_loads_one_shard_of_the_checkpoint(tmp_path: Path) -> None:
    name, last = "training/fsdp_checkpoint.yaml", "fsdp_checkpoint: ok, 2 shards"
    run_well(tmp_path, name, last, f"args=[--dir, {tmp_path}/checkpoint]")
    argv = [sys.executable, "-c", READERS, f"{ROOT}/scripts/training", str(tmp_path / "checkpoint")]
    read = completed(argv, status=0)
    for words in ("fsdp_load_shard: ok, shard 1", "fsdp_checkpoint: ok, read by one process"):
        assert words in read.stdout


def test_the_published_schema_is_the_one_that_the_command_prints() -> None:
    ran = distlaunch("schema", status=0)
    assert ran.stderr == ""
    assert json.loads(ran.stdout) == json_schema(job_keys())
    assert (CONFIGS / "job.schema.json").read_text() == ran.stdout


# The cookbook

COOKBOOK = ROOT / "configs/cookbook"
RECIPES = sorted(path.parent.name for path in COOKBOOK.glob("*/job.yaml"))
TORCH_ONLY = {"checkpoint_restart", "py_spy", "shell_script", "sweep", "torch_profiler"}
LESS = {"sweep": " --set procs_per_node=1"}
"""Each rank imports torch, which takes longer than what it does."""


def test_the_page_has_every_recipe_and_no_other() -> None:
    page = (ROOT / "docs/cookbook.md").read_text()
    assert sorted(set(re.findall(r"\(\.\./configs/cookbook/(\w+)\)", page))) == RECIPES


@pytest.mark.parametrize("name", sorted(TORCH_ONLY))
def test_a_recipe_prints_what_its_job_file_says(name: str, tmp_path: Path) -> None:
    shutil.copytree(COOKBOOK / name, tmp_path / "configs/cookbook" / name)
    header = re.search(r"(?m)^#   (.+)\n# Prints: (.+)$", (COOKBOOK / name / "job.yaml").read_text())
    assert header
    program(tmp_path / "distlaunch", f'exec {sys.executable} -m distlaunch "$@"')
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = completed(["/bin/sh", "-c", header[1] + LESS.get(name, "")], cwd=tmp_path, env=env)
    ended_well(done.returncode, done.stdout, done.stderr, last=header[2])


@pytest.mark.parametrize("name", sorted({*RECIPES} - TORCH_ONLY))
def test_a_recipe_can_be_planned_without_its_framework(name: str) -> None:
    planned = distlaunch("dry-run", str(COOKBOOK / name / "job.yaml"), "--json", status=0)
    assert not re.search(r"\{\w*(rank|size|addr|hosts|port|id)\b", planned.stdout)
