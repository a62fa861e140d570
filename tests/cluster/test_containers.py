"""Ranks in containers, by podman, here and on three hosts over ssh: they train, and nothing gets out."""

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
from tests.cluster.test_launchers import TRAINS
from tests.harness import (
    PATIENCE_S,
    children_of,
    command_line,
    descendants_of,
    distlaunch,
    kill,
    running,
    wait_gone,
    write_job,
)

pytestmark = pytest.mark.together("containers")
WAITS = """
    import os, signal
    os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
    signal.pause()
"""
CPU = "gpus_per_node: 0\n"
CONNECT_S = 10
"""So long a node may take to answer once its image is there."""


@pytest.fixture
def hosts(bed: Bed) -> str:
    return f"nodes: [host1, host2, host3]\nssh: {{config: {bed.folder}/ssh_config}}\n"


def test_ranks_train_in_containers_on_three_hosts(
    tmp_path: Path, podman: Podman, bed: Bed, hosts: str
) -> None:
    before = bed.processes()
    worker = TRAINS + "\n    import os; print('inside', os.path.exists('/run/.containerenv'), flush=True)\n"
    done = distlaunch(
        "run", str(write_job(tmp_path, worker, f"{CPU}python: {sys.executable}\n{hosts}{podman.section()}"))
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout.count("sum 6"), done.stdout.count("inside True")) == (3, 3), done.stdout
    wait_gone(sorted(bed.processes() - before), PATIENCE_S)
    assert podman.tool("ps", "--all", "--quiet") == ""


def in_containers(pids: set[int]) -> list[int]:
    """The first processes of containers."""
    ours = os.stat("/proc/self/ns/pid").st_ino
    found = []
    for pid in pids:
        try:
            inside = os.stat(f"/proc/{pid}/ns/pid").st_ino != ours
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if inside and os.stat(f"/proc/{parent}/ns/pid").st_ino == ours:
                found.append(pid)
        except OSError:
            continue
    return sorted(found)


def named(pids: set[int], *words: str) -> list[int]:
    """Those whose command lines have all these words."""
    return sorted(pid for pid in pids if {*words} <= {*command_line(pid)})


@pytest.mark.parametrize("victim", ["ssh", "podman", "init", "agent", "rank", "controller"])
def test_whoever_is_killed_nothing_is_left(
    tmp_path: Path, podman: Podman, bed: Bed, hosts: str, victim: str
) -> None:
    before = bed.processes()
    with running(write_job(tmp_path, WAITS, CPU + hosts + podman.section())) as run:
        run.wait_ready(3)
        there = bed.processes() - before
        guardian = in_containers(there)[0]
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


def test_what_is_missing_is_told(tmp_path: Path, podman: Podman) -> None:
    for section, kind, advice in (
        ("container: {image: x.sif, runtime: apptainer}", "no container runtime", "install apptainer there"),
        (podman.section(image="localhost/none"), "no image", "check container.image: localhost/none"),
        (podman.section() + "python: /none/python", "no python", "the image needs Python 3.8 or later"),
        (podman.section(options=["--no-such"]), "agent not started", "unknown flag: --no-such"),
    ):
        done = distlaunch("run", str(write_job(tmp_path, "pass", f"{CPU}{section}\n")))
        assert done.returncode == 69, done.stderr
        assert f"node0: {kind}; " in done.stderr and advice in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.long
def test_an_image_that_is_pulled_is_told_and_has_its_time(tmp_path: Path, podman: Podman) -> None:
    """No registry can be had here: a stand-in for podman pulls, for longer than a node may take to answer."""
    fifo, folder = tmp_path / "pulled", tmp_path / "bin"
    os.mkfifo(fifo)
    folder.mkdir()
    stand_in = folder / "podman"
    stand_in.write_text(
        f"""#!/bin/sh
        case " $* " in *" image inspect "*) exit 1;; *" pull "*) read -r _ < {fifo}; exit 0;; esac
        exec {shutil.which("podman")} "$@"
        """
    )
    stand_in.chmod(0o755)
    job = write_job(tmp_path, "print('ran')", f"{CPU}timeouts: {{connect: {CONNECT_S}s}}\n{podman.section()}")
    with running(job, env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}) as run:
        run.wait_for("node0: pulling image localhost/thin")
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(CONNECT_S + 1.0)
        fifo.write_text("done\n")
        assert run.wait() == 0, run.stderr
        assert "node0: has image localhost/thin" in run.stderr and "ran" in run.stdout


def test_an_interrupt_ends_a_pull(tmp_path: Path, podman: Podman) -> None:
    folder, fifo = tmp_path / "bin", tmp_path / "never"
    folder.mkdir()
    os.mkfifo(fifo)
    stand_in = folder / "podman"
    stand_in.write_text(f'#!/bin/sh\ncase " $* " in *" pull "*) cat {fifo};; *) exit 1;; esac\n')
    stand_in.chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
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
    done = distlaunch("run", str(write_job(tmp_path, tells, job)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"job {allocation} True") == 3, done.stdout
    assert podman.tool("ps", "--all", "--quiet") == ""
