"""Runs the recipes in configs/cookbook that need only torch, and plans the others."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, completed, distlaunch, ended_well, program

COOKBOOK = ROOT / "configs/cookbook"
RECIPES = sorted(path.parent.name for path in COOKBOOK.glob("*/job.yaml"))
TORCH_ONLY = {"checkpoint_restart", "py_spy", "shell_script", "sweep", "torch_profiler"}
SHORTER = {"sweep": " --set procs_per_node=1"}
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
    done = completed(["/bin/sh", "-c", header[1] + SHORTER.get(name, "")], cwd=tmp_path, env=env)
    ended_well(done.returncode, done.stdout, done.stderr, last=header[2])


@pytest.mark.parametrize("name", sorted({*RECIPES} - TORCH_ONLY))
def test_a_recipe_can_be_planned_without_its_framework(name: str) -> None:
    planned = distlaunch("dry-run", str(COOKBOOK / name / "job.yaml"), "--json", status=0)
    assert not re.search(r"\{\w*(rank|size|addr|hosts|port|id)\b", planned.stdout)
