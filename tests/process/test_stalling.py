"""Ranks that stall, with limits as short as a test can wait for."""

import os
import re
import signal
import sys
from pathlib import Path

from tests.harness import distlaunch, running, write_job

HARDLY_WORKS = """
    import time
    while True:  # as idle torch does: a clock tick now and then
        until = time.process_time() + 0.008
        while time.process_time() < until:
            pass
        time.sleep(0.5)
"""


def test_a_rank_that_wakes_up_now_and_then_counts_as_stalled(tmp_path: Path) -> None:
    job = write_job(tmp_path, HARDLY_WORKS, "gpus_per_node: 0\non_stall: stop\ntimeouts: {stall: 2s}")
    done = distlaunch("run", str(job))
    assert done.returncode == 124
    assert re.search(r"rank 0 \(node0\) stalled for 2 s", done.stderr), done.stderr


WAITS_OR_STEPS = """
    import os, signal, sys
    sys.path.insert(0, os.environ["PLACE"])
    import c10d
    def step():
        signal.pause()
    c10d.all_reduce() if os.environ["RANK"] == "0" else step()
"""


def test_finds_the_culprit_without_py_spy_by_the_stacks_that_python_prints(tmp_path: Path) -> None:
    """A stand-in for torch's collective, in a folder of that name: what counts is the stack."""
    place = tmp_path / "torch" / "distributed"
    place.mkdir(parents=True)
    (place / "c10d.py").write_text("import signal\n\n\ndef all_reduce():\n    signal.pause()\n")
    (tmp_path / "python").symlink_to(os.path.realpath(sys.executable))  # where no py-spy is beside it
    keys = f"python: {tmp_path}/python\nenv: {{PYTHONFAULTHANDLER: 1, PLACE: {place}}}\nprocs_per_node: 2"
    job = write_job(
        tmp_path,
        WAITS_OR_STEPS,
        f"gpus_per_node: 0\non_stall: stop\ntimeouts: {{stall: 3s}}\n{keys}",
    )
    done = distlaunch("run", str(job), env={**os.environ, "PATH": "/usr/bin:/bin"})
    assert done.returncode == 124, done.stderr
    cause = "rank 1 (node0) stalled for 3 s in step (worker.py:6); rank 0 is waiting in a collective"
    assert cause in done.stderr
    assert "SIGABRT" not in done.stderr
    assert "distlaunch: rank 0: stopped by distlaunch" in done.stderr


def test_says_in_one_line_that_it_can_not_get_a_stack(tmp_path: Path) -> None:
    keys = "gpus_per_node: 0\non_stall: warn\ntimeouts: {stall: 1s}\ncommand: [sleep, '1000']\n"
    (tmp_path / "job.yaml").write_text(keys)
    with running(tmp_path / "job.yaml") as run:
        run.wait_for("no stack for rank 0: ")
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
    assert len(re.findall("no stack for rank 0: .+\n", run.stderr)) == 1
    assert all(line.startswith("distlaunch: ") for line in run.stderr.splitlines())
    assert "Stack backtrace" not in run.stderr


def test_reports_a_rank_that_a_signal_has_stopped(tmp_path: Path) -> None:
    worker = """
        import os, signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.environ["RANK"] == "1" and os.kill(os.getpid(), signal.SIGSTOP)
    """
    keys = "gpus_per_node: 0\nprocs_per_node: 2\non_stall: stop\ntimeouts: {stall: 1s, stop: 100ms}"
    done = distlaunch("run", str(write_job(tmp_path, worker, keys)))
    told = r"rank 1 \(node0, pid (\d+): stopped by a signal; `kill -CONT \1` resumes it\)"
    assert re.search(f"stalled: {told}: ", done.stderr), done.stderr
    assert "rank 1 (node0) stalled for 1 s: stopped by a signal" in done.stderr
    assert "rank 1 is blocked in" not in done.stderr
    assert "hint: " not in done.stderr  # distlaunch itself has killed it


def test_nothing_counts_as_stalled_without_a_limit(tmp_path: Path) -> None:
    """With the limit of 1 s that the other tests have, 4 s without output would be told."""
    job = tmp_path / "job.yaml"
    job.write_text("gpus_per_node: 0\ntimeouts: {stall: none}\ncommand: [sleep, '4']\n")
    done = distlaunch("run", str(job))
    assert (done.returncode, "stalled:" in done.stderr) == (0, False), done.stderr
