"""Slurm batch scripts, run by a real shell with a stand-in for scontrol."""

import subprocess
from pathlib import Path

import pytest

from distlaunch.job.file import job_of
from distlaunch.job.spec import JobSpec
from distlaunch.schedulers import load
from distlaunch.schedulers.script import Call
from tests.harness import distlaunch
from tests.process.commands import completed


def job_from(text: str, folder: Path) -> JobSpec:
    return job_of(text, str(folder / "job.yaml"), submitted=True)


def run_script(spec: JobSpec, call: Call, folder: Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run a batch script as slurmstepd would; scontrol is one that says what it is asked."""
    tool = folder / "scontrol"
    tool.write_text('#!/bin/sh\necho "scontrol $*"\n')
    tool.chmod(0o755)
    script = folder / "script.sh"
    script.write_text(load("slurm").script(spec, call))
    env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "17", **environ}
    return completed(["bash", str(script)], env=env)


@pytest.mark.parametrize(
    ("status", "starts", "said"),
    [(0, "0", ""), (3, "0", ""), (137, "0", "scontrol requeue 17\n"), (137, "2", "")],
)
def test_the_script_requeues_only_for_a_distlaunch_that_was_killed(
    status: int, starts: str, said: str, tmp_path: Path
) -> None:
    spec = job_from("script: train.py\nrestarts: {requeue: 2}\n", tmp_path)
    end = "kill -KILL $$" if status == 137 else f"exit {status}"
    done = run_script(spec, Call(("bash", "-c", end)), tmp_path, SLURM_RESTART_COUNT=starts)
    assert (done.returncode, done.stdout) == (status, said)


def test_tells_where_a_script_can_not_be_kept_and_a_dry_run_makes_nothing(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("command: ['true']\nlogs: {dir: job.yaml}\n")
    done = distlaunch("submit", str(job))
    assert done.returncode == 1
    assert f"can't write the batch script to {job}: File exists; set logs.dir" in done.stderr
    assert (
        "no GPUs are requested: set gpus_per_node to the number of GPUs per node, or to 0 for a CPU job"
        in done.stderr
    )
    job.write_text("command: ['true']\ngpus_per_node: 0\n")
    done = distlaunch("submit", "--dry-run", str(job))
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == [job]


def test_runs_the_setup_first_and_passes_a_job_along_with_the_script(tmp_path: Path) -> None:
    spec = job_from("script: train.py\nslurm:\n  setup: |\n    export A=1\n    echo $A\n", tmp_path)
    text = "script: $HOME/`x`\nEND_OF_JOB\nargs: ['it''s']\n"
    done = run_script(spec, Call(("cat",), text), tmp_path)
    assert done.stdout == f"1\n{text}", done.stderr
