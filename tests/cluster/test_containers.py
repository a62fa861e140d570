"""Ranks in containers, by podman, here, on three hosts over ssh, and in an allocation of Slurm."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.containers import IMAGE, Podman
from tests.cluster.hosts import Bed, named
from tests.cluster.workers import SLEEPER
from tests.harness import descendants_of, distlaunch, kill, program, running, wait_gone, write_job

pytestmark = pytest.mark.together("containers")
CPU = "gpus_per_node: 0\n"
CONNECT_S = 10
"""So long a node may take to answer once its image is there."""


@pytest.mark.parametrize("victim", ["ssh", "podman", "init", "agent", "rank", "controller"])
def test_no_container_outlives_a_kill(tmp_path: Path, podman: Podman, bed: Bed, victim: str) -> None:
    before = bed.processes()
    hosts = f"nodes: [host1, host2, host3]\nssh: {{config: {bed.directory}/ssh_config}}\n"
    with running(write_job(tmp_path, SLEEPER, CPU + hosts + podman.section())) as run:
        run.wait_ready(3)
        there = bed.processes() - before
        guardian = int(podman.tool("inspect", "--latest", "--format={{.State.Pid}}"))
        agent, rank, *_ = descendants_of(guardian)
        pids = {"init": guardian, "agent": agent, "rank": rank, "controller": run.process.pid}
        pids |= {"ssh": descendants_of(run.process.pid)[0], "podman": named(there, "podman", "run")[0]}
        kill(pids[victim])
        status = run.wait()
        wait_gone(sorted(there), 20.0)
    assert status == {"rank": 137, "controller": -signal.SIGKILL}.get(victim, 71), run.stderr
    if victim not in ("rank", "controller"):
        assert "was lost" in run.stderr
    assert podman.tool("ps", "--quiet") == ""


@pytest.mark.parametrize("where", ["here", "hosts"])
def test_a_container_gets_a_copy_of_the_code(tmp_path: Path, podman: Podman, bed: Bed, where: str) -> None:
    """It is in the node's store, which need not exist, also below a home that is not the image's."""
    store, sync = tmp_path / "home" / ".cache" / "distlaunch" / "sync", "sync: true\n"
    if where == "hosts":
        store = tmp_path / "new" / "store"
        sync = f"sync: {{to: {store}}}\nnodes: [host1, host2]\nssh: {{config: {bed.directory}/ssh_config}}\n"
    (code := tmp_path / "code").mkdir()
    tells = f"import os; open('made', 'w'); print('outside', os.path.exists({str(code)!r}))"
    job = write_job(code, tells, f"{CPU}{sync}setup: {{run: 'true'}}\n{podman.section()}")
    env = {**os.environ, "HOME": str(tmp_path / "home")}
    done = distlaunch("run", str(job), env=env, status=0)
    assert "outside False" in done.stdout
    assert len([*store.glob("runs/*/made")]) == 1, done.stderr
    # A container with another image has another environment.
    podman.tool("tag", IMAGE, "localhost/same")
    again = distlaunch("run", str(job), "--set", "container.image=localhost/same", env=env, status=0)
    assert len({each.parent.resolve() for each in store.glob("envs/*/bin")}) == 2, again.stderr
    distlaunch("check", str(job), env=env, status=0)


def test_names_what_is_missing_for_a_container(tmp_path: Path, podman: Podman) -> None:
    absent = "container: {image: x.sif, runtime: apptainer}"
    for section, kind, advice in (
        (absent, "no container runtime", "install apptainer on the node"),
        (podman.section(image="localhost/none"), "no image", "check container.image: localhost/none"),
        (podman.section() + "python: /none/python", "no python", "the image needs Python 3.8 or later"),
        (podman.section(options=["--no-such"]), "agent not started", "unknown flag: --no-such"),
        (podman.section() + "sync: {to: /proc/none}", "agent not started", "mkdir: cannot create directory"),
    ):
        done = distlaunch("run", str(write_job(tmp_path, "pass", f"{CPU}{section}\n")), status=69)
        assert f"node0: {kind}; " in done.stderr and advice in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def pulling_with(directory: Path) -> dict[str, str]:
    """An environment in which a stand-in for podman pulls from a fifo, as no registry can be had here."""
    os.mkfifo(fifo := directory / "pulled")
    pulls = f'*" image inspect "*) exit 1;; *" pull "*) exec head -n 1 {fifo};;'
    program(directory / "podman", f'case " $* " in {pulls} esac\nexec {shutil.which("podman")} "$@"')
    return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"}


@pytest.mark.long
def test_tells_of_a_pull_and_gives_it_time(tmp_path: Path, podman: Podman) -> None:
    """It takes longer than a node may take to answer."""
    job = write_job(tmp_path, "print('ran')", f"{CPU}timeouts: {{connect: {CONNECT_S}s}}\n{podman.section()}")
    with running(job, env=pulling_with(tmp_path)) as run:
        run.wait_for("node0: pulling image localhost/thin")
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(CONNECT_S + 1.0)
        (tmp_path / "pulled").write_text("done\n")
        assert run.wait() == 0, run.stderr
        assert "node0: has image localhost/thin" in run.stderr and "ran" in run.stdout


def test_an_interrupt_ends_a_pull(tmp_path: Path, podman: Podman) -> None:
    job = write_job(tmp_path, "pass", CPU + podman.section())
    with running(job, env=pulling_with(tmp_path)) as run:
        run.wait_for("node0: pulling image")
        there = descendants_of(run.process.pid)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.stderr
        wait_gone(there, 2.0)


def test_the_steps_of_an_allocation_have_containers(tmp_path: Path, podman: Podman, allocation: str) -> None:
    job = f"{CPU}python: {sys.executable}\n{podman.section()}"
    inside = "os.path.exists('/run/.containerenv')"
    tells = f"import os; print('job', os.environ['SLURM_JOB_ID'], {inside}, flush=True)"
    done = distlaunch("run", str(write_job(tmp_path, tells, job)), status=0)
    assert done.stdout.count(f"job {allocation} True") == 3, done.stdout
    assert podman.tool("ps", "--all", "--quiet") == ""
