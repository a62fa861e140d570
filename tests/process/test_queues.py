"""Jobs submitted to stand-ins for queues, from the queue to their ends, and batch scripts run by a shell."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distlaunch.cli.job_file import job_of
from distlaunch.job.spec import Allocation
from distlaunch.launch.controller import ask_for_another
from distlaunch.observers.run_list import note_stop
from distlaunch.runs.submissions import Submission, note, note_end
from distlaunch.schedulers import load
from distlaunch.schedulers.base import Call
from distlaunch.supervisor.state import Cause, Verdict
from tests.harness import (
    PATIENCE_S,
    Done,
    completed,
    cookie_holders,
    distlaunch,
    distlaunch_argv,
    kill,
    on_a_terminal,
    program,
    write_job,
)
from tests.process import stand_in_queue
from tests.process.commands import SLEEPER, STUBBORN, TWO
from tests.queued import Printed, check_stop_before_start, rows
from tests.unit.test_restarts import Job

HERE = os.uname().nodename
KINDS = {
    "grid-engine": ("Grid Engine", "grid_engine: {pe: mpi}", ("qsub", "qstat", "qdel")),
    "pbs": ("PBS", "pbs: {time: 1h}", ("qsub", "qstat", "qdel", "qsig")),
    "lsf": ("LSF", "lsf: {time: 1h}", ("bsub", "bjobs", "bkill")),
    "flux": ("Flux", "flux: {time: 1h}", ("flux",)),
}
WAITS = {
    "grid-engine": "qw",
    "pbs": "Q (Not Running: Insufficient amount of resource: ngpus)",
    "lsf": "PEND (New job is waiting for scheduling)",
    "flux": "SCHED",
}
HELLO = 'print("hello from", __import__("os").environ["RANK"])'


class Queue(Printed):
    """Submits jobs to a stand-in, and looks at them as a user does."""

    def __init__(self, kind: str, directory: Path) -> None:
        super().__init__(directory, kind)
        self.kind = kind
        self.title, self.section, self.tools = KINDS[kind]
        self.place = directory / "queue"
        self.id = "88.pbs.example" if kind == "pbs" else "88"

    def job(self, worker: str, keys: str = "") -> Path:
        """A job file for this scheduler, which its section says."""
        section = "" if self.section.partition(":")[0] in keys else self.section
        return write_job(self.directory, worker, f"{TWO}{section}\n{keys}\n").rename(
            self.directory / "train.yaml"
        )

    def submit(self, worker: str, keys: str = "") -> str:
        """Submit it; the job's id, which is all that is printed."""
        done = distlaunch("submit", str(self.job(worker, keys)))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"{self.id}\n"
        return self.id

    def hold(self) -> None:
        """Have jobs wait."""
        (self.place / "hold").touch()

    def tool(self, *words: str) -> None:
        """Call the stand-in."""
        subprocess.run(words, check=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL)

    def file(self, suffix: str) -> Path:
        """One of those that are named after the job."""
        return self.directory / "runs" / f"{self.kind}-{self.id}.{suffix}"

    @property
    def asked(self) -> list[str]:
        """What qstat was asked so far."""
        path = self.place / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture(params=KINDS)
def queue(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    """A directory to submit from, and a queue whose commands come first; in the end nothing of it runs."""
    tools, made = tmp_path / "bin", Queue(request.param, tmp_path)
    tools.mkdir()
    made.place.mkdir()
    for name in (*made.tools, "release", "end"):
        text = Path(stand_in_queue.__file__).read_text()
        program(tools / name, f"#!{sys.executable} -I\n{text}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("KIND", made.kind)
    monkeypatch.setenv("QUEUE", str(made.place))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    yield made
    made.tool("end")


def test_a_job_from_the_queue_to_its_end(queue: Queue) -> None:
    queue.hold()
    job = queue.submit(HELLO)
    waits = WAITS[queue.kind]
    (row,) = rows()
    assert (row["run"], row["state"], row["where"]) == (job, "PENDING", f"{queue.title}: {waits}")
    logs = distlaunch("logs", job)
    assert (logs.returncode, logs.stdout) == (1, "")
    assert f"{queue.title} job {job} has not started: {waits}\n" in logs.stderr
    with subprocess.Popen(distlaunch_argv("attach", job), stderr=subprocess.PIPE, text=True) as attached:
        assert attached.stderr is not None
        assert attached.stderr.readline() == f"distlaunch: {queue.title} job {job} is {waits}\n"
        queue.tool("release")
        assert attached.wait(PATIENCE_S) == 0, attached.stderr.read()
    assert distlaunch("wait", "88").returncode == 0
    logs = distlaunch("logs", "-f", job)
    assert {line.split("] ")[1] for line in logs.stdout.splitlines()} == {"hello from 0", "hello from 1"}
    (row,) = rows("--all")
    assert (row["state"], row["where"]) == ("SUCCEEDED", f"{queue.title} job {job}: {HERE}")
    assert f"1 node from {queue.title} job {job}: {HERE}" in queue.file("out").read_text()
    (begun,) = map(json.loads, queue.file("jsonl").read_text().splitlines())
    assert begun["run"] == row["run"]
    script = queue.file("sh").read_text()
    assert distlaunch("submit", "--dry-run", str(queue.directory / "train.yaml")).stdout == script


@pytest.mark.parametrize("queue", ["pbs"], indirect=True)
def test_submit_waits_for_the_end(queue: Queue) -> None:
    done = distlaunch("submit", str(queue.job("raise SystemExit(5)")), "--wait")
    assert (done.returncode, done.stdout) == (5, f"{queue.id}\n"), done.stderr
    assert "FAILED, exit status 5" in done.stderr


@pytest.mark.parametrize("queue", ["pbs"], indirect=True)
def test_names_the_next_command_on_a_terminal(queue: Queue) -> None:
    queue.hold()
    status, shown = on_a_terminal("submit", str(queue.job(HELLO)))
    assert status == 0
    told = f"submitted to {queue.title}; follow it with `distlaunch attach {queue.id}`"
    assert told in shown.decode()


def test_a_job_is_stopped_while_it_waits(queue: Queue) -> None:
    queue.hold()
    job = queue.submit(HELLO)
    check_stop_before_start(f"{queue.title} job {job}", job, "88")


def test_a_job_is_stopped_by_its_name_while_it_runs(queue: Queue) -> None:
    job = queue.submit(SLEEPER)
    queue.wait_for(queue.id, "ready", 2)
    (row,) = rows()
    assert (row["state"], row["ranks"]) == ("RUNNING", 2)
    stopped = distlaunch("stop", "train", status=0)
    assert f"{row['run']}: {ENDS[queue.kind]}" in stopped.stderr
    assert distlaunch("wait", job).returncode == (130 if queue.kind == "lsf" else 143)
    assert rows() == []
    assert "had already ended" in distlaunch("stop", job).stderr


ENDS = {
    "grid-engine": "CANCELLED, exit status 143: Grid Engine job 88 was cancelled",
    "pbs": "CANCELLED, exit status 143: PBS job 88.pbs.example was cancelled",
    "lsf": "CANCELLED, exit status 130: stopped by SIGINT",
    "flux": "CANCELLED, exit status 143: Flux job 88 was cancelled",
}


@pytest.mark.parametrize("queue", ["pbs", "lsf", "flux"], indirect=True)
def test_stop_now_kills_stubborn_ranks_at_once(queue: Queue) -> None:
    queue.submit(STUBBORN, "timeouts: {stop: 10m}")
    queue.wait_for(queue.id, "ready", 2)
    stopped = distlaunch("stop", "88", "--now", status=0)
    assert "CANCELLED" in stopped.stderr


def test_a_job_killed_before_it_could_report_that_it_was_stopped_is_cancelled(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILL_DELAY_S", "1")
    job = queue.submit(STUBBORN, "timeouts: {stop: 10m}")
    queue.wait_for(job, "ready", 2)
    with subprocess.Popen(distlaunch_argv("wait", job), stderr=subprocess.PIPE, text=True) as waiting:
        queue.tool(*KILLS[queue.kind], job)
        assert waiting.wait(PATIENCE_S) == 143
        assert waiting.stderr is not None
        assert f": CANCELLED, exit status 143: {queue.title} job {job} " in waiting.stderr.read()
    (row,) = rows("--all")
    assert row["state"] == "CANCELLED"
    for pid in cookie_holders(row["run"]):  # a real scheduler kills other sessions, too
        kill(pid)


STOP = distlaunch_argv("stop")
KILLS = {"grid-engine": STOP, "pbs": STOP, "lsf": ["bkill"], "flux": ["flux", "cancel"]}


@pytest.mark.parametrize("queue", ["grid-engine"], indirect=True)
def test_stops_the_run_itself_where_its_script_asks_for_no_warning(queue: Queue) -> None:
    """qdel would be a SIGKILL."""
    job = queue.job(SLEEPER)
    script = queue.directory / "own.sh"
    script.write_text(f"#$ -o {queue.file('out')}\n{' '.join(distlaunch_argv('run', str(job)))}\n")
    queue.file("out").parent.mkdir()
    queue.tool("qsub", "-terse", str(script))
    queue.wait_for(queue.id, "ready", 2)
    stopped = distlaunch("stop", "train", status=0)
    assert "CANCELLED, exit status 130" in stopped.stderr


def test_reports_a_script_that_never_starts_distlaunch(queue: Queue) -> None:
    section = queue.section.rstrip("}") + ", setup: exit 4}"
    (queue.directory / "earlier.yaml").write_text("command: ['true']\ngpus_per_node: 0\nlauncher: local\n")
    distlaunch("run", "--quiet", str(queue.directory / "earlier.yaml"), status=0)
    job = queue.submit(HELLO, section)
    ended, why = NO_RUN.get(queue.kind, ("left the queue", "left the queue"))
    told = f"{queue.title} job {job} {ended} without starting a run; see {queue.file('out')}"
    for command in ("wait", "logs", "attach"):
        done = distlaunch(command, job)
        assert (done.returncode, told in done.stderr) == (1, True), done.stderr
    (row,) = rows("--number", "1")
    assert (row["run"], row["state"]) == (job, "FAILED")
    assert row["why"] == f"{queue.title}: {why}; see {queue.file('out')}"


NO_RUN = {"lsf": ("ended (EXIT)", "EXIT"), "flux": ("ended (FAILED)", "FAILED")}
"""How a job ended, where its scheduler still tells."""


def test_reports_a_refusal_in_the_schedulers_words_and_leaves_nothing(queue: Queue) -> None:
    nowhere = f"{queue.section.partition(':')[0]}.queue=none"
    done = distlaunch("submit", str(queue.job(HELLO)), "--set", nowhere)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"distlaunch: {queue.tools[0]} failed: {REFUSED[queue.kind]}\n"
    assert list((queue.directory / "runs").iterdir()) == []


REFUSED = {
    "grid-engine": "Unable to run job: job rejected: the requested parallel environment "
    '"none" does not exist.',
    "pbs": "Unknown queue",
    "lsf": "none: No such queue. Job not submitted.",
    "flux": "flux-batch: ERROR: [Errno 22] Invalid queue 'none' specified",
}


def test_ps_asks_once_for_all_jobs(queue: Queue) -> None:
    queue.hold()
    queue.submit(HELLO)
    ids = [f"{number}{queue.id[2:]}" for number in range(200, 300)]
    for job in ids:
        note(Submission(job, "long", str(queue.directory / "runs"), time.time(), scheduler=queue.kind))
    assert [row["run"] for row in rows()] == [queue.id]  # of the others it knows nothing
    assert len(queue.asked) == 1
    assert len(rows("--all")) == 101
    assert distlaunch("ps").returncode == 0
    assert len(queue.asked) == 3


def test_a_queue_that_does_not_answer_loses_no_job(queue: Queue) -> None:
    queue.hold()
    job = queue.submit(HELLO)
    tool = queue.directory / "bin" / queue.tools[:2][-1]
    before = tool.read_text()
    broken = {"echo 'cannot connect to server' >&2; exit 2": f"{tool.name} failed: cannot connect to server"}
    if queue.kind == "grid-engine":
        broken["exit 0"] = "qstat: unexpected output: nothing"
    for does, told in broken.items():
        tool.write_text(f"#!/bin/sh\n{does}\n")
        (row,) = rows()
        assert (row["state"], row["where"]) == ("PENDING", f"{queue.title}: unknown, {told}")
    tool.write_text(before)
    assert rows()[0]["run"] == job


@pytest.mark.parametrize("queue", ["pbs"], indirect=True)
def test_a_number_that_several_jobs_begin_with_is_ambiguous(queue: Queue) -> None:
    for job in ("7.a", "7.b"):
        note(Submission(job, "long", str(queue.directory), time.time(), scheduler=queue.kind))
    done = distlaunch("wait", "7", status=2)
    assert "7 is ambiguous: it matches 7.a, 7.b" in done.stderr


def test_stops_a_task_of_a_slurm_array_that_can_never_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's commands are stand-ins for one job, 74, which is a task of the array 73."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    state = (
        f"[ -e {tmp_path}/over ] && echo '74|CANCELLED|None' || echo '74|PENDING|DependencyNeverSatisfied'"
    )
    program(tmp_path / "squeue", f'case "$*" in *--jobs=73_1*%A*|*--jobs=74*%A*) {state};; esac')
    program(tmp_path / "scancel", f'[ "$*" = 74 ] && touch {tmp_path}/over')
    note(Submission("74", "train", str(tmp_path), time.time()))
    assert "PENDING" in (shown := distlaunch("ps").stdout)
    assert "DependencyNeverSatisfied: a job it depends on has failed; `distlaunch stop` cancels it" in shown
    assert "Slurm job 74: cancelled; no run was active" in distlaunch("stop", "73_1", status=0).stderr


@pytest.mark.parametrize("queue", ["pbs"], indirect=True)
def test_the_same_id_in_two_queues_is_two_jobs(queue: Queue) -> None:
    queue.hold()
    old = Submission(queue.id, "old", str(queue.directory / "old"), time.time() - 60)
    note(old)
    note_end(old, "COMPLETED")
    queue.submit(HELLO)
    (row,) = rows()
    assert (row["job"], row["state"]) == ("train", "PENDING")
    assert queue.id in distlaunch("ps", queue.id).stdout
    assert f"{queue.title} job {queue.id}: cancelled" in distlaunch("stop", queue.id).stderr
    for words in (["ps"], ["ps", "-a"]):
        assert re.search(rf"{queue.id} +CANCELLED", distlaunch(*words, queue.id).stdout), "it never had a run"
    assert queue.id not in distlaunch("ps").stdout


@pytest.mark.parametrize("queue", ["pbs"], indirect=True)
def test_submits_on_another_host(queue: Queue) -> None:
    """A shell here stands in for ssh."""
    program(queue.directory / "bin" / "ssh", 'for last; do :; done\nexec /bin/sh -c "$last"')
    done = distlaunch("submit", "--on", "login", str(queue.job(HELLO)), "--to", queue.kind)
    assert (done.returncode, done.stdout) == (0, f"login:{queue.id}\n"), done.stderr
    distlaunch("wait", done.stdout.strip(), status=0)


@pytest.mark.parametrize("to", KINDS)
def test_says_where_to_submit_from_outside_of_any_cluster(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text("command: ['true']\ngpus_per_node: 0\n")
    monkeypatch.setenv("PATH", os.path.dirname(distlaunch_argv()[0]))
    done = distlaunch("submit", str(tmp_path / "job.yaml"), "--to", to, status=1)
    title, _, (tool, *_) = KINDS[to]
    where = f"login nodes of {title} clusters have it; to submit from elsewhere, use --on HOST"
    assert done.stderr == f"distlaunch: {tool} not found in PATH; {where}; for another scheduler, use --to\n"


# Slurm's batch scripts


def run_script(text: str, call: Call, directory: Path, **environ: str) -> Done:
    """Run a job's batch script for Slurm as slurmstepd would; scontrol is one that says what it is asked."""
    program(directory / "scontrol", 'echo "scontrol $*"')
    script = directory / "script.sh"
    script.write_text(load("slurm").script(job_of(text, str(directory / "job.yaml"), submitted=True), call))
    env = {"PATH": f"{directory}:/usr/bin:/bin", "SLURM_JOB_ID": "17", **environ}
    return completed(["bash", str(script)], env=env)


@pytest.mark.parametrize(
    ("status", "starts", "said"),
    [(0, "0", ""), (3, "0", ""), (137, "0", "scontrol requeue 17\n"), (137, "2", "")],
)
def test_the_script_requeues_only_for_a_distlaunch_that_was_killed(
    status: int, starts: str, said: str, tmp_path: Path
) -> None:
    job = "script: train.py\nrestarts: {requeue: 2}\n"
    end = "kill -KILL $$" if status == 137 else f"exit {status}"
    done = run_script(job, Call(("bash", "-c", end)), tmp_path, SLURM_RESTART_COUNT=starts)
    assert (done.returncode, done.stdout) == (status, said)


@pytest.mark.parametrize("keys", ["", "slurm: {signal: USR1@60}\n"])
def test_a_warning_does_not_kill_a_distlaunch_that_is_starting(keys: str, tmp_path: Path) -> None:
    starting = Call(("bash", "-c", "kill -USR1 $$; echo alive"))
    assert run_script(f"script: train.py\n{keys}", starting, tmp_path).stdout == "alive\n"


@pytest.mark.parametrize(("name", "signum"), [("slurm", "TERM"), ("pbs", "TERM"), ("grid-engine", "USR2")])
def test_a_job_cancelled_during_its_setup_runs_nothing(name: str, signum: str, tmp_path: Path) -> None:
    scheduler, job = load(name), tmp_path / "job.yaml"
    setup = f"setup: [kill -USR1 $$, echo warned, kill -{signum} $$, 'true']"
    spec = job_of(f"script: train.py\n{scheduler.key}: {{{setup}}}\n", str(job), submitted=True)
    job.write_text(scheduler.script(spec, Call(("echo", "ran"))))
    assert completed(["bash", str(job)], env={"PATH": os.environ["PATH"]}).stdout == "warned\n"


@pytest.mark.parametrize(
    ("shown", "stopped", "told"),
    [
        ("RUNNING", False, ["requeueing Slurm job 17, 1 of 2"]),
        ("TIMEOUT", False, ["requeueing Slurm job 17, 1 of 2"]),
        ("RUNNING", True, ["not requeueing Slurm job 17: it was cancelled"]),
        ("CANCELLED", False, ["not requeueing Slurm job 17: it was cancelled"]),
    ],
)
def test_a_job_cancelled_after_it_failed_is_not_requeued(
    shown: str, stopped: bool, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "scontrol", f'echo "$*" >>{tmp_path}/asked\necho JobState={shown} EndTime=2026-01-01')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if stopped:
        note_stop(str(tmp_path), "17", "slurm")
    text = f"script: train.py\nlogs: {{dir: {tmp_path}}}\nrestarts: {{requeue: 2}}\n"
    spec = job_of(text, str(tmp_path / "job.yaml"), submitted=True)
    allocation = Allocation("slurm", "Slurm", "17", (), queued=True, answers=True)
    failed, said = Verdict(Cause("why", 1, 1.0), 1.0), list[str]()
    ask_for_another(
        Job().state._replace(spec=spec._replace(allocation=allocation), verdict=failed), said.append
    )
    asked = (tmp_path / "asked").read_text().splitlines()
    assert (said, "requeue 17" in asked) == (told, not told[0].startswith("not"))


def test_reports_a_directory_that_cannot_hold_scripts_and_a_dry_run_writes_none(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("command: ['true']\nlogs: {dir: job.yaml}\n")
    done = distlaunch("submit", str(job), status=1)
    assert f"can't write the batch script to {job}: File exists; set logs.dir" in done.stderr
    assert (
        "the job file requests no GPUs: set gpus_per_node to the number of GPUs per node, or to 0 for"
        in done.stderr
    )
    job.write_text("command: ['true']\ngpus_per_node: 0\n")
    done = distlaunch("submit", "--dry-run", str(job))
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == [job]


def test_runs_the_setup_first_and_passes_a_job_along_with_the_script(tmp_path: Path) -> None:
    job = "script: train.py\nslurm:\n  setup: |\n    export A=1\n    echo $A\n"
    text = "script: $HOME/`x`\nEND_OF_JOB\nargs: ['it''s']\n"
    done = run_script(job, Call(("cat",), text), tmp_path)
    assert done.stdout == f"1\n{text}", done.stderr
