"""README says what is true: its commands exist, its examples run, its tables are complete."""

import re
import signal
from pathlib import Path

import pytest

from distlaunch.contract import HANDLED_SIGNALS, RESERVED
from distlaunch.errors import Exit
from distlaunch.job.reference import reference
from tests.harness import ROOT, distlaunch

README = (ROOT / "README.md").read_text()


def test_the_table_of_the_job_file_is_complete() -> None:
    rows = re.findall(r"(?m)^\| `([\w.\[\]]+)` \| (.+) \| (.*) \|$", README)
    assert [(key, what, default.strip()) for key, what, default in rows] == [
        (key, what, default) for key, _, what, default in reference()
    ]


def test_every_exit_status_is_told() -> None:
    table = README.partition("distlaunch's own:")[2].partition("## ")[0]
    told = {int(number) for row in re.findall(r"(?m)^\| ([\d, ]+) \|", table) for number in row.split(",")}
    assert told >= {status for status in Exit if status not in (Exit.OK, Exit.FAILED, Exit.INTERNAL)}
    assert told >= {128 + signal.Signals[name] for name in HANDLED_SIGNALS.split(",")}


def test_the_variables_that_workers_get_are_told() -> None:
    internal = {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    assert [name for name in RESERVED - internal if f"`{name}`" not in README] == []


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^):#]+)\)", README))))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize("script", ["try", "test", "faults", "benchmark", "testbed"])
def test_the_scripts_can_be_run(script: str) -> None:
    assert (ROOT / "scripts" / script).stat().st_mode & 0o111


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"(?m)^\| `distlaunch ([\w-]+) ", README)) | {"schema"})
)
def test_the_commands_exist_and_take_json(command: str) -> None:
    shown = distlaunch(command, "--help", env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", "TERM": "dumb"})
    assert shown.returncode == 0
    assert command in ("schema", "torchrun") or "--json" in shown.stdout


def test_the_example_job_can_be_planned_as_told(tmp_path: Path) -> None:
    example = README.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "job.yaml").write_text(example)
    planned = distlaunch("dry-run", str(tmp_path / "job.yaml"), "--set", "gpus_per_node=8")
    assert planned.returncode == 0, planned.stderr
    assert "16 ranks on 2 nodes, nccl" in planned.stdout
    asked = distlaunch("dry-run", str(tmp_path / "job.yaml"))
    assert asked.returncode == 2
    assert "--set gpus_per_node=8" in asked.stderr
