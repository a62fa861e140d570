"""`distlaunch import`: what it prints runs; mistakes are told in a line."""

import json
import shlex
from pathlib import Path

import pytest

from tests.harness import distlaunch

TELL = "import os, sys; print('told', os.environ['RANK'], sys.argv[1:], flush=True)\n"


@pytest.mark.parametrize("as_words", [False, True], ids=["quoted", "after --"])
def test_an_imported_torchrun_command_runs(as_words: bool, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(TELL)
    words = ["torchrun", "--nproc-per-node", "2", "x.py", "a", "é $(b)", "{rank}", "{epoch}", "{{a}}"]
    command = ["--", *words] if as_words else [shlex.join(words)]
    made = distlaunch("import", "torchrun", *command)
    assert (made.returncode, made.stderr) == (0, "")
    (tmp_path / "job.yaml").write_text(made.stdout)
    ran = distlaunch("run", str(tmp_path / "job.yaml"), cwd="/")
    assert ran.returncode == 0, ran.stderr
    for rank in range(2):
        assert f"told {rank} ['a', 'é $(b)', '{{rank}}', '{{epoch}}', '{{{{a}}}}']" in ran.stdout


def test_json_has_the_same_keys_and_the_comments() -> None:
    made = json.loads(distlaunch("import", "torchrun", "torchrun -t 3 x.py", "--json").stdout)
    assert made["job"] == {"procs_per_node": 1, "script": "x.py"}
    assert any("--tee" in comment for comment in made["comments"])


def test_files_are_read(tmp_path: Path) -> None:
    config, hosts = tmp_path / "config.yaml", tmp_path / "hosts"
    config.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    hosts.write_text("a slots=2\n")
    accelerate = distlaunch("import", "accelerate", str(config), "--", "x.py", "--lr", "1")
    assert 'args: [--lr, "1"]' in accelerate.stdout
    assert "nodes: [a]" in distlaunch("import", "hostfile", str(hosts)).stdout


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("torchrun", "torchrun --nproc-per-node 2 \\\n x.py\n", "script: x.py"),
        ("accelerate", "num_processes: 2\n", "procs_per_node"),
        ("hostfile", "a slots=2\n", "nodes: [a]"),
    ],
)
def test_a_dash_is_standard_input(kind: str, text: str, words: str) -> None:
    made = distlaunch("import", kind, "-", input=text)
    assert (made.returncode, made.stderr) == (0, "")
    assert words in made.stdout
    assert "hostfile:" not in made.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["torchrun", "torchrun 'x"], "no closing quotation: torchrun 'x"),
        (["accelerate", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["hostfile", "nowhere"], "nowhere: No such file"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: str) -> None:
    refused = distlaunch("import", *arguments)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert len(refused.stderr.splitlines()) == 1
    assert words in refused.stderr
