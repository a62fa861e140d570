"""Reports of a run to others: `notify`, `metrics`, folded lines, and the ID for experiment trackers."""

import json
import os
import re
import shlex
import signal
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.harness import PATIENCE_S, distlaunch, held, line_pipe, open_gate, running, write_job
from tests.process.commands import TWO, run_one

FAILS_ONCE = """
    import os, sys
    print("here", flush=True)
    sys.exit(0 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 3)
"""


def notifying(directory: Path, worker: str, command: str, more: str = "") -> Path:
    return write_job(directory, worker, f"{TWO}notify: {{command: [sh, -c, {json.dumps(command)}]}}\n{more}")


def told(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "told").read_text().splitlines()]


def test_notifies_a_program_of_restarts_and_the_end(tmp_path: Path) -> None:
    command = f"cat >> {shlex.quote(str(tmp_path))}/told"
    job = notifying(tmp_path, FAILS_ONCE, command, "restarts: {max: 1, backoff: 0s}\n")
    distlaunch("run", str(job), status=0)
    restarted, finished = told(tmp_path)
    assert (restarted["event"], restarted["state"], restarted["restarts"]) == ("restarted", "RESTARTING", 1)
    rank = restarted["cause"]["rank"]
    text = f"rank {rank} (node0) failed first: exit status 3"
    known = {"kind": "exit", "certainty": "fact", "rank": rank, "node": "node0", "last_output": ["here"]}
    assert restarted["cause"] == {"text": text, **known}
    assert (finished["event"], finished["state"], finished["exit_status"]) == ("finished", "SUCCEEDED", 0)
    assert finished["run"] == restarted["run"] == Path(finished["directory"]).name


def test_notifies_only_of_the_chosen_events(tmp_path: Path) -> None:
    job = notifying(tmp_path, FAILS_ONCE, f"cat >> {shlex.quote(str(tmp_path))}/told")
    assert distlaunch("run", str(job), "--set", "notify.on=[failed]").returncode == 3
    (failed,) = told(tmp_path)
    assert (failed["event"], failed["cause"]["last_output"]) == ("failed", ["here"])


def test_a_stopped_run_has_finished_and_not_failed(tmp_path: Path) -> None:
    worker = "import signal\nprint('here', flush=True)\nsignal.pause()"
    with running(notifying(tmp_path, worker, f"cat >> {shlex.quote(str(tmp_path))}/told")) as run:
        run.wait_for("here", times=2)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
    (finished,) = told(tmp_path)
    assert (finished["event"], finished["state"]) == ("finished", "CANCELLED")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["./odd"], "odd: Exec format error"),
        (["sh", "-c", "exit 4"], "sh exited with status 4"),
        (["sh", "-c", "kill -9 $$"], "sh was killed by signal 9 (SIGKILL)"),
    ],
)
def test_the_job_continues_when_the_notified_program_fails(
    command: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "odd").write_text("no program")
    (tmp_path / "odd").chmod(0o755)
    job = write_job(tmp_path, "pass", f"{TWO}notify: {{command: {json.dumps(command)}}}\n")
    done = distlaunch("run", str(job), status=0)
    assert done.stderr.count(said) == 1, done.stderr
    left = distlaunch("run", "-d", str(job), cwd=tmp_path, status=0)
    run = left.stdout.strip()
    assert distlaunch("wait", run, cwd=tmp_path).returncode == 0
    assert said in (tmp_path / "runs" / run / "controller.log").read_text()
    assert distlaunch("attach", "--all", run, cwd=tmp_path).stderr.count(said) == 1


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
@pytest.mark.parametrize("options", [[], ["-d"]])
def test_refuses_a_notified_program_that_cannot_be_started(
    command: str, said: str, options: list[str], tmp_path: Path
) -> None:
    job = write_job(tmp_path, "pass", f"notify:\n  command: [{command}]\n")
    done = distlaunch("run", *options, str(job), status=2)
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


def metrics_of(path: Path) -> dict[str, float]:
    """Each sample, without the labels that are the same for all."""
    found = {}
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            found[re.sub(r'job="[^"]*",run="[^"]*",?', "", sample).replace("{}", "")] = float(value)
    return found


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
    began, heard = "run_start_timestamp_seconds", 'rank_last_output_timestamp_seconds{rank="1"}'
    assert after[f"distlaunch_{heard}"] > after[f"distlaunch_{began}"]
    assert after["distlaunch_run_state_since_timestamp_seconds"] > after[f"distlaunch_{began}"]
    assert [path.name for path in tmp_path.glob("job.prom*")] == ["job.prom"]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("pipe", "pipe: it is not a regular file"),
        ("none/job.prom", "none/job.prom: No such file or directory"),
    ],
)
def test_says_once_that_metrics_cannot_be_written(file: str, said: str, tmp_path: Path) -> None:
    """For root also /dev/null could be replaced."""
    os.mkfifo(tmp_path / "pipe")
    done = run_one(tmp_path, "print('here')", f"metrics: {{file: {file}}}\n", status=0)
    assert done.stderr.count(f"metrics.file: can't write {tmp_path}/{said}") == 1
    assert (tmp_path / "pipe").is_fifo()


def test_folds_identical_lines_and_logs_them_for_each_rank(tmp_path: Path) -> None:
    worker = """
        import os
        rank = os.environ["RANK"]
        os.write(1, b"epoch 1\\n" + (b"odd\\n" if rank == "2" else b"") + b"unfinished")
    """
    job = write_job(tmp_path, worker, "nodes: 1\nprocs_per_node: 4\ngpus_per_node: 0\nlogs: {fold: true}\n")
    done = distlaunch("run", str(job), cwd=tmp_path, status=0)
    told = {rank for line in done.stdout.splitlines() if "epoch" in line for rank in ranks_of(line)}
    assert told == {0, 1, 2, 3}
    assert "[node0:2] odd\n" in done.stdout
    (run,) = (tmp_path / "runs").iterdir()
    assert all((run / f"rank{rank}.out").read_bytes().startswith(b"epoch 1\n") for rank in range(4))
    again = distlaunch("logs", "--fold", cwd=tmp_path)
    assert {rank for line in again.stdout.splitlines() if "epoch" in line for rank in ranks_of(line)} == told


def ranks_of(line: str) -> set[int]:
    """`[0-2,5] text` or `[node0:3] text`."""
    tag = line[1:].partition("] ")[0].rpartition(":")[2]
    spans = [[int(number) for number in part.split("-")] for part in tag.split(",")]
    return {rank for span in spans for rank in range(span[0], span[-1] + 1)}


def test_a_trackers_variable_has_the_jobs_id_over_restarts(tmp_path: Path) -> None:
    tells = "import os; print('id', os.environ['DISTLAUNCH_JOB_ID'], os.environ['WANDB_RUN_ID'])\n"
    more = "procs_per_node: 2\nrestarts: {max: 1, backoff: 0s}\nenv: {WANDB_RUN_ID: 'run-{job_id}'}\n"
    done = run_one(tmp_path, tells + dedent(FAILS_ONCE), more, status=0)
    (run,) = (tmp_path / "runs").iterdir()
    assert done.stdout.count(f"id {run.name} run-{run.name}\n") in (3, 4)  # one may be stopped before


@pytest.mark.parametrize("quiet_s", [0.0, 1e6])
def test_a_stop_after_a_long_silence_mentions_why(quiet_s: float, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import distlaunch.observers.recording as recording\nrecording.QUIET_S = {quiet_s}\n"
    )
    job = write_job(tmp_path, "import signal\nprint('here', flush=True)\nsignal.pause()", TWO)
    with running(job, env={**os.environ, "PYTHONPATH": str(tmp_path)}) as run:
        run.wait_for("here", times=2)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
    said = "no rank has printed anything for 0 min; if the job hangs again, run `distlaunch why`"
    assert (said in run.stderr) == (quiet_s == 0.0)
