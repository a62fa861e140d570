"""Jobs that are submitted to a real Slurm: from the queue to their ends, and again."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.cluster.slurm import OVER, Slurm
from tests.cluster.test_slurm import LIMIT, WAITS
from tests.harness import PATIENCE_S, Going, distlaunch, distlaunch_argv, kill, wait_gone, wait_until
from tests.process.commands import SLEEPER
from tests.process.test_replaced import Installed
from tests.queued import NODES, Queue, check_stop_before_start, rows

STEPS = """
    import os, signal, sys, time
    from pathlib import Path
    rank, here = os.environ["RANK"], Path(os.environ["SNAPSHOTS"])
    snapshot = here / rank
    at = int(snapshot.read_text()) if snapshot.exists() else 0
    count, job = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["DISTLAUNCH_JOB_ID"]
    print("rank", rank, "from step", at, "restart", count, "job", job, flush=True)
    while not (here / "finish").exists():
        at += 1
        snapshot.with_suffix(".new").write_text(str(at))
        snapshot.with_suffix(".new").rename(snapshot)
        time.sleep(0.02)
"""
"""Goes on from its snapshot until it may finish."""


@pytest.fixture
def queue(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    """A directory to submit from; in the end nothing that was submitted is left on any host."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (snapshots := tmp_path / "snapshots").mkdir()
    made = Queue(tmp_path, "slurm", f"env: {{SNAPSHOTS: {snapshots}}}")
    with slurm.emptied():
        yield made
        for job in made.known:
            slurm.tool("scancel", job, status=None)
            slurm.wait_state(job, *OVER)


def test_a_job_from_the_queue_to_its_end(queue: Queue) -> None:
    job = queue.submit('print("hello from", __import__("os").environ["RANK"])')
    distlaunch("attach", job, status=0)
    logs = distlaunch("logs", job)
    said = sorted(line.split("] ")[1] for line in logs.stdout.splitlines())
    assert said == ["hello from 0", "hello from 1", "hello from 2"]
    assert distlaunch("wait", job).returncode == 0
    (row,) = rows("--all")
    assert (row["state"], row["where"]) == ("SUCCEEDED", f"Slurm job {job}: host1, host2, host3")
    script = (queue.directory / "runs" / f"slurm-{job}.sh").read_text()
    exported = distlaunch("export", "slurm", str(queue.directory / "train.yaml")).stdout
    assert exported == script.replace("/runs/slurm-%j", "/slurm-%j")


def test_attach_shows_a_later_run_from_its_beginning_even_if_it_is_over(queue: Queue, slurm: Slurm) -> None:
    job = queue.submit('print("hello from", __import__("os").environ["RANK"])', "slurm: {extra: [--hold]}")
    attached = Going(queue.directory, distlaunch_argv("attach", job))
    try:
        attached.wait_for(f"Slurm job {job} is PENDING")
        attached.process.send_signal(signal.SIGSTOP)
        slurm.tool("scontrol", "release", job)
        slurm.wait_state(job, "COMPLETED")
        attached.process.send_signal(signal.SIGCONT)
        assert attached.wait() == 0, attached.stderr
        assert [f"hello from {rank}" in attached.stdout for rank in range(3)] == [True] * 3
    finally:
        attached.kill()


@pytest.mark.parametrize("named", ["", "train.yaml"])
def test_the_run_of_a_job_of_mpirun_is_not_the_one_inside_it(queue: Queue, named: str) -> None:
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("missing: mpirun.openmpi")
    keys = "launcher: mpirun\nmpirun: mpirun.openmpi\nprocs_per_node: 1"
    job = queue.submit("import os, signal\nos.write(1, b'a rank\\n')\nsignal.pause()", keys)
    queue.wait_for(job, "a rank\n", NODES)
    assert distlaunch("logs", job, status=0).stdout.count("a rank\n") == NODES
    assert [row["run"].partition("-2")[0] for row in rows(job)] == ["train"]
    stopped = distlaunch("stop", str(queue.directory / named) if named else job, status=0)
    assert f"CANCELLED, exit status 143: Slurm job {job} was cancelled" in stopped.stderr
    assert distlaunch("wait", job).returncode == 143


def test_a_job_that_waits_says_why_and_can_be_stopped(queue: Queue) -> None:
    job = queue.submit('print("never")', "slurm: {extra: [--begin=now+1hour]}")
    (row,) = rows()
    assert (row["run"], row["state"], row["where"]) == (job, "PENDING", "Slurm: PENDING (BeginTime)")
    logs = distlaunch("logs", job, status=1)
    assert f"Slurm job {job} has not started: PENDING (BeginTime)" in logs.stderr
    with subprocess.Popen(distlaunch_argv("attach", job), stderr=subprocess.PIPE, text=True) as attached:
        assert attached.stderr is not None
        assert attached.stderr.readline() == f"distlaunch: Slurm job {job} is PENDING (BeginTime)\n"
        attached.send_signal(signal.SIGINT)
        assert attached.wait(PATIENCE_S) == 130
    check_stop_before_start(f"Slurm job {job}", job)


def test_stops_a_running_job_with_all_that_is_its(
    queue: Queue, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conditions for Slurm's tools in the user's environment don't count."""
    monkeypatch.setenv("SQUEUE_PARTITION", "urgent")
    monkeypatch.setenv("SCANCEL_STATE", "PENDING")
    job = queue.submit(STEPS, "restarts: {requeue: 3}")
    queue.wait_for(job, "from step 0", times=3)
    slurm.tool("scontrol", "suspend", job)
    told = f"if Slurm suspended job {job}, it must resume the job; otherwise, `kill -CONT "
    why = distlaunch_argv("why", job)
    wait_until(lambda: told in slurm.inside("host1", *why).stdout, lambda: distlaunch("ps").stdout)
    slurm.tool("scontrol", "resume", job)
    stopped = distlaunch("stop", job, status=0)
    assert f"CANCELLED, exit status 143: Slurm job {job} was cancelled" in stopped.stderr
    assert distlaunch("wait", job).returncode == 143
    assert len(queue.starts(job)) == 1
    assert "had already ended" in distlaunch("stop", job).stderr
    assert "can't be suspended" not in queue.output(job)


def test_stops_one_task_of_an_array_and_kills_another(queue: Queue, slurm: Slurm) -> None:
    """One task has the ID of the whole array, which is therefore refused; scancel ignores the others' IDs."""
    script = distlaunch("export", "slurm", str(queue.job(SLEEPER)), "--set", "nodes=1", status=0).stdout
    (queue.directory / "array.sh").write_text(script)
    job = slurm.tool("sbatch", "--parsable", "--array=0-1", str(queue.directory / "array.sh"))
    queue.known.append(job)
    wait_until(lambda: [row["state"] for row in rows()] == ["RUNNING"] * 2, lambda: str(rows("--all")))
    refused = (
        f"{job} is a job array, with {job}_0, {job}_1 in the queue; specify a task, or cancel all of them"
    )
    assert refused in distlaunch("stop", job, status=2).stderr
    runs = [rows(f"{job}_{task}")[0]["run"] for task in (0, 1)]
    assert {*runs} == {row["run"] for row in rows()}
    for task, options in ((1, ()), (0, ("--now",))):
        stopped = distlaunch("stop", f"{job}_{task}", *options, status=0)
        assert "CANCELLED, exit status" in stopped.stderr
        assert len(rows()) == task
        assert distlaunch("why", f"{job}_{task}", status=0).stdout.startswith(f"{runs[task]}: CANCELLED")
        if task:
            refused = f"{job} is a job array, with {job}_0 in the queue; specify a task"
            assert refused in distlaunch("stop", job, status=2).stderr


TOLD = """
    import sys, time
    from pathlib import Path
    while not Path(sys.argv[1]).exists():
        time.sleep(0.02)
    raise SystemExit(int(sys.argv[2]))
"""


def test_wait_in_ones_own_script_and_outside_is_for_one_run_of_it(queue: Queue, slurm: Slurm) -> None:
    """Whatever the script does afterwards, even another run."""
    file, told = queue.job(TOLD), queue.directory / "told"
    start = [
        shlex.join(distlaunch_argv("run", str(file), f"--set=name={name}")) for name in ("first", "second")
    ]
    commands = f"""
        {start[0]} -d -- go 7
        {shlex.join(distlaunch_argv("wait"))}
        first=$?
        {shlex.join(distlaunch_argv("wait"))} $SLURM_JOB_ID
        echo $first $? >{told}
        {start[1]} -- finish 0
        exit 5
    """
    (queue.directory / "own.sh").write_text(f"#!/bin/sh\n{dedent(commands)}")
    job = slurm.tool("sbatch", "--parsable", f"-N{NODES}", str(queue.directory / "own.sh"))
    queue.known.append(job)
    wait_until(lambda: [row["state"] for row in rows()] == ["RUNNING"], lambda: str(rows("--all")))
    run = rows()[0]["run"]
    (queue.directory / "go").touch()
    assert distlaunch("wait", run).returncode == 7
    wait_until(told.exists, lambda: str(rows("--all")))
    wait_until(lambda: "second" in str(rows()), lambda: str(rows("--all")))
    assert distlaunch("wait", run).returncode == 7
    assert run not in distlaunch("logs", "second").stderr
    (queue.directory / "finish").touch()
    assert (distlaunch("wait", "second").returncode, told.read_text()) == (0, "7 7\n")
    failed = f"Slurm job {job} ended (FAILED), although its last run succeeded"
    assert failed in distlaunch("wait", job, status=1).stderr


def test_the_status_of_a_run_that_removes_its_directory_is_known(queue: Queue, slurm: Slurm) -> None:
    """As tasks of `exec` do, and torchrun."""
    queue.job(TOLD)
    task = shlex.join(distlaunch_argv("exec", "--", sys.executable, "worker.py", "go", "0"))
    told, here = queue.directory / "told", shlex.join(distlaunch_argv("wait"))
    commands = f"srun --kill-on-bad-exit=1 {task}\n{here} $SLURM_JOB_ID\necho $? >{told}\n"
    (queue.directory / "own.sh").write_text(f"#!/bin/sh\n{commands}")
    job = slurm.tool("sbatch", "--parsable", f"-N{NODES}", "-n2", str(queue.directory / "own.sh"))
    queue.known.append(job)
    wait_until(lambda: [row["state"] for row in rows()] == ["RUNNING"], lambda: str(rows("--all")))
    (row,) = rows()
    with (
        subprocess.Popen(distlaunch_argv("wait", job)) as one,
        subprocess.Popen(distlaunch_argv("wait", row["run"])) as other,
    ):
        (queue.directory / "go").touch()
        assert (one.wait(PATIENCE_S), other.wait(PATIENCE_S)) == (0, 0)
    assert not os.path.exists(row["directory"])
    distlaunch("wait", job, status=0)
    assert told.read_text() == "0\n"


STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("started", flush=True)
    time.sleep(600)
"""


def test_a_cancelled_job_whose_ranks_outlast_it_is_not_requeued(queue: Queue, slurm: Slurm) -> None:
    job = queue.submit(STUBBORN, "restarts: {requeue: 1}\ntimeouts: {stop: 10m}")
    queue.wait_for(job, "started", times=3)
    slurm.tool("scancel", job)
    told = f"CANCELLED, exit status 143: Slurm job {job} was cancelled"
    assert told in distlaunch("wait", job, status=143).stderr
    lines = (queue.directory / "runs" / f"slurm-{job}.jsonl").read_text().splitlines()
    assert ["decided"] in [list(json.loads(line)) for line in lines], lines
    assert len(queue.starts(job)) == 1


def test_stop_now_kills_the_ranks_of_a_job_but_not_its_controller(queue: Queue) -> None:
    """Slurm would kill both together, after KillWait."""
    job = queue.submit(STUBBORN, "timeouts: {stop: 10m}")
    queue.wait_for(job, "started", times=3)
    stopped = distlaunch("stop", "--now", job, status=0).stderr
    assert "CANCELLED, exit status 143: " in stopped
    assert "its controller was killed" not in stopped
    (run,) = queue.directory.glob("runs/train-*")
    assert (run / "summary.json").exists()


def test_stop_now_cancels_a_waiting_job_at_once(queue: Queue) -> None:
    """scancel tries for a minute to send such a job a signal."""
    job = queue.submit(SLEEPER, "slurm: {extra: [--begin=now+600]}")
    began = time.monotonic()
    assert f"Slurm job {job}: cancelled" in distlaunch("stop", "--now", job, status=0).stderr
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_a_warning_for_the_jobs_shell_alone_reaches_each_rank(queue: Queue, slurm: Slurm, name: str) -> None:
    job = queue.submit(WAITS, "on_warning: USR1")
    queue.wait_for(job, "ready", NODES)
    slurm.tool("scancel", "--batch", f"--signal={name}", job)
    queue.wait_for(job, "got SIGUSR1", NODES)


def test_a_signal_to_all_steps_of_a_job_stops_it(queue: Queue, slurm: Slurm) -> None:
    job = queue.submit(SLEEPER, "restarts: {requeue: 1}")
    queue.wait_for(job, "ready", times=3)
    slurm.tool("scancel", "--signal=TERM", job)
    assert "stopped by SIGTERM" in distlaunch("wait", job, status=143).stderr
    assert len(queue.starts(job)) == 1


@contextlib.contextmanager
def preemption_after(slurm: Slurm, grace_s: float) -> Iterator[None]:
    """Jobs that are preempted have so long to exit."""
    slurm.tool("scontrol", "update", "PartitionName=main", f"GraceTime={grace_s:.0f}")
    try:
        yield
    finally:
        slurm.tool("scontrol", "update", "PartitionName=main", "GraceTime=0")


SAVES = """
    import os, signal, time
    def save(*_):
        os.write(1, b"saving\\n")
        time.sleep(3)
        raise SystemExit
    signal.signal(signal.SIGTERM, save)
    os.write(1, b"ready\\n")
    while True: signal.pause()
"""


def test_a_job_that_is_stopped_in_a_grace_period_is_cancelled(queue: Queue, slurm: Slurm) -> None:
    job = queue.submit(SAVES, "restarts: {requeue: 1}\nslurm: {exclusive: true}")
    queue.wait_for(job, "ready", NODES)
    with preemption_after(slurm, PATIENCE_S):
        urgent = slurm.tool(
            "sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--wrap=true"
        )
        queue.known.append(urgent.strip())
        queue.wait_for(job, "saving", NODES)
        stopped = distlaunch("stop", job, status=0)
    assert f"CANCELLED, exit status 143: Slurm job {job} was cancelled" in stopped.stderr, queue.output(job)
    slurm.wait_state(job, "CANCELLED")


def test_stop_cancels_a_job_again_that_is_requeued_meanwhile(queue: Queue, slurm: Slurm) -> None:
    job = queue.submit(STUBBORN, "timeouts: {stop: 10m}\nrestarts: {requeue: 1}")
    queue.wait_for(job, "started", times=3)
    with subprocess.Popen(distlaunch_argv("stop", job)) as stop:
        queue.wait_for(job, "was cancelled")
        slurm.tool("scontrol", "requeue", job)  # as distlaunch may have done at this moment
        assert stop.wait(PATIENCE_S) == 0
    slurm.wait_state(job, "CANCELLED")


@pytest.mark.long
@pytest.mark.parametrize("failure", ["", "a rank has failed before"])
def test_a_job_whose_ranks_outlast_its_time_limit_until_slurm_kills_everything_is_requeued(
    failure: str, queue: Queue, slurm: Slurm
) -> None:
    """At the first start; the second ends by itself."""
    stubborn = f"""
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("from start", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        open("ready" + os.environ["RANK"], "w").close()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            fails = {bool(failure)} and os.environ["RANK"] == "0"
            while fails and not (os.path.exists("ready1") and os.path.exists("ready2")):
                time.sleep(0.02)
            sys.exit(4) if fails else time.sleep(600)
    """
    job = queue.submit(stubborn, "restarts: {requeue: 1}\ntimeouts: {stop: 10m}")
    queue.wait_for(job, "from start 0", times=3)
    if failure:
        queue.wait_for(job, "rank 0 (")
    for command in LIMIT.replace("JOB", job).split(";"):
        slurm.tool(*command.split())
    queue.wait_for(job, "reached its time limit")
    queue.wait_for(job, "from start 1", times=3)
    assert distlaunch("wait", job).returncode == 0, queue.output(job)
    first, _ = queue.starts(job)
    why = "rank 0 (" if failure else f"Slurm job {job} reached its time limit"
    told = distlaunch("wait", first, status=4 if failure else 143).stderr
    assert f"FAILED, exit status {4 if failure else 143}: {why}" in told
    # Slurm may kill the ranks' steps so much earlier that the controller still sees their end.
    finished = (queue.directory / "runs" / first / "summary.json").exists()
    assert ("its controller was killed before the run had ended" in told) == (not finished)


def test_files_are_collected_from_ranks_that_slurm_ends_at_once(queue: Queue, slurm: Slurm) -> None:
    worker = "import os, time; open('out' + os.environ['RANK'], 'w').close(); print('wrote'); time.sleep(600)"
    job = queue.submit(worker, "collect: {paths: ['out*'], from: all}")
    wait_until(lambda: distlaunch("logs", job).stdout.count("wrote") == NODES, lambda: str(rows("-a")))
    slurm.tool("scancel", job)
    assert distlaunch("wait", job).returncode == 143
    (directory,) = (Path(row["directory"]) for row in rows("-a"))
    collected = {path.parent.name for path in (directory / "collected").glob("*/out0")}
    assert len(collected) == NODES


def test_the_id_of_a_job_with_several_runs_means_the_active_one(queue: Queue, slurm: Slurm) -> None:
    file = queue.job(TOLD)
    start = [
        shlex.join(distlaunch_argv("run", str(file), f"--set=name={name}")) for name in ("first", "second")
    ]
    commands = (
        f"{start[0]} -d -- finish 0\n{start[1]} -- worker.py 0\n{shlex.join(distlaunch_argv('wait'))}\n"
    )
    (queue.directory / "own.sh").write_text(f"#!/bin/sh\n{commands}")
    job = slurm.tool("sbatch", "--parsable", f"-N{NODES}", str(queue.directory / "own.sh"))
    queue.known.append(job)
    ended = [("second", "SUCCEEDED"), ("first", "RUNNING")]
    wait_until(lambda: [(row["job"], row["state"]) for row in rows("-a")] == ended, lambda: str(rows("-a")))
    (active,) = rows()
    assert distlaunch("why", job, status=0).stdout.startswith(f"{active['run']}: RUNNING")
    assert f"{active['run']}: CANCELLED" in distlaunch("stop", job, status=0).stderr


def test_a_run_on_a_disk_of_its_host_is_not_taken_for_none(queue: Queue, slurm: Slurm) -> None:
    file = queue.job("import time; time.sleep(600)")
    (disk := queue.directory / "disk").mkdir()
    run = shlex.join(distlaunch_argv("run", str(file), f"--set=logs.dir={disk}"))
    mount = shlex.quote(f"mount -t tmpfs tmpfs {disk} && exec {run}")
    (queue.directory / "own.sh").write_text(f"#!/bin/sh\nunshare -m sh -c {mount}\n")
    job = slurm.tool("sbatch", "--parsable", f"-N{NODES}", str(queue.directory / "own.sh"))
    queue.known.append(job)
    wait_until(lambda: bool(rows()), lambda: str(rows("--all")))
    unseen = "its run directory was removed, or is on another host's disk"
    (row,) = rows()
    assert (row["run"], row["state"], row["where"]) == (job, "UNKNOWN", f"Slurm: RUNNING; {unseen}")
    assert f"Slurm job {job} is RUNNING, but {unseen}\n" in distlaunch("why", job, status=1).stderr
    assert f"Slurm job {job}: cancelled\n" in distlaunch("stop", job, status=0).stderr
    assert rows() == []


def test_the_run_of_ones_own_script_that_was_requeued_names_it(queue: Queue, slurm: Slurm) -> None:
    own = (
        f"#!/bin/sh\n{shlex.join(distlaunch_argv('run', str(queue.job('raise SystemExit(3)'))))}\nsleep 600\n"
    )
    (queue.directory / "own.sh").write_text(own)
    job = slurm.tool("sbatch", "--parsable", "--requeue", f"-N{NODES}", str(queue.directory / "own.sh"))
    queue.known.append(job)
    wait_until(lambda: "FAILED" in str(rows("--all")), lambda: str(rows("--all")))
    assert rows() == []
    slurm.tool("scontrol", "requeuehold", job)
    slurm.wait_state(job, "PENDING")
    (run,) = (row["run"] for row in rows("--all") if row["state"] == "FAILED")
    stopped = distlaunch("stop", run, status=0).stderr
    assert f"{run} had already ended: FAILED" in stopped
    assert f"Slurm job {job}, in which it ran, is still active; `distlaunch stop {job}`" in stopped
    assert f"Slurm job {job}: cancelled\n" in distlaunch("stop", job, status=0).stderr


def test_a_run_that_was_lost_before_its_job_was_stopped_is_not_cancelled(queue: Queue, slurm: Slurm) -> None:
    own = f"#!/bin/sh\n{shlex.join(distlaunch_argv('run', str(queue.job(SLEEPER))))}\nsleep 600\n"
    (queue.directory / "own.sh").write_text(own)
    job = slurm.tool("sbatch", "--parsable", f"-N{NODES}", str(queue.directory / "own.sh"))
    queue.known.append(job)
    wait_until(lambda: "RUNNING" in str(rows()), lambda: str(rows("--all")))
    kill(rows()[0]["controller"]["pid"])
    wait_until(lambda: "LOST" in str(rows("--all")), lambda: str(rows("--all")))
    assert f"Slurm job {job}: cancelled\n" in distlaunch("stop", job, status=0).stderr
    slurm.wait_state(job, "CANCELLED")
    assert [row["state"] for row in rows("--all")] == ["LOST"]


def test_a_job_that_is_requeued_after_its_end_has_not_ended(queue: Queue, slurm: Slurm) -> None:
    run = shlex.join(distlaunch_argv("run", str(queue.job("pass"))))
    (queue.directory / "own.sh").write_text(f"#!/bin/sh\n{run}\nexit 3\n")
    job = slurm.tool("sbatch", "--parsable", "--requeue", f"-N{NODES}", str(queue.directory / "own.sh"))
    queue.known.append(job)
    wait_until(lambda: "SUCCEEDED" in str(rows("--all")), lambda: str(rows("--all")))
    failed = f"Slurm job {job} ended (FAILED), although its last run succeeded"
    slurm.wait_state(job, "FAILED")
    assert failed in distlaunch("wait", job, status=1).stderr
    slurm.tool("scontrol", "requeuehold", job)
    slurm.wait_state(job, "PENDING")
    assert f"Slurm job {job}: cancelled\n" in distlaunch("stop", job, status=0).stderr
    slurm.wait_state(job, "CANCELLED")


def test_a_job_that_was_stopped_and_then_requeued_by_hand_goes_on_as_usual(
    queue: Queue, slurm: Slurm
) -> None:
    worker = "import os, time\nprint('started', flush=True)\n"
    worker += "time.sleep(600) if os.environ['SLURM_RESTART_COUNT'] == '0' else exit(3)"
    job = queue.submit(f"import os\nos.environ.setdefault('SLURM_RESTART_COUNT', '0')\n{worker}", REQUEUED)
    queue.wait_for(job, "started", times=3)
    distlaunch("stop", job, status=0)
    slurm.tool("scontrol", "requeue", job)
    queue.wait_for(job, f"requeueing Slurm job {job}, 1 of 1")
    assert distlaunch("wait", job).returncode == 3, queue.output(job)
    assert len(queue.starts(job)) == 3


def from_own_script(queue: Queue, slurm: Slurm, trap: str) -> str:
    """Start a run from a user's own batch script, which sets a trap and waits; return the job's ID."""
    run = shlex.join(distlaunch_argv("run", str(queue.job(SLEEPER, REQUEUED))))
    (queue.directory / "own.sh").write_text(f"#!/bin/sh\ntrap {trap}\n{run} &\nwait\n")
    output = f"--output={queue.directory}/runs/slurm-%j.out"
    options = ("--requeue", "--open-mode=append", f"-N{NODES}", output)
    (queue.directory / "runs").mkdir()
    job = slurm.tool("sbatch", "--parsable", *options, str(queue.directory / "own.sh"))
    queue.known.append(job)
    queue.wait_for(job, "ready", times=3)
    return job


def test_a_job_whose_own_script_exits_at_a_warning_is_requeued(queue: Queue, slurm: Slurm) -> None:
    """`wait` returns when the shell has caught a signal."""
    job = from_own_script(queue, slurm, ": USR1")
    slurm.tool("scancel", "--batch", "--signal=USR1", job)
    queue.wait_for(job, f"Slurm job {job} ended because its batch script exited")
    queue.wait_for(job, "ready", times=6)
    assert f"requeueing Slurm job {job}, 1 of 1" in queue.output(job)


def test_a_stopped_job_is_cancelled_although_its_own_script_exits_at_sigterm(
    queue: Queue, slurm: Slurm
) -> None:
    job = from_own_script(queue, slurm, "'exit 7' TERM")
    distlaunch("stop", "--now", job, status=0)
    assert "because its batch script exited" not in queue.output(job)
    assert "requeueing" not in queue.output(job)


REQUEUED = "restarts: {requeue: 1}"
FLAKY = """
    import os
    count, most = (int(os.environ[f"TORCHELASTIC_{name}"]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    print("restart", count, "of", most, "job", os.environ["DISTLAUNCH_JOB_ID"])
    raise SystemExit({failure} if count < {good} else 0)
"""


def test_a_failure_beyond_its_restarts_has_the_job_requeued(queue: Queue) -> None:
    """By its name it is followed through the time between its two runs."""
    flaky = FLAKY.replace("{failure}", "3").replace("{good}", "3")
    job = queue.submit(flaky, "restarts: {max: 1, backoff: 0s, requeue: 2}\nslurm: {setup: sleep 1}")
    queue.wait_for(job, "restart 0")
    done = distlaunch("wait", "train")
    assert done.returncode == 0, done.stderr + queue.output(job)
    assert f"Slurm job {job} is PENDING" in done.stderr
    first, second = queue.starts(job)
    counts = re.findall(r"restart (\d of \d) job (\S+)", queue.output(job))
    assert set(counts) == {(count, first) for count in ("0 of 1", "1 of 1", "2 of 3", "3 of 3")}
    logs = distlaunch("logs", job)  # of both starts; the first to fail may stop the others
    assert {*re.findall(r"restart (\d) of", logs.stdout)} == {*"0123"}
    assert f"next run of the job: {second}" in logs.stderr
    assert f"distlaunch: requeueing Slurm job {job}, 1 of 2\n" in queue.output(job)
    states = {row["run"]: (row["state"], row["restarts"]) for row in rows("--all")}
    assert states == {first: ("FAILED", 1), second: ("SUCCEEDED", 3)}


@pytest.mark.long
def test_a_job_is_requeued_although_slurm_did_not_answer_at_its_end(queue: Queue, slurm: Slurm) -> None:
    flaky = FLAKY.replace("{failure}", "3").replace("{good}", "1")
    worker = f"import time\nfrom pathlib import Path\nprint('started', flush=True)\n{dedent(flaky)}"
    wait = "while not Path('down').exists():\n    time.sleep(0.02)\nraise SystemExit"
    job = queue.submit(worker.replace("raise SystemExit", wait), "restarts: {requeue: 1}")
    queue.wait_for(job, "started", times=3)
    slurmctld = slurm.daemon("slurmctld", "host1")
    kill(slurmctld, signal.SIGSTOP)
    try:
        (queue.directory / "down").touch()
        queue.wait_for(job, f"can't requeue Slurm job {job} yet: scontrol ")
    finally:
        kill(slurmctld, signal.SIGCONT)
    assert distlaunch("wait", job).returncode == 0, queue.output(job)
    assert f"requeueing Slurm job {job}, 1 of 1\n" in queue.output(job)
    assert len(queue.starts(job)) == 2


@pytest.mark.long
def test_a_stopped_run_of_ones_own_script_is_not_requeued_although_slurm_did_not_answer(
    queue: Queue, slurm: Slurm
) -> None:
    """The run has ended by then, and only asks Slurm for another start."""
    job = from_own_script(queue, slurm, ": USR1")
    slurmctld = slurm.daemon("slurmctld", "host1")
    kill(slurmctld, signal.SIGSTOP)
    try:
        kill(int(re.findall(r"ready 1 (\d+)", queue.output(job))[-1]))
        queue.wait_for(job, f"can't requeue Slurm job {job} yet: scontrol ")
        (run,) = queue.starts(job)
        told = f"Slurm job {job}, in which it ran, won't be requeued\n"
        wait_until(lambda: told in distlaunch("stop", run, status=0).stderr, lambda: queue.output(job))
    finally:
        kill(slurmctld, signal.SIGCONT)
    queue.wait_for(job, f"not requeueing Slurm job {job}: it was cancelled")
    slurm.wait_state(job, "COMPLETED")
    assert queue.starts(job) == [run]


def test_the_same_exception_in_two_starts_ends_the_job(queue: Queue) -> None:
    job = queue.submit("raise ValueError('always')", "restarts: {requeue: 4}")
    done = distlaunch("wait", job)
    assert (done.returncode, len(queue.starts(job))) == (1, 2), done.stderr + queue.output(job)
    told = r"not requeueing Slurm job \d+: rank \d raised the same ValueError at worker.py:\d+"
    assert re.search(told, queue.output(job))


def test_a_start_that_fails_before_its_run_is_not_hidden_by_the_last_run(queue: Queue) -> None:
    setup = 'slurm: {setup: "[ -z $SLURM_RESTART_COUNT ] || exit 9"}'
    job = queue.submit("raise SystemExit(3)", f"restarts: {{requeue: 1}}\n{setup}")
    done = distlaunch("wait", job)
    assert done.returncode == 3
    later = f"Slurm job {job} ended (FAILED) without starting another run; see "
    assert later in done.stderr and later in distlaunch("why", job, status=0).stderr


@pytest.mark.parametrize("named", ["job", "name", "run", "nothing"])
def test_stops_a_job_between_two_starts(queue: Queue, named: str) -> None:
    """It may wait in the queue, or run its setup: the run before it was not ended by this."""
    setup = 'slurm: {setup: "[ ${SLURM_RESTART_COUNT:-0} = 0 ] || sleep 600"}'
    job = queue.submit("raise SystemExit(3)", f"restarts: {{requeue: 1}}\n{setup}")
    queue.wait_for(job, "requeueing Slurm job")
    words = {"job": [job], "name": ["train"], "run": queue.starts(job)[:1], "nothing": []}[named]
    stopped = distlaunch("stop", *words, status=0)
    assert f"Slurm job {job}: cancelled\n" in stopped.stderr
    ended = distlaunch("wait", job, status=3).stderr
    assert f"Slurm job {job} was cancelled before its next start" in ended


def test_a_job_restarts_and_is_requeued_though_distlaunch_was_replaced(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = Installed(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(installed.place))
    path = queue.job(SLEEPER, "restarts: {max: 1, backoff: 0s, requeue: 1}")
    job = distlaunch("submit", str(path), cwd=tmp_path).stdout.strip()  # the job starts it there, too
    queue.known.append(job)
    for attempt in (1, 2):
        queue.wait_for(job, "ready", times=3 * attempt)
        installed.replace()
        kill(int(re.findall(r"ready 1 (\d+)", queue.output(job))[-1]))
    queue.wait_for(job, f"requeueing Slurm job {job}, 1 of 1")
    queue.wait_for(job, "another distlaunch")


@pytest.mark.parametrize(("failure", "starts"), [("2", 1), ("3", 2)])
def test_requeues_no_mistake_and_a_failure_so_often(
    queue: Queue, slurm: Slurm, failure: str, starts: int
) -> None:
    flaky = FLAKY.replace("{failure}", failure).replace("{good}", "9")
    job = queue.submit(flaky, "restarts: {requeue: 1}")
    assert distlaunch("wait", job).returncode == int(failure)
    assert len(queue.starts(job)) == starts, queue.output(job)
    told = f"not requeueing Slurm job {job}: already requeued once (restarts.requeue)"
    assert (told in queue.output(job)) == (starts == 2)
    slurm.wait_state(job, "FAILED")
    assert f"ExitCode={failure}:0" in slurm.tool("scontrol", "show", "job", job)


@pytest.mark.long
def test_slurms_warning_reaches_each_rank_once_and_with_the_deadline(queue: Queue) -> None:
    """slurmctld looks every 30 s, and also sends it up to 30 s early.

    It is lost if the job's script is still being started, so it is sent after 10 s at the earliest.
    """
    names = ("USR1", "TERM")
    for name in names:
        file = queue.job(WAITS, f"on_warning: {name}\nslurm: {{time: 2m, signal: USR1@80}}")
        sent = distlaunch("submit", str(file.rename(file.with_name(f"{name}.yaml"))), status=0)
        queue.known.append(sent.stdout.strip())
    for name, job in zip(names, queue.known, strict=True):
        queue.wait_for(job, f"got SIG{name}", times=3)
        told = queue.output(job)
        assert len(re.findall(rf"got SIG{name}, deadline \d{{10}}\n", told)) == told.count("got ") == 3, told


@pytest.mark.parametrize(
    "by", ["the script's shell", "preemption", "preemption after a grace period", "the loss of a node"]
)
def test_a_requeued_job_goes_on_from_its_snapshot(queue: Queue, slurm: Slurm, by: str) -> None:
    idle = slurm.processes()
    job = queue.submit(STEPS, "restarts: {requeue: 2}\nslurm: {exclusive: true}")
    queue.wait_for(job, "from step 0", times=3)
    if by == "the script's shell":
        kill(rows()[0]["controller"]["pid"])
    elif by.startswith("preemption"):  # a job of a higher priority wants the nodes
        grace_s = PATIENCE_S if "grace" in by else 0
        with preemption_after(slurm, grace_s):
            slurm.tool("srun", "--partition=urgent", "--nodes=3", "--exclusive", "true")
        if grace_s:  # the agents get SIGTERM at its beginning, and the ranks have time to exit
            told = "was preempted", "ended after", f"requeueing Slurm job {job}; preemption doesn't count"
            queue.wait_for(job, told[-1])
            assert re.search(".*".join(told), queue.output(job), re.DOTALL), queue.output(job)
    else:
        node = ("scontrol", "update", "nodename=host3")
        steps = sorted(slurm.processes() - idle)
        try:
            slurm.tool(*node, "state=DOWN", "reason=test")
            queue.wait_for(job, f"host3 was lost; Slurm job {job} was requeued")
            slurm.wait_state(job, "PENDING")
            slurm.tool("scontrol", "hold", job)
            # Otherwise, Slurm ends them later, and with them those of the next start.
            wait_gone(steps, PATIENCE_S)
        finally:
            slurm.tool(*node, "state=RESUME", status=None)
        slurm.restart("slurmd", "host3")  # or else it remembers the earlier start
        slurm.tool("scontrol", "release", job)
    queue.wait_for(job, "restart 1", times=3)
    (queue.directory / "snapshots" / "finish").touch()
    done = distlaunch("wait", job)
    assert done.returncode == 0, done.stderr + queue.output(job)
    begun = re.findall(r"rank (\d) from step (\d+) restart (\d) job (\S+)", queue.output(job))
    first, _ = queue.starts(job)
    assert sorted((rank, count, name) for rank, _, count, name in begun) == [
        (rank, count, first) for rank in "012" for count in "01"
    ]
    assert all(int(step) > 0 for _, step, count, _ in begun if count == "1")
    assert "Restarts=1" in slurm.tool("scontrol", "show", "job", job)
    starts = (queue.directory / f"runs/slurm-{job}.jsonl").read_text()
    assert starts.count('{"requeue"') == (by == "the script's shell")
