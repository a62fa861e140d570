"""An allocation of more nodes than get a step each: three hosts pretend to be 33 nodes of a real Slurm."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import parent_of
from tests.cluster.slurm import Slurm, inside, slurm_of, why_not
from tests.harness import Run, children_of, distlaunch, kill, program, running, write_job

pytestmark = pytest.mark.together("many nodes")
NODES = 33
KEYS = "gpus_per_node: 0\nrestarts: 1\ntimeouts: {stop: 2s, lease: 9s}\n"
WAITS = "command: [sh, -c, echo ready $RANK $$; exec sleep 600]\n"
VICTIM = 30


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
        for at in range(0, len(data), 4096):
            os.write(1, data[at : at + 4096])
    """
    before = asked_for_steps(many)
    done = distlaunch("run", str(write_job(tmp_path, script, "gpus_per_node: 0\nlogs: {console: none}\n")))
    assert done.returncode == 0, done.stderr
    assert asked_for_steps(many) - before == 2
    (run,) = (tmp_path / "runs").iterdir()
    for rank in range(NODES):
        printed = (run / f"rank{rank}.out").read_bytes()
        assert printed == bytes((i * 7 + rank) % 256 for i in range(20000)), rank


VICTIMS: dict[str, Callable[[Run], int]] = {
    "agent": lambda run: parent_of(run.worker_pids()[VICTIM]),
    "guardian": lambda run: parent_of(parent_of(run.worker_pids()[VICTIM])),
    "srun": lambda run: children_of(run.process.pid)[-1],
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_restarts_after_a_death_that_other_nodes_of_the_step_outlive(tmp_path: Path, victim: str) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(WAITS + KEYS)
    with running(job, "--quiet") as run:
        run.wait_ready(NODES)
        kill(VICTIMS[victim](run))
        run.wait_for("restart 1 of 1")
        run.wait_for("ready", times=2 * NODES)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait() == 130, run.stderr
    first, *others = re.findall(r"n(\d+) was lost: (.*)", run.stderr)
    if victim != "srun":
        assert {number for number, _ in (first, *others)} == {"31"}, run.stderr
    else:  # of its nodes, which are the last 17; another's agent may have said a last word
        told = "srun on this machine was killed by signal 9 (SIGKILL); restart 1 of 1"
        assert told in first[1], run.stderr
        assert all(int(number) > NODES - 17 for number, _ in (first, *others)), run.stderr


def test_a_node_without_python_is_named_alone(tmp_path: Path) -> None:
    """A step's nodes share an interpreter; where it is missing on one, that one is told."""
    fails = '[ "$SLURMD_NODENAME" != n31 ] || exec missing'
    python = program(tmp_path / "python", f'{fails}\nexec {sys.executable} "$@"')
    job = write_job(tmp_path, "pass", f"gpus_per_node: 0\npython: {python}\n")
    done = distlaunch("run", str(job), status=69)
    assert "n31: " in done.stderr
    assert "missing: not found" in done.stderr
