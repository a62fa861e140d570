"""The Python API with jobs on several hosts, as a script and in IPython."""

import os
import sys

import pytest

from tests.cluster.hosts import Site
from tests.harness import ROOT, completed

TRAIN = """
import os, signal
print(os.environ["NAME"], os.getpid(), flush=True)
signal.pause()
"""
PROGRAM = """
import itertools, os
import distlaunch as dl

def job(name):
    return dl.Job("train.py", name=name, nodes=["host1", "host2", "host3"], gpus_per_node=0, procs_per_node=2,
                  env={"NAME": name}, **{"ssh.config": "ssh_config"})

with job("first").start() as first, job("second").start() as second:
    seen = [list(itertools.islice(run.logs(follow=True), 6)) for run in (first, second)]
    assert [{line.text.split()[0] for line in lines} for lines in seen] == [{"first"}, {"second"}]
    pid = next(line.text.split()[1] for line in second.logs(follow=True, rank=4))
    os.kill(int(pid), 9)  # the test's hosts share their processes with this machine
    result = second.wait(timeout=60)
    assert (result.root_cause.rank, result.root_cause.node, first.state) == (4, "host3", "RUNNING"), result
assert first.result().state == "CANCELLED"
print("all as expected")
"""


@pytest.mark.parametrize("how", [["-c"], ["-m", "IPython", "-c"]], ids=["script", "ipython"])
def test_runs_two_jobs_on_three_hosts_and_names_the_rank_that_was_killed(how: list[str], site: Site) -> None:
    (site.directory / "train.py").write_text(TRAIN)
    before = site.processes()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(site.directory / "ipython")}
    done = completed([sys.executable, *how, PROGRAM], cwd=site.directory, env=env, status=0)
    assert "all as expected" in done.stdout, done.stdout + done.stderr
    site.assert_gone(before)
