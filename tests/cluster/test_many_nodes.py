"""An allocation of more nodes than get a step each: three hosts pretend to be 33 nodes of a real Slurm."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import parent_of
from tests.cluster.slurm import Slurm, inside, slurm_of, why_not
from tests.harness import children_of, distlaunch, kill, program, running, write_job

pytestmark = pytest.mark.together("many nodes")
NODES = 33
JOB = """
command: [sh, -c, echo ready $RANK $$; exec sleep 600]
gpus_per_node: 0
restarts: 1
timeouts: {stop: 2s, lease: 9s}
"""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm with the nodes n1 … n33."""
    if reason := why_not():
        pytest.skip(reason)
    with slurm_of(3, tmp_path_factory.mktemp("many") / "bed", NODES) as slurm:
        yield slurm


@pytest.fixture(autouse=True)
def allocated(many: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test is inside an allocation of all nodes; in the end no process is left on any host."""
    with many.emptied(), inside(many, monkeypatch, f"--nodes={NODES}", "--no-kill"):
        yield


def asked_for_steps(slurm: Slurm) -> int:
    """How many steps slurmctld has been asked for."""
    found = re.search(r"REQUEST_JOB_STEP_CREATE\s.*count:(\d+)", slurm.tool("sdiag"))
    return int(found[1]) if found else 0


def test_agents_come_by_few_steps_and_nothing_of_their_output_is_changed(tmp_path: Path, many: Slurm) -> None:
    script = """
        import os
        data = bytes((i * 7 + int(os.environ["RANK"])) % 256 for i in range(20000))
        [os.write(1, data[at : at + 4096]) for at in range(0, len(data), 4096)]
    """
    before = asked_for_steps(many)
    job = write_job(tmp_path, script, "gpus_per_node: 0\nlogs: {console: none}\n")
    distlaunch("run", str(job), status=0)
    assert asked_for_steps(many) - before == 2
    (run,) = (tmp_path / "runs").iterdir()
    for rank in range(NODES):
        printed = (run / f"rank{rank}.out").read_bytes()
        assert printed == bytes((i * 7 + rank) % 256 for i in range(20000)), rank


@pytest.mark.parametrize("victim", ["agent", "guardian", "srun"])
def test_restarts_after_a_death_that_other_nodes_of_the_step_outlive(tmp_path: Path, victim: str) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    with running(job, "--quiet") as run:
        agent = parent_of(run.wait_ready(NODES)[30])
        srun = children_of(run.process.pid)[-1]
        kill({"agent": agent, "guardian": parent_of(agent), "srun": srun}[victim])
        run.wait_for("restart 1 of 1")
        run.wait_for("ready", times=2 * NODES)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait() == 130, run.stderr
    first, *others = re.findall(r"n(\d+) was lost: (.*)", run.stderr)
    lost = {int(number) for number, _ in (first, *others)}
    if victim != "srun":
        assert lost == {31}, run.stderr
    else:  # of its nodes, which are the last 17; another's agent may have said a last word
        assert "srun on this machine was killed by signal 9 (SIGKILL); restart 1 of 1" in first[1], run.stderr
        assert min(lost) > NODES - 17, run.stderr


def test_a_node_without_python_is_named_alone(tmp_path: Path) -> None:
    """A step's nodes share an interpreter; where it is missing on one, that one is told."""
    fails = '[ "$SLURMD_NODENAME" != n31 ] || exec missing'
    python = program(tmp_path / "python", f'{fails}\nexec {sys.executable} "$@"')
    job = write_job(tmp_path, "pass", f"gpus_per_node: 0\npython: {python}\n")
    done = distlaunch("run", str(job), status=69)
    assert "n31: " in done.stderr
    assert "missing: not found" in done.stderr
