"""Ranks in containers, by podman, here, on three hosts over ssh, and in an allocation of Slurm."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.containers import Podman
from tests.cluster.hosts import Bed
from tests.cluster.slurm import Slurm
from tests.cluster.workers import SLEEPER
from tests.harness import (
    children_of,
    command_line,
    descendants_of,
    distlaunch,
    kill,
    program,
    running,
    wait_gone,
    write_job,
)

pytestmark = pytest.mark.together("containers")
CPU = "gpus_per_node: 0\n"
CONNECT_S = 10
"""So long a node may take to answer once its image is there."""


def named(pids: set[int], *words: str) -> list[int]:
    """Those whose command lines have all these words."""
    return sorted(pid for pid in pids if {*words} <= {*command_line(pid)})


@pytest.mark.parametrize("victim", ["ssh", "podman", "init", "agent", "rank", "controller"])
def test_no_container_outlives_a_kill(tmp_path: Path, podman: Podman, bed: Bed, victim: str) -> None:
    before = bed.processes()
    hosts = f"nodes: [host1, host2, host3]\nssh: {{config: {bed.directory}/ssh_config}}\n"
    with running(write_job(tmp_path, SLEEPER, CPU + hosts + podman.section())) as run:
        run.wait_ready(3)
        there = bed.processes() - before
        guardian = int(podman.tool("inspect", "--latest", "--format={{.State.Pid}}"))
        (agent,) = children_of(guardian)
        kill(
            {
                "ssh": lambda: children_of(run.process.pid)[0],
                "podman": lambda: named(there, "podman", "run")[0],
                "init": lambda: guardian,
                "agent": lambda: agent,
                "rank": lambda: children_of(agent)[0],
                "controller": lambda: run.process.pid,
            }[victim]()
        )
        status = run.wait()
        wait_gone(sorted(there), 20.0)
    assert status == {"rank": 137, "controller": -signal.SIGKILL}.get(victim, 71), run.stderr
    if victim not in ("rank", "controller"):
        assert "was lost" in run.stderr
    assert podman.tool("ps", "--quiet") == ""


def test_names_what_is_missing_for_a_container(tmp_path: Path, podman: Podman) -> None:
    for section, kind, advice in (
        (
            "container: {image: x.sif, runtime: apptainer}",
            "no container runtime",
            "install apptainer on the node",
        ),
        (podman.section(image="localhost/none"), "no image", "check container.image: localhost/none"),
        (podman.section() + "python: /none/python", "no python", "the image needs Python 3.8 or later"),
        (podman.section(options=["--no-such"]), "agent not started", "unknown flag: --no-such"),
    ):
        done = distlaunch("run", str(write_job(tmp_path, "pass", f"{CPU}{section}\n")), status=69)
        assert f"node0: {kind}; " in done.stderr and advice in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def pulling_with(directory: Path, script: str) -> dict[str, str]:
    """An environment in which a stand-in for podman pulls, as no registry can be had here."""
    program(directory / "podman", script)
    return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"}


@pytest.mark.long
def test_tells_of_a_pull_and_gives_it_time(tmp_path: Path, podman: Podman) -> None:
    """It takes longer than a node may take to answer."""
    os.mkfifo(fifo := tmp_path / "pulled")
    real = shutil.which("podman")
    pulls = f'*" image inspect "*) exit 1;; *" pull "*) read -r _ < {fifo}; exit 0;;'
    job = write_job(tmp_path, "print('ran')", f"{CPU}timeouts: {{connect: {CONNECT_S}s}}\n{podman.section()}")
    env = pulling_with(tmp_path, f'case " $* " in {pulls} esac\nexec {real} "$@"')
    with running(job, env=env) as run:
        run.wait_for("node0: pulling image localhost/thin")
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(CONNECT_S + 1.0)
        fifo.write_text("done\n")
        assert run.wait() == 0, run.stderr
        assert "node0: has image localhost/thin" in run.stderr and "ran" in run.stdout


def test_an_interrupt_ends_a_pull(tmp_path: Path, podman: Podman) -> None:
    os.mkfifo(fifo := tmp_path / "never")
    env = pulling_with(tmp_path, f'case " $* " in *" pull "*) cat {fifo};; *) exit 1;; esac')
    with running(write_job(tmp_path, "pass", CPU + podman.section()), env=env) as run:
        run.wait_for("node0: pulling image")
        (shell,) = children_of(run.process.pid)
        there = [shell, *descendants_of(shell)]
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.stderr
        wait_gone(there, 2.0)


def test_the_steps_of_an_allocation_have_containers(
    tmp_path: Path, podman: Podman, slurm: Slurm, allocation: str
) -> None:
    job = f"{CPU}python: {sys.executable}\n{podman.section()}"
    inside = "os.path.exists('/run/.containerenv')"
    tells = f"import os; print('job', os.environ['SLURM_JOB_ID'], {inside}, flush=True)"
    done = distlaunch("run", str(write_job(tmp_path, tells, job)), status=0)
    assert done.stdout.count(f"job {allocation} True") == 3, done.stdout
    assert podman.tool("ps", "--all", "--quiet") == ""
