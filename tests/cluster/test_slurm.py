"""Inside an allocation of a real Slurm: where ranks run, what they see, and what Slurm does to them."""

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm, inside
from tests.harness import (
    ROOT,
    Done,
    Run,
    distlaunch,
    distlaunch_argv,
    ended_well,
    running,
    wait_gone,
    write_job,
)

CPU = "gpus_per_node: 0\n"
WAITS = """
    import os, signal
    def told(signum, frame):
        path = os.environ["DISTLAUNCH_DEADLINE"]
        deadline = open(path).read().strip() if os.path.exists(path) else "none"
        os.write(1, b"got %s, deadline %s\\n" % (signal.Signals(signum).name.encode(), deadline.encode()))
        if signum == signal.SIGTERM: raise SystemExit(0)
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, told)
    os.write(1, b"ready %s %d\\n" % (os.environ["RANK"].encode(), os.getpid()))
    while True: signal.pause()
"""


@pytest.fixture
def emptied(slurm: Slurm) -> Iterator[None]:
    """In the end there are no more processes on the hosts than before."""
    with slurm.emptied():
        yield


HERE = os.uname().nodename
SAYS = 'import os; os.write(1, b"rank %s on %s\\n" % (os.environb[b"RANK"], os.uname().nodename.encode()))'


@pytest.mark.parametrize(
    ("keys", "hosts"),
    [
        ("", ["host1", "host2", "host3"]),
        ("nodes: 2\n", ["host1", "host2"]),
        ("procs_per_node: 2\n", ["host1", "host1", "host2", "host2", "host3", "host3"]),
        ("nodes: [host3, host1]\nlauncher: slurm\n", ["host3", "host1"]),
        ("launcher: local\n", [HERE]),  # although there is an allocation
    ],
)
def test_hosts_come_from_the_allocation(tmp_path: Path, allocation: str, keys: str, hosts: list[str]) -> None:
    done = distlaunch("run", str(write_job(tmp_path, SAYS, CPU + keys)))
    said = dict(re.findall(r"^\[\S+\] rank (\d+) on (\S+)$", done.stdout, re.MULTILINE))
    assert [said[str(rank)] for rank in range(len(said))] == hosts, done.stderr
    if "launcher" not in keys:
        nodes = list(dict.fromkeys(hosts))
        told = f"{len(nodes)} nodes from Slurm job {allocation}: {', '.join(nodes)} (launcher: auto; "
        assert told in done.stderr
    shown = json.loads(distlaunch("dry-run", str(tmp_path / "job.yaml"), "--json").stdout)
    assert {node["transport"] for node in shown["nodes"]} == {"local" if hosts == [HERE] else "slurm"}
    names = [node["name"] for node in shown["nodes"] for _ in node["workers"]]
    assert names == (["node0"] if hosts == [HERE] else hosts)


@pytest.mark.usefixtures("allocation")
@pytest.mark.parametrize("mpirun", ["mpirun.openmpi", "mpirun.mpich"])
def test_mpirun_starts_ranks_on_all_hosts_of_the_allocation(mpirun: str, tmp_path: Path) -> None:
    if shutil.which(mpirun) is None:
        pytest.skip(f"missing: {mpirun}")
    keys = f"{CPU}launcher: mpirun\nmpirun: {mpirun}\nprocs_per_node: 1\n"
    done = distlaunch("run", str(write_job(tmp_path, SAYS, keys)))
    said = sorted(re.findall(r"rank (\d+) on (\S+)$", done.stdout, re.MULTILINE))
    assert said == [("0", "host1"), ("1", "host2"), ("2", "host3")], done.stderr
    assert "3 nodes from Slurm job" in done.stderr


def test_ranks_see_the_job_of_slurm(tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's identity and the GPUs, and nothing that an agent's step has for itself."""
    seen = '{k: v for k, v in os.environ.items() if k[:4] in ("SLUR", "CUDA", "BASH")}'
    tells = f"import os, json; print(json.dumps({seen}))"
    with inside(slurm, monkeypatch, "--gpus-per-node=2") as job:
        # Options that a script may have set for its own steps, which would ruin ours.
        given = "SLURM_NTASKS=64 SLURM_CPU_BIND=rank SLURM_EXPORT_ENV=NONE SLURM_LABELIO=1 SLURM_PROCID=7"
        given += " SLURM_JOB_NAME=train SRUN_CPUS_PER_TASK=99 SLURM_GPUS_PER_NODE=x:1,y:1"
        for setting in given.split():
            monkeypatch.setenv(*setting.split("="))
        monkeypatch.setenv("BASH_FUNC_f%%", "() { true; }")  # which dash doesn't pass on
        done = distlaunch("run", str(write_job(tmp_path, tells)))
    rows = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()]
    assert len(rows) == 6, done.stderr
    assert {(row["SLURM_JOB_ID"], row["SLURM_JOB_NAME"]) for row in rows} == {(job, "train")}
    assert {row["CUDA_VISIBLE_DEVICES"] for row in rows} == {"0,1"}
    assert {row.get("BASH_FUNC_f%%") for row in rows} == {"() { true; }"}
    gone = {f"SLURM_{name}" for name in ("PROCID", "NTASKS", "LOCALID", "STEP_ID", "NODEID", "NNODES")}
    assert not gone & {name for row in rows for name in row}


def test_files_come_back_over_a_link_of_lines(tmp_path: Path, allocation: str) -> None:
    text = "import os; open(os.uname().nodename, 'wb').write(bytes(range(256)) * 4000)"
    job = write_job(tmp_path, text, f"{CPU}collect: {{paths: [host2], from: [host2, host3]}}\n")
    done = distlaunch("run", str(job), status=0)
    found = {path.parent.name: path.read_bytes() for path in tmp_path.glob("runs/*/collected/*/host2")}
    assert found == dict.fromkeys(("host2", "host3"), bytes(range(256)) * 4000), done.stderr


# What Slurm does to a run


def ended(run: Run, status: int, words: str) -> None:
    assert run.wait() == status, run.stderr
    assert words in run.stderr, run.stderr
    assert "Traceback" not in run.stderr
    assert run.holders() == []


LIMIT = "scontrol update jobid=JOB TimeLimit=1; scontrol update jobid=JOB EndTime=now+3"
"""slurmctld looks at it every 30 s."""


@pytest.mark.parametrize(
    ("commands", "told"),
    [
        ("scancel JOB", "was cancelled"),
        # As --signal=USR1@… does, which Slurm rounds to a minute: a signal to all steps.
        ("scancel --signal=USR1 JOB", "received a warning signal: sent SIGTERM to all ranks"),
        pytest.param(LIMIT, "reached its time limit", marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("emptied")
def test_a_job_that_slurm_ends_is_not_restarted_and_says_why(
    tmp_path: Path, slurm: Slurm, allocation: str, commands: str, told: str
) -> None:
    with running(write_job(tmp_path, WAITS, f"{CPU}restarts: 3\n")) as run:
        pids = run.wait_ready(3)
        for command in commands.replace("JOB", allocation).split(";"):
            slurm.tool(*command.split())
        if commands == "scancel JOB":
            wait_gone(list(pids.values()), 2.0)
        ended(run, 128 + signal.SIGTERM, f"Slurm job {allocation} {told}")
        wait_gone(list(pids.values()), 2.0)
        assert run.stderr.count(told) <= 2  # told as it happens, and in the summary
        assert "did not confirm" not in run.stderr


@pytest.mark.alone  # any other run that starts then kills what Slurm has not killed yet, and tells it
@pytest.mark.usefixtures("emptied")
def test_scancel_of_a_step_is_the_loss_of_its_node(tmp_path: Path, slurm: Slurm, allocation: str) -> None:
    with running(write_job(tmp_path, WAITS, f"{CPU}restarts: 1\n")) as run:
        run.wait_ready(3)
        steps = slurm.tool("squeue", "--steps", "--noheader", "--format=%i %j %N", f"--jobs={allocation}")
        assert steps.count(" distlaunch ") == 3
        step = next(line.split()[0] for line in steps.splitlines() if line.endswith("host2"))
        slurm.tool("scancel", step)
        run.wait_for("restart 1 of 1")
        run.wait_for("ready", times=6)
        run.process.send_signal(signal.SIGINT)
        ended(run, 130, "host2 was lost: ")


@pytest.mark.parametrize("handles", [True, False])
@pytest.mark.usefixtures("emptied")
def test_a_termination_warning_tells_ranks_the_deadline_and_kills_none(
    tmp_path: Path, slurm: Slurm, allocation: str, handles: bool
) -> None:
    """Slurm's signal reaches all processes."""
    slurm.tool("scontrol", "update", f"jobid={allocation}", "TimeLimit=10")
    worker = WAITS if handles else WAITS.replace("signal.SIGUSR1)", ")")
    with running(write_job(tmp_path, worker, f"{CPU}on_warning: USR1\n")) as run:
        run.wait_ready(3)
        slurm.tool("scancel", "--signal=USR1", allocation)
        run.wait_for("sent SIGUSR1 to all ranks (on_warning)")
        assert f"Slurm job {allocation} ends in 10 min" in run.stderr, run.stderr
        told = re.compile(rb"got SIGUSR1, deadline \d{10}")
        run.wait_until(lambda: len(told.findall(run.out)) >= 3 * handles, "three deadlines")
        run.process.send_signal(signal.SIGINT)
        ended(run, 130, "stopped by SIGINT")
        assert "also failed" not in run.stderr


@pytest.mark.parametrize("daemon", ["slurmctld", "slurmd"])
@pytest.mark.usefixtures("allocation")
def test_the_death_of_a_daemon_hurts_no_run(tmp_path: Path, slurm: Slurm, daemon: str) -> None:
    with running(write_job(tmp_path, WAITS, CPU)) as run:
        run.wait_ready(3)
        slurm.restart(daemon, "host1" if daemon == "slurmctld" else "host2")
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGINT)
        ended(run, 130, "stopped by SIGINT")


def test_refuses_slurm_outside_of_an_allocation(tmp_path: Path) -> None:
    job = write_job(tmp_path, SAYS, f"{CPU}launcher: slurm\nnodes: 2\n")
    done = distlaunch("run", str(job), status=2)
    assert "launcher: slurm needs an allocation" in done.stderr
    assert "known only inside an allocation" in distlaunch("dry-run", str(job)).stderr


# Task by task


def tasks(slurm: Slurm, srun: str, *words: str) -> Done:
    """`distlaunch exec` in each task of a step."""
    return slurm.run("srun", *srun.split(), *distlaunch_argv("exec", *words))


def test_tasks_of_a_step_become_ranks_that_agree(slurm: Slurm) -> None:
    names = "$RANK $LOCAL_RANK $NODE_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT"
    adds = f"exec {sys.executable} {ROOT}/scripts/basics/all_reduce.py"
    done = tasks(slurm, "-N3 -n4", "--", "sh", "-c", f"echo at {names}; {adds}")
    ended_well(done.returncode, done.stdout, done.stderr, last="all_reduce: ok, 4 ranks")
    rows = sorted(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("at "))
    places = ["0 0 0 2 host1", "1 1 0 2 host1", "2 0 1 1 host1", "3 0 2 1 host1"]
    assert [" ".join(row[:5]) for row in rows] == places
    assert len({row[5] for row in rows}) == 1


FAILS = ("--", "sh", "-c", "[ $RANK = 2 ] && exit 6; exec sleep 600")


@pytest.mark.parametrize(
    ("srun", "words", "status", "told"),
    [
        ("-n2 --gpus-per-task=1", ("--", "true"), 2, "instead of --gpus-per-task"),
        ("-n2 --gpus-per-task=1", ("--virtual-local-rank", "--", "true"), 0, ""),
        ("-n1", ("--", "nosuchprogram"), 127, "nosuchprogram: not found in PATH on its node"),
        ("-n1", ("--", "/etc/passwd"), 126, "/etc/passwd: Permission denied"),
        ("-n1", ("true",), 2, "unexpected true; usage: distlaunch exec"),
        ("-n3", FAILS, 6, "rank 2 (host1) failed first"),
    ],
)
def test_how_tasks_end(slurm: Slurm, srun: str, words: tuple[str, ...], status: int, told: str) -> None:
    done = tasks(slurm, srun, *words)
    assert (done.returncode, told in done.stderr) == (status, True), done.stderr
    assert "Traceback" not in done.stderr
