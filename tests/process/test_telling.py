"""Reports of a run: `notify`, `metrics`, folded lines, the ID for experiment trackers, and observers."""

import json
import os
import re
import shlex
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from distlaunch.agent.messages import WorkerExited
from distlaunch.job.spec import Invocation, JobSpec, Logs, NodeSpec, Program
from distlaunch.launch.controller import supervise
from distlaunch.launch.start import start_run
from distlaunch.observers.observer import Observer, Printed, Shown
from distlaunch.signals import Interrupts
from distlaunch.supervisor.events import Event
from distlaunch.supervisor.state import State
from distlaunch.supervisor.summary import Summary
from tests.harness import PATIENCE_S, distlaunch, held, line_pipe, open_gate, running, write_job
from tests.process.commands import TWO, run_one

FAILS_ONCE = """
    import os, sys
    print("here", flush=True)
    sys.exit(0 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 3)
"""


def notifying(directory: Path, worker: str, command: str = "", more: str = "") -> Path:
    """A job that notifies this command, or else tells a file."""
    command = command or f"cat >> {shlex.quote(str(directory))}/told"
    return write_job(directory, worker, f"{TWO}notify: {{command: [sh, -c, {json.dumps(command)}]}}\n{more}")


def told(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "told").read_text().splitlines()]


def test_notifies_a_program_of_restarts_and_the_end(tmp_path: Path) -> None:
    """Even if it fails."""
    command = f"cat >> {shlex.quote(str(tmp_path))}/told; exit 4"
    job = notifying(tmp_path, FAILS_ONCE, command, "restarts: {max: 1, backoff: 0s}\n")
    assert distlaunch("run", str(job), status=0).stderr.count("sh exited with status 4") == 1
    restarted, finished = told(tmp_path)
    assert (restarted["event"], restarted["state"], restarted["restarts"]) == ("restarted", "RESTARTING", 1)
    rank = restarted["cause"]["rank"]
    known = {"kind": "exit", "certainty": "fact", "rank": rank, "node": "node0", "last_output": ["here"]}
    assert restarted["cause"] == {"text": f"rank {rank} (node0) failed first: exit status 3", **known}
    assert (finished["event"], finished["state"], finished["exit_status"]) == ("finished", "SUCCEEDED", 0)
    assert finished["run"] == restarted["run"] == Path(finished["directory"]).name


def test_notifies_only_of_the_chosen_events(tmp_path: Path) -> None:
    distlaunch("run", str(notifying(tmp_path, FAILS_ONCE)), "--set", "notify.on=[failed]", status=3)
    (failed,) = told(tmp_path)
    assert (failed["event"], failed["cause"]["last_output"]) == ("failed", ["here"])


@pytest.mark.parametrize("quiet_s", [0.0, 1e6])
def test_a_stopped_run_has_finished_and_names_why_after_a_silence(quiet_s: float, tmp_path: Path) -> None:
    text = f"import distlaunch.observers.recording as recording\nrecording.QUIET_S = {quiet_s}\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    job = notifying(tmp_path, "import signal\nprint('here', flush=True)\nsignal.pause()")
    with running(job, env={**os.environ, "PYTHONPATH": str(tmp_path)}) as run:
        run.wait_for("here", times=2)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
    (finished,) = told(tmp_path)
    assert (finished["event"], finished["state"]) == ("finished", "CANCELLED")
    said = "no rank has printed anything for 0 min; if the job hangs again, run `distlaunch why`"
    assert (said in run.stderr) == (quiet_s == 0.0)


def test_the_job_continues_when_the_notified_program_fails(tmp_path: Path) -> None:
    (tmp_path / "odd").write_text("no program")
    (tmp_path / "odd").chmod(0o755)
    job = write_job(tmp_path, "pass", f"{TWO}notify: {{command: [./odd]}}\n")
    failing = {"./odd": "odd: Exec format error", "sh, -c, exit 4": "sh exited with status 4"}
    failing["sh, -c, kill -9 $$"] = "sh was killed by signal 9 (SIGKILL)"
    for command, said in failing.items():
        done = distlaunch("run", str(job), "--set", f"notify.command=[{command}]", status=0)
        assert done.stderr.count(said) == 1, done.stderr
    left = distlaunch("run", "-d", str(job), cwd=tmp_path, status=0).stdout.strip()
    distlaunch("wait", left, cwd=tmp_path, status=0)
    said = "odd: Exec format error"
    assert said in (tmp_path / "runs" / left / "controller.log").read_text()
    assert distlaunch("attach", "--all", left, cwd=tmp_path).stderr.count(said) == 1


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("./nope.sh", "{directory}/nope.sh: No such file or directory"),
        ("nowhere-to-be-found", "nowhere-to-be-found: not found in PATH"),
        ("./worker.py", "{directory}/worker.py: not executable"),
        ("../", "{above}: is a directory"),
        ("~nobody/x", "~nobody is not expanded"),
    ],
)
def test_refuses_a_notified_program_that_cannot_be_started(command: str, said: str, tmp_path: Path) -> None:
    job = write_job(tmp_path, "pass", f"notify:\n  command: [{command}]\n")
    done = distlaunch("run", *(["-d"] if command == "../" else []), str(job), status=2)
    words = said.format(directory=tmp_path, above=tmp_path.parent)
    assert f"{job}:3:13: notify.command[0]: {words}" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.once
def test_kills_a_notified_program_that_hangs_without_waiting_for_it(tmp_path: Path) -> None:
    command = f"echo $$ > {shlex.quote(str(tmp_path))}/pid; sleep 1000 & sleep 1000"
    job = notifying(tmp_path, FAILS_ONCE, command, "restarts: {max: 1, backoff: 0s}\n")
    with line_pipe(tmp_path / "pid") as told_pid, running(job) as run:
        run.wait_for("here", times=3)  # the second attempt runs while the first notice is under way
        pid = int(told_pid())
        with held([pid]) as processes:
            assert run.wait() == 0
            processes.wait_ends([pid], run.began + PATIENCE_S)
    assert "not delivered: restarted, finished" in run.stderr


@pytest.mark.once
def test_delivers_the_end_although_an_earlier_command_hangs(tmp_path: Path) -> None:
    """All earlier notifications wait behind the first."""
    place = shlex.quote(str(tmp_path))
    command = f'read -r x; case $x in *\\"failed\\"*) echo "$x" >> {place}/told;; *) sleep 1000;; esac'
    job = write_job(tmp_path, "raise SystemExit(3)", f"{TWO}restarts: {{max: 2, backoff: 0s}}\n")
    done = distlaunch(
        "run", str(job), "--set", f"notify.command={json.dumps(['sh', '-c', command])}", status=3
    )
    assert [each["event"] for each in told(tmp_path)] == ["failed"]
    assert done.stderr.count("not delivered: restarted, restarted\n") == 1, done.stderr


def test_notifies_once_of_ranks_that_stall_on_several_nodes(tmp_path: Path) -> None:
    job = notifying(tmp_path, "import signal; signal.pause()", "", "on_stall: stop\ntimeouts: {stall: 2s}\n")
    distlaunch("run", str(job), "--set", "nodes=2", status=124)
    stalled, failed = told(tmp_path)
    assert (stalled["event"], stalled["ranks_stalled"], stalled["nodes"]) == (
        "stalled",
        [0, 1, 2, 3],
        ["node0", "node1"],
    )
    assert failed["event"] == "failed"


def metrics_of(path: Path) -> dict[str, float]:
    """Each sample, without the labels that are the same for all."""
    text = re.sub(r'job="[^"]*",run="[^"]*",?', "", path.read_text()).replace("{}", "")
    samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {sample: float(value) for sample, _, value in samples}


def test_writes_metrics_while_it_runs_and_afterwards(tmp_path: Path, gate: Path) -> None:
    worker = "import os; os.write(1, b'here\\n'); open('gate').read(); raise SystemExit(5)"
    job = write_job(tmp_path, worker, f"{TWO}metrics: {{file: job.prom}}\n")
    with running(job) as run:
        run.wait_for("here", times=2)
        meanwhile = metrics_of(tmp_path / "job.prom")
        open_gate(gate)
        assert run.wait() == 5
    after = metrics_of(tmp_path / "job.prom")
    assert (meanwhile['distlaunch_run_state{state="RUNNING"}'], meanwhile["distlaunch_ranks"]) == (1, 2)
    assert (after['distlaunch_run_state{state="FAILED"}'], after["distlaunch_exit_status"]) == (1, 5)
    for later in ('rank_last_output_timestamp_seconds{rank="1"}', "run_state_since_timestamp_seconds"):
        assert after[f"distlaunch_{later}"] > after["distlaunch_run_start_timestamp_seconds"]
    assert [path.name for path in tmp_path.glob("job.prom*")] == ["job.prom"]


@pytest.mark.parametrize(
    ("file", "said"),
    [("pipe", "it is not a regular file"), ("none/job.prom", "No such file or directory")],
)
def test_says_once_that_metrics_cannot_be_written(file: str, said: str, tmp_path: Path) -> None:
    """For root also /dev/null could be replaced."""
    os.mkfifo(tmp_path / "pipe")
    done = run_one(tmp_path, "print('here')", f"metrics: {{file: {file}}}\n", status=0)
    assert done.stderr.count(f"metrics.file: can't replace {tmp_path}/{file}: {said}") == 1
    assert (tmp_path / "pipe").is_fifo()


def test_metrics_are_not_written_to_what_another_user_planted(tmp_path: Path, gate: Path) -> None:
    """The directory may be writable for others: a link in it must not lead to a file of this user's."""
    mine = tmp_path / "mine"
    mine.write_text("kept")
    job = write_job(tmp_path, "print('here', flush=True); open('gate').read()", "metrics: {file: job.prom}\n")
    with running(job) as run:
        run.wait_for("here")
        (tmp_path / f"job.prom.{run.process.pid}").symlink_to(mine)
        open_gate(gate)
        assert run.wait() == 0
    assert mine.read_text() == "kept"
    assert metrics_of(tmp_path / "job.prom")['distlaunch_run_state{state="SUCCEEDED"}'] == 1


@pytest.mark.parametrize(
    ("content", "status"), [("import torch\n", 2), ("", 0), ("# HELP distlaunch_run_state 1 for it.\n", 0)]
)
def test_metrics_replace_only_those_of_an_earlier_run(content: str, status: int, tmp_path: Path) -> None:
    job, file = write_job(tmp_path, "pass", "metrics: {file: job.prom}\n"), tmp_path / "job.prom"
    file.write_text(content)
    done = distlaunch("run", str(job), status=status)
    assert (f"{job}:2:17: metrics.file: {file} already exists and isn't" in done.stderr) == bool(status)
    assert (file.read_text() == content) == bool(status)


def ranks_of(output: str) -> set[int]:
    """Of the lines of an epoch, as in `[0-2,5] epoch` or `[node0:3] epoch`."""
    parts = (part for tag in re.findall(r"(?m)^\[(?:node0:)?(.+)\] epoch", output) for part in tag.split(","))
    spans = [[int(number) for number in part.split("-")] for part in parts]
    return {rank for span in spans for rank in range(span[0], span[-1] + 1)}


def test_folds_identical_lines_and_logs_them_for_each_rank(tmp_path: Path) -> None:
    worker = """
        import os
        rank = os.environ["RANK"]
        os.write(1, b"epoch 1\\n" + (b"odd\\n" if rank == "2" else b"") + b"unfinished")
    """
    done = run_one(tmp_path, worker, "procs_per_node: 4\nlogs: {fold: true}\n", cwd=tmp_path, status=0)
    assert ranks_of(done.stdout) == {0, 1, 2, 3}
    assert "[node0:2] odd\n" in done.stdout
    (run,) = (tmp_path / "runs").iterdir()
    assert all((run / f"rank{rank}.out").read_bytes().startswith(b"epoch 1\n") for rank in range(4))
    assert ranks_of(distlaunch("logs", "--fold", cwd=tmp_path).stdout) == {0, 1, 2, 3}


def test_a_trackers_variable_has_the_jobs_id_over_restarts(tmp_path: Path) -> None:
    tells = "import os; print('id', os.environ['DISTLAUNCH_JOB_ID'], os.environ['WANDB_RUN_ID'])\n"
    more = "procs_per_node: 2\nrestarts: {max: 1, backoff: 0s}\nenv: {WANDB_RUN_ID: 'run-{job_id}'}\n"
    done = run_one(tmp_path, tells + dedent(FAILS_ONCE), more, status=0)
    (run,) = (tmp_path / "runs").iterdir()
    assert done.stdout.count(f"id {run.name} run-{run.name}\n") in (3, 4)  # one may be stopped before


# Observers in a program


def run_job(directory: Path, script: str, *observers: Observer, given: Interrupts | None = None) -> Summary:
    """A run inside a program, whose signal handlers and standard streams stay as they are."""
    program = Program("command", ("sh",), workdir=str(directory), args=("-c", script))
    nodes, logs = (NodeSpec("here", gpus=0, procs=2),), Logs(str(directory / "runs"))
    spec = JobSpec("toy", nodes, program, logs, invocation=Invocation(placeholders=False))
    with nullcontext(given) if given else Interrupts() as received:
        return supervise(start_run(spec), Shown(received), observers)


# A toy observer: all that one needs


class Metrics(Observer):
    """Counts lines, and when each rank ended: what a live view or an exporter would want."""

    def __init__(self) -> None:
        self.lines, self.ends, self.exit_status = 0, dict[int, float](), -1

    def printed(self, output: Printed) -> None:
        self.lines += output.data.count(b"\n")

    def happened(self, event: Event, state: State, at: float) -> None:
        if isinstance(event, WorkerExited):
            self.ends[state.rank_of(event.node, event.local_rank) or 0] = at

    def ended(self, summary: Summary) -> None:
        self.exit_status = summary.state.outcome


def test_a_small_observer_sees_a_run(tmp_path: Path) -> None:
    metrics = Metrics()
    summary = run_job(tmp_path, 'echo one; echo two; exit "$((RANK * 3))"', metrics)
    assert (metrics.lines, set(metrics.ends)) == (4, {0, 1})
    assert all(0.0 < at <= summary.seconds for at in metrics.ends.values())
    assert metrics.exit_status == summary.state.outcome == 3


# The entry for programs: nothing of the process is touched


@pytest.fixture
def untouched() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    assert handlers == {number: signal.getsignal(number) for number in handlers}


@pytest.mark.usefixtures("untouched")
def test_programs_run_jobs_in_threads_and_in_turn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcomes: dict[int, int] = {}

    def run(number: int) -> None:
        directory = tmp_path / str(number)
        directory.mkdir()
        outcomes[number] = run_job(directory, f"echo said; exit {number}").state.outcome

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, (3, 4)))
    run(5)
    assert outcomes == {3: 3, 4: 4, 5: 5}
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("untouched")
def test_a_program_ends_a_job_by_an_interrupt(tmp_path: Path) -> None:
    class EndOnFirstLine(Observer):
        def printed(self, output: Printed) -> None:
            interrupts.send(signal.SIGTERM)

    with Interrupts() as interrupts:
        script = "echo ready; exec sleep 600"
        summary = run_job(tmp_path, script, EndOnFirstLine(), given=interrupts)
    assert summary.state.outcome == 128 + signal.SIGTERM
