"""Output and ends of `distlaunch torchrun`, next to torchrun."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.harness import on_time, wait_gone
from tests.process.torchruns import (
    BOTH,
    CATCHES,
    NEEDS_TORCH,
    OURS,
    OUTPUTS,
    PRINT,
    STUBBORN,
    WAITING,
    Torchruns,
    assert_fine,
    both,
    going,
    logs_of,
    our_lines,
    ours,
    script,
    scripts,
)

pytestmark = NEEDS_TORCH

# Output


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_goes_where_torchrun_puts_it(tmp_path: Path, torchruns: Torchruns, name: str) -> None:
    script(tmp_path, PRINT)
    theirs = torchruns(name)
    mine = ours(tmp_path, *OUTPUTS[name], "--nproc-per-node=3", "--log-dir=logs", "worker.py")
    assert (theirs.status, mine.returncode) == (0, 0), mine.stderr
    assert lines_of_ranks(mine.stdout) == lines_of_ranks(theirs.stdout)
    assert lines_of_ranks(mine.stderr) == lines_of_ranks(theirs.stderr)
    assert logs_of(tmp_path) == logs_of(theirs.folder)


def lines_of_ranks(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if re.search(r"(out|err) \d+$", line))


def test_maps_reach_local_ranks_above_9(tmp_path: Path) -> None:
    """torchrun refuses them."""
    script(tmp_path, PRINT)
    done = ours(tmp_path, "-r=10:3,9:1", "-t=11:1", "--nproc-per-node=12", "--log-dir=logs", "worker.py")
    assert_fine(done)
    expected = {f"out {rank}" for rank in range(9)} | {"[default11]:out 11"}
    assert set(lines_of_ranks(done.stdout)) == expected
    assert set(lines_of_ranks(done.stderr)) == {f"err {rank}" for rank in (*range(10), 11)}
    assert logs_of(tmp_path) == {
        ("attempt_0/9/stdout.log", "out 9\n"),
        ("attempt_0/10/stdout.log", "out 10\n"),
        ("attempt_0/10/stderr.log", "err 10\n"),
        ("attempt_0/11/stdout.log", "out 11\n"),
    }


def test_prefixes_lines_by_the_template(tmp_path: Path) -> None:
    script(tmp_path, PRINT)
    template = "--log-line-prefix-template=<${role_name}/${local_rank}/${rank}/$other> "
    done = ours(tmp_path, template, "--tee=1", "--role=trainer", "--log-dir=logs", "worker.py")
    assert_fine(done)
    assert done.stdout == "<trainer/0/0/$other> out 0\n"


def test_does_not_join_unfinished_lines_of_ranks(tmp_path: Path) -> None:
    """torchrun glues a line that lacks its end to the next rank's."""
    script(tmp_path, "import sys; sys.stdout.write('no end')")
    done = ours(tmp_path, "--tee=1", "--nproc-per-node=2", "--log-dir=logs", "worker.py")
    assert sorted(done.stdout.splitlines()) == ["[default0]:no end", "[default1]:no end"]
    assert {text for _, text in logs_of(tmp_path)} == {"no end"}


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path) -> None:
    """torchrun leaves a folder there, each time."""
    script(tmp_path, PRINT)
    assert_fine(ours(tmp_path, "--nproc-per-node=2", "worker.py"))
    assert_fine(ours(tmp_path, "--log-dir=/dev/null", "--tee=3", "worker.py"))
    assert list((tmp_path / "tmp").iterdir()) == []


def test_reports_in_one_line_a_log_directory_that_is_a_file(tmp_path: Path) -> None:
    script(tmp_path, PRINT)
    done = ours(tmp_path, "--log-dir=worker.py", "worker.py")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)


# Ends


def test_ends_with_the_status_of_the_worker(tmp_path: Path) -> None:
    scripts(tmp_path, "import os, signal, sys\nif os.environ['RANK'] == '1': sys.exit(7)\nsignal.pause()")
    theirs, mine = both(tmp_path, "--nproc-per-node=2", "worker.py")
    assert (theirs.process.returncode, mine.process.returncode) == (1, 7)
    assert "Traceback" not in mine.stderr


@pytest.mark.parametrize("more", [[], ["--max-restarts=3"]])
def test_names_a_missing_script_in_one_line(tmp_path: Path, more: list[str]) -> None:
    """Python would end with 2 in every worker, which is what a mistake on the command line has."""
    done = ours(tmp_path, *more, "--nproc-per-node=2", "nosuch.py")
    assert done.returncode == 127
    assert our_lines(done)[0].endswith("could not be started: nosuch.py: No such file or directory")
    assert "can't open file" not in done.stderr


def test_a_script_on_stdin_a_directory_and_a_status_of_2_are_no_missing_files(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text("print('main')")
    assert ours(tmp_path, "package").stdout == "main\n"
    assert ours(tmp_path, "--", "-").returncode == 0
    script(tmp_path, "raise SystemExit(2)")
    assert ours(tmp_path, "worker.py").returncode == 2


def test_ends_with_128_and_the_signal_of_a_killed_worker(tmp_path: Path) -> None:
    script(tmp_path, WAITING)
    with going(OURS, tmp_path, "--nproc-per-node=2", "worker.py") as run:
        pids = run.wait_ready(2)
        os.kill(pids[1], signal.SIGKILL)
        assert run.wait() == 137
    assert wait_gone(list(pids.values()), 0.0) < 1
    assert "rank 1 " in our_lines(run)[0]
    assert "SIGKILL" in our_lines(run)[0]
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_launcher_stops_the_ranks(tmp_path: Path, signum: int, status: int) -> None:
    script(tmp_path, WAITING)
    with going(OURS, tmp_path, "--nproc-per-node=2", "worker.py") as run:
        pids = run.wait_ready(2)
        run.process.send_signal(signum)
        assert run.wait() == status
    wait_gone(list(pids.values()), 1.0)
    first, cause, *_, others, last = our_lines(run)
    name = signal.Signals(signum).name
    assert first.startswith(f"distlaunch: received {name}: waiting up to 30 s for 2 ranks to exit")
    assert cause == f"distlaunch: stopped by {name}"
    assert others == "distlaunch: ranks 0-1: stopped by distlaunch"
    assert f"exit status {status}" in last
    assert "/distlaunch/" not in run.stderr  # no traceback of ours
    workers_own = "KeyboardInterrupt" in run.stderr
    assert workers_own == (signum == signal.SIGINT)
    assert workers_own or len(run.stderr.splitlines()) == 4


@pytest.mark.parametrize("launcher", BOTH)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_signals_reach_the_workers(launcher: list[str], name: str, tmp_path: Path) -> None:
    """The launcher's signal is what workers get, SIGUSR1 only because it is asked for."""
    script(tmp_path, CATCHES)
    listed = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"
    with going(launcher, tmp_path, "--nproc-per-node=2", listed, "worker.py") as run:
        run.wait_ready(2)
        run.process.send_signal(signal.Signals[name])
        status = run.wait()
        assert run.stdout.count(f"got {name}\n") == 2
    if launcher is OURS:
        assert status == 128 + signal.Signals[name]


def test_a_signal_that_is_not_listed_reaches_the_workers_as_sigterm(tmp_path: Path) -> None:
    script(tmp_path, CATCHES)
    with going(OURS, tmp_path, "--signals-to-handle=SIGUSR1", "worker.py") as run:
        run.wait_ready(1)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert run.stdout.endswith("got SIGTERM\n")


@pytest.mark.parametrize(("fails", "status"), [(False, 143), (True, 137)], ids=["stopped", "a rank fails"])
def test_stubborn_workers_have_the_shutdown_timeout(tmp_path: Path, fails: bool, status: int) -> None:
    """After a failure torchrun gives the others 30 s, whatever is asked for."""
    script(tmp_path, STUBBORN)
    with going(OURS, tmp_path, "--nproc-per-node=2", "--shutdown-timeout=2", "worker.py") as run:
        pids = run.wait_ready(2)
        began = time.monotonic()
        os.kill(pids[0], signal.SIGKILL) if fails else run.process.terminate()
        assert run.wait() == status
        took_s = time.monotonic() - began
    wait_gone(list(pids.values()), 0.0)
    assert took_s >= 2
    on_time("all ended", took_s, 3.0)


def test_workers_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    script(tmp_path, WAITING)
    with going(OURS, tmp_path, "--nproc-per-node=2", "--log-dir=runs", "worker.py") as run:
        pids = run.wait_ready(2)
        run.process.kill()
        run.wait()
        wait_gone(list(pids.values()), 5.0)


def test_shows_its_help(tmp_path: Path) -> None:
    done = ours(tmp_path, "--nproc-per-node", "2", "-h")
    assert_fine(done)
    assert "--shutdown-timeout" in done.stdout
    with going(OURS, tmp_path, "-h") as run:
        assert run.process.stdout
        run.process.stdout.close()
        run.wait()
        assert "Traceback" not in run.stderr
