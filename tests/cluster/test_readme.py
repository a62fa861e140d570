"""README's steps for a job of one's own, on two hosts that ssh knows by README's names."""

import os
import re
import sys

from tests.cluster.hosts import Site, find
from tests.harness import ROOT, completed, program

STEPS = (ROOT / "README.md").read_text().partition("## Run your own job")[2].partition("\n## ")[0]


def block(kind: str) -> str:
    """The first block of README's steps in a language."""
    return STEPS.partition(f"```{kind}\n")[2].partition("```")[0]


def test_readmes_steps_work_as_they_are_written(site: Site) -> None:
    ssh = f"{find('ssh')} -F {site.ssh_config}"
    for name, argv in (("distlaunch", f"{sys.executable} -m distlaunch"), ("ssh", ssh)):
        program(site.folder / name, f'exec {argv} "$@"')
    for name, host in (("gpu-a", "host1"), ("gpu-b", "host2")):
        site.name(name, host)
    (site.folder / "job.yaml").write_text(block("yaml"))
    script = "import os, sys\nprint('rank', os.environ['RANK'], *sys.argv[1:])\n"
    (site.folder / "train.py").write_text(script)
    env = {**os.environ, "PATH": f"{site.folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    steps = re.findall(r"(?m)^distlaunch .*$", block("sh"))
    assert len(steps) == 3
    said = []
    for step in ["ssh gpu-a true", *steps]:
        done = completed(["/bin/sh", "-c", step], cwd=site.folder, env=env, status=0)
        said.append(done.stdout)
    assert "16 ranks on 2 nodes" in said[1]
    assert "2 connections between nodes" in said[2]
    ranks = ["[gpu-a:0] rank 0 --epochs 10", "[gpu-b:1] rank 1 --epochs 10"]
    assert sorted(said[3].splitlines()) == ranks
