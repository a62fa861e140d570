"""`distlaunch import`: job files that run, and mistakes reported in one line."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import distlaunch

TELL = "import os, sys; print('told', os.environ['RANK'], sys.argv[1:], flush=True)\n"


def imported(*words: str, **options: Any) -> str:
    """What is printed, without a complaint."""
    made = distlaunch("import", *words, **options, status=0)
    assert made.stderr == ""
    return made.stdout


@pytest.mark.parametrize("as_words", [False, True], ids=["quoted", "after --"])
def test_an_imported_torchrun_command_runs(as_words: bool, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(TELL)
    words = ["torchrun", "--nproc-per-node", "2", "x.py", "a", "é $(b)", "{rank}", "{epoch}", "{{a}}"]
    command = ["--", *words] if as_words else [shlex.join(words)]
    (tmp_path / "job.yaml").write_text(imported("torchrun", *command))
    ran = distlaunch("run", str(tmp_path / "job.yaml"), cwd="/", status=0)
    for rank in range(2):
        assert f"told {rank} ['a', 'é $(b)', '{{rank}}', '{{epoch}}', '{{{{a}}}}']" in ran.stdout


def test_json_has_the_keys_and_the_comments() -> None:
    made = json.loads(imported("torchrun", "torchrun -t 3 x.py", "--json"))
    assert made["job"] == {"procs_per_node": 1, "script": "x.py"}
    assert any("--tee" in comment for comment in made["comments"])


BATCH = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=2 --time=1:00:00
module load cuda
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) GREETING=hello
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 2 --rdzv_endpoint $MASTER_ADDR:29500 x.py a
"""


def test_an_imported_batch_script_runs_and_becomes_one_again(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(TELL)
    (tmp_path / "job.sh").write_text(BATCH)
    (tmp_path / "job.yaml").write_text(imported("sbatch", str(tmp_path / "job.sh")))
    has_python = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    job = str(tmp_path / "job.yaml")
    keys = ("--set", "gpus_per_node=0", "--set", "launcher=local")
    ran = distlaunch("run", job, *keys, env=has_python, cwd="/", status=0)
    for rank in range(4):
        assert f"told {rank} ['a']" in ran.stdout
    script = distlaunch("export", "slurm", job).stdout
    for line in ("nodes=2", "gpus-per-node=2", "ntasks-per-node=2", "time=1:00:00"):
        assert f"#SBATCH --{line}\n" in script
    assert "module load cuda\n" in script


def test_names_the_command_that_installs_a_missing_extra(tmp_path: Path) -> None:
    (tmp_path / "tree_sitter.py").write_text("raise ImportError")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    refused = distlaunch("import", "sbatch", "-", input=BATCH, env=environ)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.endswith("needs tree-sitter: pip install 'distlaunch[sbatch]'\n")


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("torchrun", "torchrun --nproc-per-node 2 \\\n x.py\n", "script: x.py"),
        ("accelerate", "num_processes: 2\n", "procs_per_node"),
        ("sbatch", BATCH, "script: x.py"),
        ("hostfile", "a slots=2\n", "nodes: [a]"),
    ],
)
def test_a_dash_is_standard_input(kind: str, text: str, words: str) -> None:
    made = imported(kind, "-", input=text)
    assert words in made and "hostfile:" not in made


@pytest.mark.parametrize("command", ["submit", "run", "import torchrun", "import accelerate"])
def test_other_commands_point_to_the_import_of_a_batch_script(command: str, tmp_path: Path) -> None:
    refused = distlaunch(*command.split(), "-", input=BATCH)
    assert (refused.returncode, refused.stdout) == (2, "")
    told = "standard input is a Slurm batch script, not a job file: submit it with sbatch, or convert it"
    assert refused.stderr == f"distlaunch: {told} with `distlaunch import sbatch -`\n"
    script = tmp_path / "train.sh"
    script.write_text(BATCH)
    assert "`distlaunch import sbatch " in distlaunch(*command.split(), str(script), status=2).stderr


def test_reports_a_mistake_in_one_line() -> None:
    refused = distlaunch("import", "sbatch", "/bin/true", status=2)
    assert (refused.stdout, len(refused.stderr.splitlines()), "not" in refused.stderr) == ("", 1, True)
