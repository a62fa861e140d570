"""`distlaunch torchrun` next to torchrun: its workers, their output, how it ends, and how fast it is.

What PyTorch's own launcher tests hold (test/distributed/launcher) is here and in test_torchrun_scripts.py, in
our words. Left out:

* test_launch_shutdown, test_launch_elastic_agent_raise_exception, the tests of `launch_agent`,
  `elastic_launch` and the rendezvous handler: they mock parts of torch's agent; there is none here.
* test_launch_function and the like: functions are `torch.distributed.launcher.api`'s, not the command line's.
* what needs an etcd server: etcd is handed over to torch as --nnodes MIN:MAX is, and that is tested.
* test_nproc_gpu_launch_configurations, test_nproc_xpu_launch_configurations: they mock GPUs; with given
  numbers of GPUs tests/unit/test_torchrun_flags.py has them.
* test_virtual_local_rank compiles on two GPUs; here the variables are compared.
* test_script_local_rank: torch.distributed.launch is another command.
* test_run_supervisor: its backend was never released.
* spellings of flags, plug-ins for logs, variables as defaults: tests/unit/test_torchrun_flags.py has them.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness import on_time, wait_gone, within
from tests.process.commands import STUBBORN
from tests.process.torchruns import (
    BOTH,
    CATCHES,
    NEEDS_TORCH,
    OURS,
    OUTPUTS,
    PRINT,
    TORCHRUN,
    Torchruns,
    as_reference,
    assert_fine,
    going,
    launch,
    logs_of,
    our_lines,
    ours,
    script,
)

pytestmark = NEEDS_TORCH

# Workers


@pytest.mark.parametrize("word", ["auto", "cpu"])
def test_starts_a_worker_for_each_core_that_torch_counts(tmp_path: Path, word: str) -> None:
    count = "import torch; print(torch._utils.cpu_count())"
    cores = int(launch([sys.executable, "-c"], tmp_path, count).stdout)
    done = ours(tmp_path, f"--nproc-per-node={word}", "--no-python", "sh", "-c", "echo $RANK")
    assert_fine(done)
    assert {int(rank) for rank in done.stdout.split()} == set(range(cores))


ELASTIC = ("--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=9")


@pytest.mark.parametrize(
    ("does", "status"), [("open(os.environ['RANK'], 'w')", 0), ("raise RuntimeError('as asked')", 1)]
)
def test_hands_over_to_torch_what_only_its_agent_can_do(tmp_path: Path, does: str, status: int) -> None:
    script(tmp_path, f"import os\n{does}")
    store = (f"--rdzv-endpoint={tmp_path}/store", "--rdzv-conf=last_call_timeout=1,store_type=file")
    done = ours(tmp_path, "--nnodes=1:2", *ELASTIC, *store, "worker.py")
    made = {path.name for path in tmp_path.glob("[01]")}
    assert (done.returncode, made) == (status, set() if status else {"0", "1"}), done.stderr
    (line,) = our_lines(done)
    assert "needs torch's elastic agent; handing over" in line
    assert line.endswith("-m torch.distributed.run")
    assert ("ChildFailedError" in done.stderr) == bool(status)


@pytest.mark.parametrize("nodes", ["1:2", "2"])
def test_names_a_missing_interpreter_in_one_line(tmp_path: Path, nodes: str) -> None:
    done = ours(tmp_path, f"--nnodes={nodes}", *ELASTIC, "worker.py", PYTHON_EXEC="/nowhere/python")
    line = "distlaunch: PYTHON_EXEC: /nowhere/python: No such file or directory"
    assert (done.returncode, our_lines(done)) == (127, [line])
    assert "Traceback" not in done.stderr


# Output


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_goes_where_torchrun_puts_it(tmp_path: Path, torchruns: Torchruns, name: str) -> None:
    theirs, mine = torchruns(name), as_reference(tmp_path, name)
    assert (theirs.status, mine.returncode) == (0, 0), mine.stderr
    assert lines_of_ranks(mine.stdout) == lines_of_ranks(theirs.stdout)
    assert lines_of_ranks(mine.stderr) == lines_of_ranks(theirs.stderr)
    assert logs_of(tmp_path) == logs_of(theirs.directory)


def lines_of_ranks(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if re.search(r"(out|err) \d+$", line))


def test_prefixes_lines_by_the_template_and_joins_no_unfinished_ones(tmp_path: Path) -> None:
    """torchrun glues a line that lacks its end to the next rank's."""
    script(tmp_path, "import sys; sys.stdout.write('no end')")
    template = "--log-line-prefix-template=<${role_name}/${local_rank}/${rank}/$other> "
    flags = (template, "--tee=1", "--role=trainer", "--nproc-per-node=2", "--log-dir=logs")
    done = ours(tmp_path, *flags, "worker.py")
    assert_fine(done)
    assert sorted(done.stdout.splitlines()) == [f"<trainer/{rank}/{rank}/$other> no end" for rank in (0, 1)]
    assert {text for _, text in logs_of(tmp_path)} == {"no end"}


def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path) -> None:
    """torchrun leaves a directory there, each time."""
    script(tmp_path, PRINT)
    assert_fine(ours(tmp_path, "--nproc-per-node=2", "worker.py"))
    assert_fine(ours(tmp_path, "--log-dir=/dev/null", "--tee=3", "worker.py"))
    assert list((tmp_path / "tmp").iterdir()) == []


# Ends


def test_a_script_on_stdin_a_directory_and_a_status_of_2_are_not_missing_files(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text("print('main')")
    assert ours(tmp_path, "package").stdout == "main\n"
    assert ours(tmp_path, "--", "-").returncode == 0
    script(tmp_path, "raise SystemExit(2)")
    assert ours(tmp_path, "worker.py").returncode == 2


@pytest.mark.parametrize("launcher", BOTH)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_signals_reach_the_workers(launcher: list[str], name: str, tmp_path: Path) -> None:
    """The launcher's signal is what workers get, SIGUSR1 only because it is asked for."""
    script(tmp_path, CATCHES)
    listed = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGUSR1"
    with going(launcher, tmp_path, "--nproc-per-node=2", listed, "worker.py") as run:
        pids = run.wait_ready(2)
        run.process.send_signal(signal.Signals[name])
        status = run.wait()
        assert run.stdout.count(f"got {name}\n") == 2
    if launcher is OURS:
        wait_gone(list(pids.values()), 0.0)
        assert status == 128 + signal.Signals[name]
        first, cause, *_, last = our_lines(run)
        assert first.startswith(f"distlaunch: received {name}: waiting up to 30 s for 2 ranks to exit")
        assert cause == f"distlaunch: stopped by {name}"
        assert f"exit status {status}" in last
        assert "Traceback" not in run.stderr


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
    assert ("rank 0 " in our_lines(run)[0] and "SIGKILL" in our_lines(run)[0]) == fails
    assert "Traceback" not in run.stderr
    assert took_s >= 2
    on_time("all ended", took_s, 3.0)


def test_a_reader_that_leaves_the_help_is_not_an_error(tmp_path: Path) -> None:
    with going(OURS, tmp_path, "-h") as run:
        assert run.process.stdout
        run.process.stdout.close()
        run.wait()
        assert "Traceback" not in run.stderr


# How fast it is, and scripts that others wrote


def seconds(launcher: list[str], directory: Path) -> float:
    began = time.monotonic()
    done = launch(launcher, directory, "--nproc-per-node=4", "--no-python", "true")
    assert done.returncode == 0, done.stderr
    return time.monotonic() - began


@pytest.mark.quiet
def test_it_starts_ten_times_faster_than_torchrun(tmp_path: Path, record_property: Any) -> None:
    """In pairs, of which the best of each counts: what else the machine does only adds to it."""
    pairs = [(seconds(TORCHRUN, tmp_path), seconds(OURS, tmp_path)) for _ in range(2)]
    theirs, mine = (min(column) for column in zip(*pairs, strict=True))
    record_property("seconds", [theirs, mine])
    within(f"a tenth of torchrun's {theirs:.3f} s", mine, theirs / 10, "s")


def test_accelerates_own_tests_print_the_same(tmp_path: Path) -> None:
    """test_ops takes the CPU only from a state that was made for it before."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    text = """
        import runpy
        from accelerate import PartialState
        PartialState(cpu=True)
        runpy.run_module("accelerate.test_utils.scripts.test_ops", run_name="__main__")
    """
    kept = {}
    for name, launcher in zip(("torchrun", "ours"), BOTH, strict=True):
        script(tmp_path / name, text)
        flags = ("--nproc-per-node=2", "--redirects=1", "--log-dir=logs")
        done = launch(launcher, tmp_path / name, *flags, "worker.py", ACCELERATE_USE_CPU="true")
        assert done.returncode == 0, done.stderr
        kept[name] = {(path, said) for path, said in logs_of(tmp_path / name) if said}
    assert kept["ours"] == kept["torchrun"]
    said = dict(kept["ours"])["attempt_0/0/stdout.log"]
    assert "Num processes: 2" in said
