"""Jobs submitted to stand-ins for queues, from the queue to their ends, and batch scripts run by a shell."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from distlaunch.cli.job_file import job_of
from distlaunch.job.spec import Allocation
from distlaunch.launch import controller
from distlaunch.launch.controller import ask_for_another
from distlaunch.observers.run_directory import RunDirectory
from distlaunch.observers.run_list import (
    Ticket,
    append,
    index_path,
    is_stopped,
    lines_of,
    note_begin,
    note_no_stop,
    note_stop,
)
from distlaunch.runs import submissions
from distlaunch.runs.submissions import Submission, cancel, listing, note, note_end, runs_of
from distlaunch.schedulers import load
from distlaunch.schedulers.base import Call
from distlaunch.signals import Interrupts
from distlaunch.supervisor.state import Cause, State, Verdict
from distlaunch.supervisor.status import ControllerProcess, RunState, Status
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
    wait_until,
    write_job,
)
from tests.process import stand_in_queue
from tests.process.commands import SLEEPER, STUBBORN, TWO
from tests.process.test_runs import left
from tests.queued import Printed, check_stop_before_start, rows
from tests.unit.test_restarts import Job

HERE = os.uname().nodename
KINDS = {
    "grid-engine": ("Grid Engine", "grid_engine: {pe: mpi}", ("qsub", "qstat", "qdel")),
    "pbs": ("PBS", "pbs: {time: 1h}", ("qsub", "qstat", "qdel", "qsig")),
    "lsf": ("LSF", "lsf: {time: 1h}", ("bsub", "bjobs", "bkill")),
    "flux": ("Flux", "flux: {time: 1h}", ("flux",)),
}
HELLO = 'print("hello from", __import__("os").environ["RANK"])'
WAITS = {
    "grid-engine": "qw",
    "pbs": "Q (Not Running: Insufficient amount of resource: ngpus)",
    "lsf": "PEND (New job is waiting for scheduling)",
    "flux": "SCHED",
}
NO_PE = 'job rejected: the requested parallel environment "none" does not exist.'
REFUSED = {
    "grid-engine": f"Unable to run job: {NO_PE}",
    "pbs": "Unknown queue",
    "lsf": "none: No such queue. Job not submitted.",
    "flux": "flux-batch: ERROR: [Errno 22] Invalid queue 'none' specified",
}
NO_RUN = {"lsf": ("ended (EXIT)", "EXIT"), "flux": ("ended (FAILED)", "FAILED")}
"""How a job ended, where its scheduler still tells."""
STOP = distlaunch_argv("stop")
KILLS = {"grid-engine": STOP, "pbs": STOP, "lsf": ["bkill"], "flux": ["flux", "cancel"]}


class Queue(Printed):
    """Submits jobs to a stand-in, and looks at them as a user does."""

    def __init__(self, kind: str, directory: Path) -> None:
        super().__init__(directory, kind)
        self.kind, self.place = kind, directory / "queue"
        self.title, self.section, self.tools = KINDS[kind]
        self.id = "88.pbs.example" if kind == "pbs" else "88"
        self.name = f"{self.title} job {self.id}"

    def job(self, worker: str, keys: str = "") -> Path:
        """A job file for this scheduler, which its section says."""
        section = "" if self.section.partition(":")[0] in keys else self.section
        job = write_job(self.directory, worker, f"{TWO}{section}\n{keys}\n")
        return job.rename(self.directory / "train.yaml")

    def submit(self, worker: str, keys: str = "") -> str:
        """Submit it; the job's id, which is all that is printed."""
        done = distlaunch("submit", str(self.job(worker, keys)))
        assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{self.id}\n")
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


def test_a_run_that_a_rank_starts_is_not_the_jobs(queue: Queue) -> None:
    inner = queue.directory / "inner.yaml"
    inner.write_text("command: ['true']\nnodes: 1\nprocs_per_node: 1\ngpus_per_node: 0\n")
    call = f"subprocess.run({distlaunch_argv('run', str(inner))}, check=True)"
    worker = f"import os, subprocess\nif os.environ['RANK'] == '0': {call}\nraise SystemExit(3)"
    job = queue.submit(worker)
    assert distlaunch("wait", job).returncode == 3
    assert "train-" in distlaunch("why", job).stdout


def test_a_job_from_the_queue_to_its_end(queue: Queue) -> None:
    queue.hold()
    job, waits = queue.submit(HELLO), WAITS[queue.kind]
    (row,) = rows()
    assert (row["run"], row["state"], row["where"]) == (job, "PENDING", f"{queue.title}: {waits}")
    logs = distlaunch("logs", job, status=1)
    assert (logs.stdout, f"{queue.name} has not started: {waits}\n" in logs.stderr) == ("", True)
    with subprocess.Popen(distlaunch_argv("attach", job), stderr=subprocess.PIPE, text=True) as attached:
        assert attached.stderr is not None
        assert attached.stderr.readline() == f"distlaunch: {queue.name} is {waits}\n"
        queue.tool("release")
        assert attached.wait(PATIENCE_S) == 0, attached.stderr.read()
    distlaunch("wait", "88", status=0)
    logs = distlaunch("logs", "-f", job)
    assert {line.split("] ")[1] for line in logs.stdout.splitlines()} == {"hello from 0", "hello from 1"}
    (row,) = rows("--all")
    assert (row["state"], row["where"]) == ("SUCCEEDED", f"{queue.name}: {HERE}")
    assert f"1 node from {queue.name}: {HERE}" in queue.file("out").read_text()
    (begun,) = map(json.loads, queue.file("jsonl").read_text().splitlines())
    assert begun["run"] == row["run"]
    script = queue.file("sh").read_text()
    assert distlaunch("submit", "--dry-run", str(queue.directory / "train.yaml")).stdout == script


@pytest.mark.parametrize("queue", ["pbs"], indirect=True)
def test_submit_waits_for_the_end(queue: Queue) -> None:
    done = distlaunch("submit", str(queue.job("raise SystemExit(5)")), "--wait", status=5)
    assert (done.stdout, "FAILED, exit status 5" in done.stderr) == (f"{queue.id}\n", True)


def test_a_job_is_stopped_while_it_waits(queue: Queue) -> None:
    queue.hold()
    check_stop_before_start(queue.name, queue.submit(HELLO), "88")


@pytest.mark.parametrize("queue", ["pbs"], indirect=True)
def test_a_job_is_stopped_although_another_cluster_did_not_find_it(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.hold()
    job = queue.submit(HELLO)
    with monkeypatch.context() as there:
        there.setenv("QUEUE", str(queue.directory))
        assert rows() == []
    assert f"{queue.name} has not started" in distlaunch("logs", job, status=1).stderr
    check_stop_before_start(queue.name, job)


def test_a_job_is_stopped_by_its_name_while_it_runs(queue: Queue) -> None:
    job, status = queue.submit(SLEEPER), 130 if queue.kind == "lsf" else 143
    queue.wait_for(queue.id, "ready", 2)
    (row,) = rows()
    assert (row["state"], row["ranks"]) == ("RUNNING", 2)
    why = "stopped by SIGINT" if queue.kind == "lsf" else f"{queue.name} was cancelled"
    ended = f"{row['run']}: CANCELLED, exit status {status}: {why}"
    assert ended in distlaunch("stop", "train", status=0).stderr
    distlaunch("wait", job, status=status)
    assert rows() == []
    assert "had already ended" in distlaunch("stop", job).stderr


@pytest.mark.parametrize("queue", ["pbs", "lsf", "flux"], indirect=True)
def test_stop_now_kills_stubborn_ranks_at_once(queue: Queue) -> None:
    queue.submit(STUBBORN, "timeouts: {stop: 10m}")
    queue.wait_for(queue.id, "ready", 2)
    assert "CANCELLED" in distlaunch("stop", "88", "--now", status=0).stderr


def test_a_job_killed_before_its_report_is_cancelled(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILL_DELAY_S", "1")
    job = queue.submit(STUBBORN, "timeouts: {stop: 10m}")
    queue.wait_for(job, "ready", 2)
    with subprocess.Popen(distlaunch_argv("wait", job), stderr=subprocess.PIPE, text=True) as waiting:
        queue.tool(*KILLS[queue.kind], job)
        assert waiting.wait(PATIENCE_S) == 143
        assert waiting.stderr is not None
        assert f": CANCELLED, exit status 143: {queue.name} " in waiting.stderr.read()
    (row,) = rows("--all")
    assert row["state"] == "CANCELLED"
    for pid in cookie_holders(row["run"]):  # a real scheduler kills other sessions, too
        kill(pid)


@pytest.mark.parametrize("queue", ["pbs"], indirect=True)
def test_a_waiting_job_neither_hides_an_active_run_nor_is_stopped_instead(queue: Queue) -> None:
    queue.hold()
    job, file = queue.submit(SLEEPER), str(queue.directory / "train.yaml")
    other = distlaunch("submit", file, status=0).stdout.strip()
    which = "several runs of train wait or are active: {}; specify one by its ID"
    assert which.format(f"{other}, {job}") in distlaunch("stop", "train", status=2).stderr
    assert {row["run"] for row in rows("train")} == {other, job}
    queue.tool("qdel", other)  # which nobody has looked up
    run = distlaunch("run", "-d", file, status=0).stdout.strip()
    assert which.format(f"{job}, {run}") in distlaunch("stop", "train", status=2).stderr
    assert "ready" in distlaunch("logs", file, status=0).stdout
    second = distlaunch("run", "-d", file, status=0).stdout.strip()
    assert which.format(f"{job}, {second}, {run}") in distlaunch("stop", "train", status=2).stderr
    distlaunch("stop", second, status=0)
    queue.tool("qdel", job)
    assert f"{run}: CANCELLED" in distlaunch("stop", file, status=0).stderr


@pytest.mark.parametrize("queue", ["grid-engine"], indirect=True)
def test_stops_the_run_itself_where_its_script_asks_for_no_warning(queue: Queue) -> None:
    """qdel would be a SIGKILL."""
    run, script = " ".join(distlaunch_argv("run", str(queue.job(SLEEPER)))), queue.directory / "own.sh"
    script.write_text(f"#$ -o {queue.file('out')}\n{run}\n")
    queue.file("out").parent.mkdir()
    queue.tool("qsub", "-terse", str(script))
    queue.wait_for(queue.id, "ready", 2)
    assert "CANCELLED, exit status 130" in distlaunch("stop", "train", status=0).stderr


def test_reports_a_script_that_never_starts_distlaunch(queue: Queue) -> None:
    (queue.directory / "earlier.yaml").write_text("command: ['true']\ngpus_per_node: 0\nlauncher: local\n")
    distlaunch("run", "--quiet", str(queue.directory / "earlier.yaml"), status=0)
    job = queue.submit(HELLO, queue.section.rstrip("}") + ", setup: exit 4}")
    ended, why = NO_RUN.get(queue.kind, ("left the queue", "left the queue"))
    told = f"{queue.name} {ended} without starting a run; see {queue.file('out')}"
    for command in ("wait", "logs", "attach"):
        assert told in distlaunch(command, job, status=1).stderr
    (row,) = rows("--number", "1")
    assert (row["run"], row["state"]) == (job, "FAILED")
    assert row["why"] == f"{queue.title}: {why}; see {queue.file('out')}"


@pytest.mark.parametrize("queue", ["flux"], indirect=True)
def test_a_script_that_succeeded_is_not_called_failed_because_no_run_is_found(queue: Queue) -> None:
    job = queue.submit(HELLO, queue.section.rstrip("}") + ", setup: exit 0}")
    told = f"{queue.name} ended (COMPLETED), but its run is not in {queue.directory / 'runs'}"
    assert told in distlaunch("wait", job, status=1).stderr
    (row,) = rows("--all")
    assert (row["run"], row["state"]) == (job, "UNKNOWN")


@pytest.mark.parametrize("queue", ["pbs"], indirect=True)
def test_runs_are_where_submit_expects_them_even_if_the_job_has_another_home(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(queue.directory))
    setup = f"export HOME={queue.directory}/other XDG_STATE_HOME={queue.directory}/other"
    keys = f"{queue.section.rstrip('}')}, setup: {setup}}}\nlogs: {{dir: '~/my runs'}}"
    done = distlaunch("submit", "--wait", str(queue.job("raise SystemExit(5)", keys)), status=5)
    assert "FAILED, exit status 5" in done.stderr
    for words in (["--all"], [queue.id], [queue.id, "--all"]):
        assert [row["state"] for row in rows(*words)] == ["FAILED"]  # its host keeps another list of runs


@pytest.mark.parametrize("queue", ["pbs"], indirect=True)
def test_a_job_whose_run_was_deleted_is_not_listed_as_failed(queue: Queue) -> None:
    job, known = queue.submit(HELLO), queue.directory / "state/distlaunch/runs.jsonl"
    distlaunch("wait", job, status=0)
    before = known.read_text()
    distlaunch("prune", "--older", "0s", status=0)
    assert known.read_text() == ""
    known.write_text(before)  # as with a job that was submitted later than what is old
    assert rows("--all") == []
    assert [row["state"] for row in rows(job)] == ["SUCCEEDED"]  # it is asked for
    distlaunch("wait", job, status=0)
    known.write_text("".join(line for line in before.splitlines(True) if '"over"' not in line))
    told = f"{queue.name} left the queue; its run directory was removed, or is on another host's disk"
    assert told in distlaunch("wait", job, status=1).stderr


@pytest.mark.parametrize("queue", ["pbs"], indirect=True)
def test_files_of_others_beside_a_job_change_nothing(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone may know the next ID."""
    queue.hold()
    (queue.directory / "runs").mkdir()
    queue.file("sh").mkdir()
    queue.file("jsonl").write_text('{"stop": true}\n')
    queue.file("jsonl").chmod(0o666)  # as good as another user's
    job = queue.submit(HELLO)
    assert [row["state"] for row in rows()] == ["PENDING"]
    assert f"{queue.name}: cancelled" in distlaunch("stop", job, status=0).stderr
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    done = distlaunch("submit", str(queue.directory / "train.yaml"), status=0)
    assert "can't add the job to the list of runs, /proc/nowhere/distlaunch/runs.jsonl" in done.stderr
    (queue.directory / "runs").chmod(0o777)
    refused = distlaunch("submit", str(queue.directory / "train.yaml"), status=1)
    assert "runs is writable by all users, who could replace the job's files; use chmod" in refused.stderr


def test_reports_a_refusal_in_the_schedulers_words_and_leaves_nothing(queue: Queue) -> None:
    nowhere = f"{queue.section.partition(':')[0]}.queue=none"
    done = distlaunch("submit", str(queue.job(HELLO)), "--set", nowhere, status=1)
    told = f"distlaunch: {queue.tools[0]} failed: {REFUSED[queue.kind]}\n"
    assert (done.stdout, done.stderr) == ("", told)
    assert list((queue.directory / "runs").iterdir()) == []


def test_ps_asks_once_for_all_jobs(queue: Queue) -> None:
    queue.hold()
    queue.submit(HELLO)
    for number in range(200, 300):
        job = f"{number}{queue.id[2:]}"
        note(Submission(job, "long", str(queue.directory / "runs"), time.time(), scheduler=queue.kind))
    assert [row["run"] for row in rows()] == [queue.id]  # of the others it knows nothing
    asked = queue.place / "asked"
    assert len(asked.read_text().splitlines()) == 1
    assert len(rows("--all")) == 101
    distlaunch("ps", status=0)
    assert len(asked.read_text().splitlines()) == 3


def test_a_queue_that_does_not_answer_loses_no_job(queue: Queue) -> None:
    queue.hold()
    job, tool = queue.submit(HELLO), queue.directory / "bin" / queue.tools[:2][-1]
    before = tool.read_text()
    broken = {"echo 'cannot connect to server' >&2; exit 2": f"{tool.name} failed: cannot connect to server"}
    if queue.kind == "grid-engine":
        broken["exit 0"] = "qstat: unexpected output: nothing"
    for does, told in broken.items():
        tool.write_text(f"#!/bin/sh\n{does}\n")
        (row,) = rows()
        assert (row["state"], row["where"]) == ("PENDING", f"{queue.title}: unknown, {told}")
    with subprocess.Popen(distlaunch_argv("wait", job), stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == f"distlaunch: {queue.name} is in an unknown state: {told}\n"
        tool.write_text(before)
        assert rows()[0]["run"] == job
        queue.tool("release")
        assert waiting.wait(PATIENCE_S) == 0, waiting.stderr.read()


def test_stops_a_slurm_task_that_can_never_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands are stand-ins for one job, 74, which is a task of the array 73."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    over, waits = "echo '74|CANCELLED|None'", "echo '74|PENDING|DependencyNeverSatisfied'"
    state = f"[ -e {tmp_path}/over ] && {over} || {waits}"
    tasks = "*=73_1*%F_%K*|*=74*%F_%K*) echo '73_1|74'"
    program(tmp_path / "squeue", f'case "$*" in {tasks};; *--jobs=74*%A*) {state};; esac')
    program(tmp_path / "scancel", f'[ "$*" = 73_1 ] && touch {tmp_path}/over')
    note(Submission("74", "train", str(tmp_path), time.time()))
    assert "PENDING" in (shown := distlaunch("ps").stdout)
    assert "Satisfied: its dependency can't be met anymore; `distlaunch stop` cancels it" in shown
    assert "Slurm job 74: cancelled\n" in distlaunch("stop", "73_1", status=0).stderr


@pytest.mark.parametrize("queue", ["pbs"], indirect=True)
def test_all_runs_of_ones_own_script_count_although_their_job_files_have_different_directories(
    queue: Queue,
) -> None:
    script = [f"#PBS -o {queue.directory}"]
    for name, status in (("first", 3), ("last", 0)):
        (place := queue.directory / name).mkdir()
        job = write_job(place, f"print('the {name} run')\nraise SystemExit({status})", TWO)
        script.append(shlex.join(distlaunch_argv("run", str(job))))
    (path := queue.directory / "own.sh").write_text("\n".join(script))
    queue.tool("qsub", str(path))
    wait_until(lambda: bool(rows("--all")), lambda: "no run begins")
    done = distlaunch("wait", queue.id)
    assert done.returncode == 0, done.stderr
    logs = distlaunch("logs", queue.id, status=0).stdout
    assert [logs.count(f"the {name} run") for name in ("first", "last")] == [2, 2]
    assert distlaunch("why", queue.id).stdout.split(":")[0] == rows("--all")[0]["run"]


@pytest.mark.parametrize("queue", ["pbs"], indirect=True)
def test_the_same_id_in_two_queues_is_two_jobs_and_a_number_of_several_is_ambiguous(queue: Queue) -> None:
    """On a terminal, the next command is named."""
    queue.hold()
    old = Submission(queue.id, "old", str(queue.directory / "old"), time.time() - 60)
    note(old)
    note_end(old, "COMPLETED")
    status, shown = on_a_terminal("submit", str(queue.job(HELLO)))
    told = f"submitted to {queue.title}; follow it with `distlaunch attach {queue.id}`"
    assert (status, told in shown.decode()) == (0, True)
    (row,) = rows()
    assert (row["job"], row["state"]) == ("train", "PENDING")
    assert queue.id in distlaunch("ps", queue.id).stdout
    note_end(old, "")
    told = f"{queue.id} is ambiguous: it matches {old.name}, {queue.name}; specify the job's name, or a run"
    assert told in distlaunch("stop", queue.id, status=2).stderr
    note_end(old, "COMPLETED")
    assert f"{queue.name}: cancelled" in distlaunch("stop", queue.id).stderr
    for words in (["ps"], ["ps", "-a"]):
        assert re.search(rf"{queue.id} +CANCELLED", distlaunch(*words, queue.id).stdout), "it never had a run"
    assert queue.id not in distlaunch("ps").stdout
    for job in ("7.a", "7.b"):
        note(Submission(job, "long", str(queue.directory), time.time(), scheduler=queue.kind))
    assert "7 is ambiguous: it matches 7.a, 7.b" in distlaunch("wait", "7", status=2).stderr


def test_an_id_that_was_given_out_again_means_the_active_job(
    tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Slurm was set up again. Its commands are stand-ins."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    old = Submission("2", "job", str(tmp_path / "old"), time.time() - 60)
    note(old)
    note_end(old, "FAILED")
    run = left(tmp_path)
    directory = tmp_path / "runs" / run
    note_begin(run, str(directory), os.uname().nodename, Ticket("slurm", "2"))
    pid = json.loads((directory / "status.json").read_text())["controller"]["pid"]
    program(
        tmp_path / "squeue", f"[ -e {tmp_path}/over ] && echo '2|CANCELLED|None' || echo '2|RUNNING|None'"
    )
    program(tmp_path / "scancel", f'[ "$*" = 2 ] && touch {tmp_path}/over && kill -INT {pid}')
    assert [row["run"] for row in rows("2")] == [run]
    assert f"{run}: CANCELLED" in distlaunch("stop", "2", status=0).stderr


@pytest.mark.parametrize("queue", ["pbs"], indirect=True)
def test_submits_on_another_host(queue: Queue) -> None:
    """A shell here stands in for ssh."""
    program(queue.directory / "bin" / "ssh", 'for last; do :; done\nexec /bin/sh -c "$last"')
    done = distlaunch("submit", "--on", "login", str(queue.job(HELLO)), "--to", queue.kind, status=0)
    assert done.stdout == f"login:{queue.id}\n"
    distlaunch("wait", done.stdout.strip(), status=0)


def test_says_where_to_submit_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.yaml").write_text("command: ['true']\ngpus_per_node: 0\n")
    monkeypatch.setenv("PATH", os.path.dirname(distlaunch_argv()[0]))
    for to, (title, _, (tool, *_)) in KINDS.items():
        done = distlaunch("submit", str(tmp_path / "job.yaml"), "--to", to, status=1)
        where = f"login nodes of {title} clusters have it; to submit from elsewhere, use --on HOST"
        where += ", where the PATH of SSH commands must contain it; for another scheduler, use --to"
        told = f"distlaunch: {tool} not found in PATH; {where}\n"
        assert done.stderr == told


def test_an_interrupted_submit_says_that_the_job_may_be_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "sbatch", "kill -INT $PPID\nexec tail -f /dev/null")
    (tmp_path / "job.yaml").write_text("command: ['true']\ngpus_per_node: 0\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = distlaunch("submit", str(tmp_path / "job.yaml"), "--to", "slurm", status=130)
    check = "before you submit the job again, check whether it is in the queue"
    assert (done.stdout, done.stderr) == ("", f"distlaunch: interrupted; {check}\n")


# Slurm's batch scripts


def run_script(text: str, call: Call, directory: Path, state: str = "RUNNING", **environ: str) -> Done:
    """Run a job's batch script for Slurm as slurmstepd would; scontrol is one that says what it is asked."""
    program(directory / "scontrol", 'echo "scontrol $*"')
    program(directory / "squeue", f'[ "$*" = "-h -t all -j ${{SLURM_JOB_ID}} -o %T" ] && echo {state}')
    script = directory / "script.sh"
    script.write_text(load("slurm").script(job_of(text, str(directory / "job.yaml"), submitted=True), call))
    env = {"PATH": f"{directory}:/usr/bin:/bin", "SLURM_JOB_ID": "17", **environ}
    return completed(["bash", str(script)], env=env)


KILL = "kill -KILL $$"


@pytest.mark.parametrize(
    ("end", "before", "said"),
    [("exit 0", 0, ""), ("exit 3", 0, ""), (KILL, 1, "scontrol requeue 17\n"), (KILL, 2, "")],
)
def test_a_script_requeues_only_a_killed_distlaunch(end: str, before: int, said: str, tmp_path: Path) -> None:
    """It counts as distlaunch does: without the requeues of Slurm itself, after preemption."""
    starts = tmp_path / "slurm-17.jsonl"
    earlier = '{"run": "a", "starts": 1, "args": ""}\n{"requeue": true, "raised": null}\n{"decided": "a"}\n'
    starts.write_text(earlier * before + '{"run": "b", "starts": 5, "args": ""}\n')
    done = run_script(requeueing(tmp_path), Call(("bash", "-c", end)), tmp_path, SLURM_RESTART_COUNT="5")
    assert (done.returncode, done.stdout) == (137 if end == KILL else int(end[-1]), said)
    requeues = [line for line in lines_of(str(starts)) if "requeue" in line]
    assert len(requeues) == before + bool(said)


def test_a_script_requeues_a_distlaunch_that_was_killed_before_it_began_a_run(tmp_path: Path) -> None:
    """Whatever earlier starts decided, and not if that can't be counted."""
    starts = tmp_path / "slurm-17.jsonl"
    for before in ("", '{"run": "a", "starts": 0, "args": ""}\n{"decided": "a"}\n'):
        if before:
            starts.write_text(before)
        done = run_script(requeueing(tmp_path), Call(("bash", "-c", KILL)), tmp_path, SLURM_RESTART_COUNT="1")
        assert done.stdout == "scontrol requeue 17\n"
        assert starts.stat().st_mode & 0o077 == 0 or before
    starts.unlink()
    starts.mkdir()
    assert run_script(requeueing(tmp_path), Call(("bash", "-c", KILL)), tmp_path).stdout == ""


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", ""])
def test_a_script_requeues_no_job_that_slurm_is_ending(state: str, tmp_path: Path) -> None:
    """Slurm has killed distlaunch, and is about to kill the script."""
    assert run_script(requeueing(tmp_path), Call(("bash", "-c", KILL)), tmp_path, state).stdout == ""


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


@pytest.mark.parametrize(("status", "left"), [(0, 0), (3, 3), (99, 1), (100, 1)])
def test_grid_engine_neither_repeats_nor_keeps_a_job_that_fails(
    status: int, left: int, tmp_path: Path
) -> None:
    """It would, because of these exit statuses of a rank, which distlaunch passes on."""
    scheduler, job = load("grid-engine"), tmp_path / "job.yaml"
    spec = job_of("script: train.py\n", str(job), submitted=True)
    job.write_text(scheduler.script(spec, Call(("bash", "-c", f"exit {status}"))))
    assert completed(["bash", str(job)], env={"PATH": os.environ["PATH"]}).returncode == left


def test_a_script_keeps_the_status_in_the_posix_mode_of_bash(tmp_path: Path) -> None:
    """In which a second `wait` fails. sbatch passes the variable on."""
    job = tmp_path / "job.sh"
    spec = job_of("script: train.py\n", str(job), submitted=True)
    job.write_text(load("slurm").script(spec, Call(("bash", "-c", "sleep 0.2; exit 7"))))
    env = {"PATH": os.environ["PATH"], "POSIXLY_CORRECT": "1"}
    assert completed(["bash", str(job)], env=env).returncode == 7


def requeueing(directory: Path) -> str:
    """A job to requeue, with its runs in `directory`."""
    return f"script: train.py\nlogs: {{dir: {directory}}}\nrestarts: {{requeue: 2}}\n"


def failed(directory: Path, cause: Cause) -> State:
    """The state of such a job as Slurm's job 17, which has ended for this cause."""
    spec = job_of(requeueing(directory), str(directory / "job.yaml"), submitted=True)
    allocation = Allocation("slurm", "Slurm", "17", (), queued=True, answers=True)
    return Job().state._replace(spec=spec._replace(allocation=allocation), verdict=Verdict(cause, 1.0))


def test_a_script_requeues_no_job_whose_rank_was_killed(tmp_path: Path) -> None:
    """Unless distlaunch requeues it: both have the same status."""
    starts = tmp_path / "slurm-17.jsonl"
    starts.write_text('{"run": "", "job": "train", "starts": 0, "args": ""}\n')
    ask_for_another(failed(tmp_path, Cause("why", 137, 1.0, final=True)), pytest.fail)
    call = Call(("bash", "-c", "exit 137"))
    assert run_script(requeueing(tmp_path), call, tmp_path).stdout == ""


def shown_as(fields: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide a scontrol that shows these fields of every job, and records in `asked` what it is asked."""
    program(directory / "scontrol", f'echo "$*" >>{directory}/asked\necho {fields}')
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


@pytest.mark.parametrize("shown", ["RUNNING", "TIMEOUT", "STOPPED", "CANCELLED"])
def test_requeues_no_cancelled_job(shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm may not show it yet that `distlaunch stop` has cancelled it."""
    if shown == "STOPPED":
        note_stop(str(tmp_path), "17", "slurm")
    (tmp_path / "asked").touch()
    state = shown.replace("STOPPED", "RUNNING")
    shown_as(f"JobState={state} EndTime=2026-01-01", tmp_path, monkeypatch)
    said = list[str]()
    ask_for_another(failed(tmp_path, Cause("why", 1, 1.0)), said.append)
    asked = (tmp_path / "asked").read_text().splitlines()
    requeued = "requeue 17" in asked
    told = "requeueing Slurm job 17, 1 of 2" if requeued else "not requeueing Slurm job 17: it was cancelled"
    assert (said, requeued) == ([told], shown in ("RUNNING", "TIMEOUT"))


def test_a_preemption_with_a_grace_period_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown_as("JobState=RUNNING", tmp_path, monkeypatch)
    starts = tmp_path / "slurm-17.jsonl"
    starts.write_text('{"preempted": true, "requeue": true}\n{"requeue": true}\n' * 2)
    said = list[str]()
    ask_for_another(failed(tmp_path, Cause("why", 143, 1.0, scheduled=True, later=True)), said.append)
    assert said == ["requeueing Slurm job 17; preemption doesn't count toward restarts.requeue"]
    assert "requeue 17" in (tmp_path / "asked").read_text()
    assert len(re.findall('(?m)^{"requeue', starts.read_text())) == 2, "which the batch script counts"
    starts.write_text(starts.read_text().partition("\n")[0] + "\n")
    ask_for_another(failed(tmp_path, Cause("why", 1, 1.0)), said.append)
    assert said[1:] == ["requeueing Slurm job 17, 1 of 2"]


def test_requeues_no_job_whose_requeues_it_cannot_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would do so for ever."""
    shown_as("JobState=RUNNING", tmp_path, monkeypatch)
    starts = tmp_path / "slurm-17.jsonl"
    starts.touch()
    starts.chmod(0o666)
    said = list[str]()
    ask_for_another(failed(tmp_path, Cause("why", 1, 1.0)), said.append)
    why = f"requeues are counted in {starts}, but it can't be written, or others may write to it"
    assert said == [f"not requeueing Slurm job 17: {why}"]
    assert "requeue" not in (tmp_path / "asked").read_text()


BUSY = """
echo "$*" >>DIR/asked
case "$1 $(wc -l <DIR/asked)" in
    "--oneliner 1" | "requeue 3") echo 'Unable to contact slurm controller' >&2; exit 1 ;;
    "requeue "*) [ ! -e DIR/refuses ] || { echo 'Requested operation is presently disabled' >&2; exit 1; } ;;
    *) echo JobState=RUNNING ;;
esac
"""
"""A scontrol whose first question and first request aren't answered."""


@pytest.mark.parametrize("end", ["requeued", "refused", "removed", "signalled", "stopped"])
def test_requeues_a_job_although_slurm_does_not_answer_at_first(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call stands for the one in a job that Slurm is ending. The requeue is counted once."""
    program(tmp_path / "scontrol", BUSY.replace("DIR", str(tmp_path)))
    (tmp_path / "asked").touch()
    if end == "refused":
        (tmp_path / "refuses").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(controller, "AGAIN_GAP_S", 0.0)
    state, said = failed(tmp_path, Cause("why", 1, 1.0)), list[str]()
    ask_for_another(state, said.append)
    why = "scontrol failed: Unable to contact slurm controller; trying again for up to 10 min"
    later, begins = f"can't requeue Slurm job 17 yet: {why}", "requeueing Slurm job 17, 1 of 2"
    assert said == [later]
    if end == "removed":
        (tmp_path / "scontrol").unlink()
        monkeypatch.setenv("PATH", str(tmp_path))
    if end == "stopped":
        note_stop(str(tmp_path), "17", "slurm")
    with Interrupts() as interrupts:
        interrupts.send(signal.SIGTERM if end == "signalled" else signal.SIGUSR1)  # a warning
        for _ in range(2):  # the second call finds that this was decided
            ask_for_another(state, said.append, interrupts)
    ends = {
        "requeued": [],
        "refused": ["can't requeue Slurm job 17: scontrol failed: Requested operation is presently disabled"],
        "signalled": ["not requeueing Slurm job 17: received a signal"],
        "stopped": ["not requeueing Slurm job 17: it was cancelled"],
    }
    if end == "removed":
        where = "login nodes of Slurm clusters have it"
        assert said == [later, f"can't requeue Slurm job 17: scontrol not found in PATH; {where}"]
        return
    kept = end in ("signalled", "stopped")
    started = [] if kept else [begins, later]
    assert said == [later, *started, *ends[end]]
    requests = [line for line in (tmp_path / "asked").read_text().splitlines() if line == "requeue 17"]
    assert len(requests) == (0 if kept else 2)
    counted = [line for line in lines_of(str(tmp_path / "slurm-17.jsonl")) if "requeue" in line]
    assert len(counted) == (0 if kept else 1)


def test_a_list_of_starts_on_a_stuck_disk_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event stands in for the disk, since a thread that waits for one can't be killed."""
    thaw, said, before = threading.Event(), list[str](), {*threading.enumerate()}
    monkeypatch.setattr(controller, "lines_of", lambda path: iter([{}] * thaw.wait()))
    monkeypatch.setattr(controller, "DECIDE_S", 0.1)
    ask_for_another(failed(tmp_path, Cause("why", 1, 1.0)), said.append)
    thaw.set()
    for thread in {*threading.enumerate()} - before:
        thread.join(PATIENCE_S)
    starts = tmp_path / "slurm-17.jsonl"
    why = f"requeues are counted in {starts}, but it can't be written"
    assert said == [f"not requeueing Slurm job 17: {why}"]


def test_a_job_that_could_not_be_cancelled_is_not_told_as_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's commands are stand-ins."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    program(tmp_path / "squeue", "echo '17|RUNNING|None'")
    program(tmp_path / "scancel", "echo 'Unable to contact slurm controller' >&2; exit 1")
    note(Submission("17", "train", str(tmp_path), time.time()))
    assert "Unable to contact" in distlaunch("stop", "17", status=1).stderr
    assert not is_stopped(str(tmp_path / "slurm-17.jsonl"))
    program(tmp_path / "scancel", f"touch {tmp_path}/over")
    program(
        tmp_path / "squeue", f"[ -e {tmp_path}/over ] && echo '17|CANCELLED|None' || echo '17|RUNNING|None'"
    )
    assert "Slurm job 17: cancelled" in distlaunch("stop", "17", status=0).stderr
    for fails in (note_stop, note_no_stop):  # another stop, in vain
        fails(str(tmp_path), "17", "slurm")
        assert is_stopped(str(tmp_path / "slurm-17.jsonl"))


@pytest.mark.parametrize(
    ("order", "stopped"),
    [
        (["run a", "stop"], True),
        (["run a", "requeue", "stop"], False),  # the controller was killed before
        (["run a", "stop", "requeue"], True),  # both have crossed
        (["run b", "requeue", "run a", "stop"], True),
        (["stop", "run b", "run a"], True),  # the first start, before its cancellation
        (["run b", "stop", "start a"], False),  # requeued by a person
        (["run b", "stop", "start a", "stop"], True),
    ],
)
def test_a_stop_ended_no_run_before_or_after_it(order: list[str], stopped: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "slurm-17.jsonl")
    for what in order:
        name, _, run = what.partition(" ")
        more: dict[str, dict[str, Any]] = {"stop": {"ended": ""}, "start": {"run": run, "starts": 1}}
        append(path, {name: run or True, **more.get(name, {})})
    assert is_stopped(path, "a") == stopped


def test_a_waiting_job_that_another_cluster_does_not_know_goes_on_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both share the home directory, and their own Slurm is asked only once. Its command is a stand-in."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    program(
        tmp_path / "squeue", f"echo >>{tmp_path}/asked; [ ! -e {tmp_path}/known ] || echo '17|PENDING|None'"
    )
    note(Submission("17", "train", str(tmp_path), time.time()))
    for host, state in (("far", []), ("far", []), (HERE, ["PENDING"]), ("far", [])):
        names = os.uname_result(("Linux", host, "", "", ""))
        monkeypatch.setattr(os, "uname", lambda names=names: names)
        (tmp_path / "known").unlink(missing_ok=True) if host == "far" else (tmp_path / "known").touch()
        assert [run.status.state.value for run in listing([], ended=False, most=None)] == state
    assert (tmp_path / "asked").read_text() == "\n" * 2
    (waits,) = listing(["17"], ended=True, most=None)
    assert waits.status.state is RunState.FAILED  # as far as that cluster can tell


def unknown_to_slurm(directory: Path, monkeypatch: pytest.MonkeyPatch, run: str) -> None:
    """Make the run of this directory that of job 17, which the stand-ins for Slurm's commands don't know."""
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)
    program(directory / "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    program(directory / "scancel", f"touch {directory}/cancelled")
    note(Submission("17", "job", str(directory / "runs"), time.time() - 60))
    note_begin(run, str(directory / "runs" / run), HERE, Ticket("slurm", "17"))


def test_stop_ends_a_run_whose_job_the_queue_does_not_know(
    tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another cluster's, or Slurm was set up again."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = left(tmp_path)
    unknown_to_slurm(tmp_path, monkeypatch, run)
    assert f"{run}: CANCELLED" in distlaunch("stop", "17", status=0).stderr
    assert not (tmp_path / "cancelled").exists()


def test_stop_names_the_host_of_a_run_whose_job_the_queue_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with closing(RunDirectory(str(tmp_path / "runs"), run := "job-20260101-000000-00000000")) as directory:
        now = time.time()
        status = Status(run, "job", RunState.RUNNING, now, now, ControllerProcess("far", os.getpid()))
        directory.claim(status)
        unknown_to_slurm(tmp_path, monkeypatch, run)
        use = f"use `distlaunch stop {run}` on a login node of its cluster"
        told = f"Slurm job 17 isn't in this host's queue, but its run {run} is active on far; {use}\n"
        for word in ("17", run):
            assert distlaunch("stop", word, status=1).stderr == f"distlaunch: {told}"
        assert not [line for line in lines_of(index_path()) if "end" in line and "id" not in line]


def test_a_host_without_the_queue_shows_how_a_run_of_a_job_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for number, status in enumerate((0, 3)):
        (place := tmp_path / str(number)).mkdir()
        distlaunch("run", str(write_job(place, f"raise SystemExit({status})", TWO)), status=status)
        (run,) = (place / "runs").iterdir()
        note(Submission(f"1{number}", "job", str(place / "runs"), time.time() - 60))
        note_begin(run.name, str(run), HERE, Ticket("slurm", f"1{number}"))
        for word in (run.name, f"1{number}"):
            done = distlaunch("wait", word, env={**os.environ, "PATH": str(tmp_path)}, status=status)
            told = f"determine whether Slurm job 1{number} will start again: squeue not found in PATH"
            assert told in done.stderr
    note(Submission("12", "job", str(tmp_path), time.time()))
    done = distlaunch("wait", "12", env={**os.environ, "PATH": str(tmp_path)}, status=1)
    assert done.stderr.startswith("distlaunch: squeue not found in PATH")


def test_stop_cancels_a_job_again_that_is_requeued_meanwhile_and_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's commands are stand-ins."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    stages = (
        "case $(cat {0}/done 2>/dev/null) in '') echo '17|RUNNING|None';; x) echo '17|PENDING|None';; *) "
    )
    program(tmp_path / "squeue", f"{stages.format(tmp_path)} echo '17|CANCELLED|None';; esac")
    program(tmp_path / "scancel", f"printf x >>{tmp_path}/done")
    note(Submission("17", "train", str(tmp_path), time.time()))
    assert "Slurm job 17: cancelled" in distlaunch("stop", "17", status=0).stderr
    assert (tmp_path / "done").read_text() == "xx"


def test_a_job_that_ends_before_slurm_takes_its_cancellation_is_not_told_as_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's commands are stand-ins."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    distlaunch("run", str(write_job(tmp_path, "pass", TWO)), status=0)
    (run,) = (tmp_path / "runs").iterdir()
    note(Submission("17", "job", str(tmp_path / "runs"), time.time() - 60))
    note_begin(run.name, str(run), HERE, Ticket("slurm", "17"))
    for state, told in ("COMPLETED", f"{run.name} had already ended: "), ("CANCELLED", "17: cancelled\n"):
        states = f"[ -e {tmp_path}/asked ] && echo '17|{state}|None' || echo '17|RUNNING|None'"
        program(tmp_path / "squeue", states)
        program(tmp_path / "scancel", f"touch {tmp_path}/asked")
        assert told in distlaunch("stop", "17", status=0).stderr
        (tmp_path / "asked").unlink()


@pytest.mark.parametrize(
    ("command", "shown", "state"),
    [
        ("wait", "echo '17|COMPLETING|None'", "COMPLETING"),
        ("stop", "echo '17|COMPLETING|None'", "COMPLETING"),
        ("wait", "exit 1", "in an unknown state: squeue failed: it exited without a message"),
    ],
)
def test_a_queue_that_keeps_a_job_after_the_end_of_its_run_is_not_waited_for_without_end(
    command: str, shown: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's commands are stand-ins."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(submissions, "TELL_S", 0.0)
    monkeypatch.setattr(submissions, "LEAVE_S", 0.6)
    for name, text in (("squeue", shown), ("scancel", "")):
        program(tmp_path / name, text)
    distlaunch("run", str(write_job(tmp_path, "raise SystemExit(3)", TWO)), status=3)
    (run,) = (tmp_path / "runs").iterdir()
    note(job := Submission("17", "job", str(tmp_path / "runs"), time.time() - 60))
    note_begin(run.name, str(run), HERE, Ticket("slurm", "17"))
    said = list[str]()
    with Interrupts() as interrupts:
        if command == "wait":
            assert [each.id for each, _ in runs_of("17", interrupts, said.append)] == [run.name]
        else:
            assert cancel(job, False, interrupts, said.append) == (None, True)
    still = f"Slurm job 17 is still {state}, although its run has ended"
    waits = "waiting at most 0.01 min for it to leave the queue"
    first = [f"Slurm job 17 is {state}"] if "unknown" in state else []
    assert said == [*first, f"{still}; {waits}", f"{still}; not waiting any longer"]


def test_a_last_task_that_has_just_ended_is_not_taken_for_its_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ID is that of the array. Slurm's commands are stand-ins."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program(tmp_path / "squeue", 'case "$*" in *--states=all*) echo "73_9|73";; esac; echo "73_1|74"')
    program(tmp_path / "scancel", f'echo "$*" >>{tmp_path}/cancelled')
    load("slurm").cancel("73")
    assert (tmp_path / "cancelled").read_text() == "73_9\n"


@pytest.mark.parametrize("setup", ["set -euo pipefail", "set -E; trap 'exit 1' ERR"])
def test_a_strict_setup_does_not_keep_a_killed_distlaunch_from_being_requeued(
    setup: str, tmp_path: Path
) -> None:
    strict = f"{requeueing(tmp_path)}slurm: {{setup: {json.dumps(setup)}}}\n"
    script = run_script(strict, Call(("bash", "-c", KILL)), tmp_path)
    assert script.stdout == "scontrol requeue 17\n"
    assert script.returncode == 137


def test_a_task_of_an_array_is_requeued_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the tasks has the array's ID as its job ID."""
    task = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}
    script = run_script(requeueing(tmp_path), Call(("bash", "-c", KILL)), tmp_path, **task)
    assert script.stdout == "scontrol requeue 17_3\n"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path / "scontrol", f'echo "$*" >>{tmp_path}/asked')
    for job in ("17", "18"):
        load("slurm").requeue(job, task)
    assert (tmp_path / "asked").read_text() == "requeue 17_3\nrequeue 18\n"


def test_reports_a_directory_that_cannot_hold_scripts_and_a_dry_run_writes_none(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("command: ['true']\nlogs: {dir: job.yaml}\n")
    told = distlaunch("submit", str(job), status=1).stderr
    assert f"can't write the batch script to {job}: File exists; set logs.dir" in told
    assert (
        "requests no GPUs; to get some, set gpus_per_node to the number per node; 0 declares a CPU job"
        in told
    )
    job.write_text("command: ['true']\nbackend: nccl\npbs: {select: '2:ngpus=4'}\n")
    assert distlaunch("submit", "--dry-run", str(job), status=0).stderr == ""  # select isn't parsed
    job.write_text("command: ['true']\ngpus_per_node: 0\n")
    assert distlaunch("submit", "--dry-run", str(job), status=0).stderr == ""
    assert list(tmp_path.iterdir()) == [job]


def test_runs_the_setup_first_and_passes_a_job_along_with_the_script(tmp_path: Path) -> None:
    job = "script: train.py\nslurm:\n  setup: |\n    export A=1\n    echo $A\n"
    text = "script: $HOME/`x`\nEND_OF_JOB\nargs: ['it''s']\n"
    done = run_script(job, Call(("cat",), text), tmp_path)
    assert done.stdout == f"1\n{text}", done.stderr
