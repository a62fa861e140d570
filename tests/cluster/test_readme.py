"""README's steps for two machines, on hosts that share nothing and have README's names in ssh's config."""

import os
import re
import sys
from pathlib import Path

from tests.cluster.hosts import Site, find
from tests.harness import ROOT, completed, program

STEPS = (ROOT / "README.md").read_text().partition("## On two machines")[2].partition("\n## ")[0]


def block(kind: str) -> str:
    """The first block of README's steps in a language."""
    return STEPS.partition(f"```{kind}\n")[2].partition("```")[0]


def test_readmes_steps_work_as_they_are_written(site: Site) -> None:
    ssh = f"{find('ssh')} -F {site.ssh_config}"
    for name, argv in (("distlaunch", f"{sys.executable} -m distlaunch"), ("ssh", ssh)):
        program(site.directory / name, f'exec {argv} "$@"')
    for name, host in (("gpu-a", "host1"), ("gpu-b", "host2")):
        home = site.directory / name
        (home / ".local" / "bin").mkdir(parents=True)
        (home / ".local" / "bin" / "uv").symlink_to(Path(sys.executable).with_name("uv"))
        site.name(name, host, site.sshd(host, over=site.login(home, "/bin/sh")))
    (project := site.directory / "project").mkdir()
    (project / "job.yaml").write_text(block("yaml"))
    script = "import os, sys\nprint('rank', os.environ['RANK'], *sys.argv[1:], '/envs/' in sys.executable)\n"
    (project / "train.py").write_text(script)
    (project / "requirements.txt").touch()
    ours = {"PATH": f"{site.directory}:{os.environ['PATH']}", "HOME": str(site.directory / "here")}
    env = {**os.environ, "PYTHONPATH": str(ROOT), **ours}
    steps = re.findall(r"(?m)^distlaunch .*$", block("sh"))
    assert len(steps) == 3
    commands = (["/bin/sh", "-c", step] for step in ("ssh gpu-a true", *steps))
    _, planned, checked, ran = (completed(argv, 0, cwd=project, env=env).stdout for argv in commands)
    assert "16 ranks on 2 nodes" in planned
    assert "2 connections between nodes" in checked
    ranks = ["[gpu-a:0] rank 0 --epochs 10 True", "[gpu-b:1] rank 1 --epochs 10 True"]
    assert sorted(ran.splitlines()) == ranks
