"""`distlaunch torchrun` next to torchrun: its workers, their streams, how it ends, and how fast it is.

What PyTorch's own launcher tests hold (test/distributed/launcher) is here, in our words. Left out:

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

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness import PATIENCE_S, descendants_of, distlaunch_argv, on_time, wait_gone, within
from tests.process.commands import STUBBORN, sleeper
from tests.process.test_view import plain, seen
from tests.process.torchruns import (
    BOTH,
    C10D,
    CONTRACTS,
    MADE_UP,
    MAY_DIFFER,
    NEEDS_TORCH,
    OURS,
    OUTPUTS,
    PRINT,
    TORCHRUN,
    Torchruns,
    as_reference,
    assert_fine,
    environment,
    going,
    launch,
    logs_of,
    our_lines,
    ours,
    script,
)

pytestmark = NEEDS_TORCH

# Workers


def test_starts_a_worker_for_each_core_that_torch_counts(tmp_path: Path) -> None:
    count = "import torch; print(torch._utils.cpu_count())"
    cores = int(launch([sys.executable, "-c"], tmp_path, count).stdout)
    for word in ("auto", "cpu"):
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


def test_names_a_missing_interpreter_in_one_line(tmp_path: Path) -> None:
    line = "distlaunch: PYTHON_EXEC: /nowhere/python: No such file or directory"
    for nodes in ("1:2", "2"):
        done = ours(tmp_path, f"--nnodes={nodes}", *ELASTIC, "worker.py", PYTHON_EXEC="/nowhere/python")
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


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_signals_reach_the_workers(name: str, tmp_path: Path) -> None:
    """As under torchrun, the launcher's signal is what workers get, SIGUSR1 only because it is asked for."""
    catches = """
        import os, signal, sys
        def leave(signum, frame):
            os.write(1, f"got {signal.Signals(signum).name}\\n".encode())
            sys.exit(0)
        for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
            signal.signal(getattr(signal, name), leave)
    """
    script(tmp_path, sleeper(catches))
    listed, status = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGUSR1", 128 + signal.Signals[name]
    with going(OURS, tmp_path, "--nproc-per-node=2", listed, "worker.py") as run:
        pids = run.wait_ready(2)
        run.process.send_signal(signal.Signals[name])
        assert run.wait() == status
        assert run.stdout.count(f"got {name}\n") == 2
    wait_gone(list(pids.values()), 0.0)
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


# How fast it is


@pytest.mark.quiet
def test_it_starts_ten_times_faster_than_torchrun(tmp_path: Path, record_property: Any) -> None:
    """In pairs, of which the best of each counts: what else the machine does only adds to it."""

    def seconds(launcher: list[str]) -> float:
        began = time.monotonic()
        done = launch(launcher, tmp_path, "--nproc-per-node=4", "--no-python", "true")
        assert done.returncode == 0, done.stderr
        return time.monotonic() - began

    pairs = [(seconds(TORCHRUN), seconds(OURS)) for _ in range(2)]
    theirs, mine = (min(column) for column in zip(*pairs, strict=True))
    record_property("seconds", [theirs, mine])
    within(f"a tenth of torchrun's {theirs:.3f} s", mine, theirs / 10, "s")


# The environment and streams of workers, and restarts


OF_THE_CALLER = {"TMPDIR", "PWD", "OLDPWD", "XDG_CACHE_HOME", "XDG_STATE_HOME"}


def differing(theirs: dict[str, str], mine: dict[str, str]) -> set[str]:
    names = {name for name in {*theirs, *mine} if theirs.get(name) != mine.get(name)}
    return {name for name in names - OF_THE_CALLER if not name.startswith("PYTEST_")}


@pytest.mark.parametrize("name", [*CONTRACTS, *C10D, *MADE_UP])
def test_workers_get_what_torchrun_gives(tmp_path: Path, torchruns: Torchruns, name: str) -> None:
    """But for what each makes up. Nothing is elastic with one node and c10d, and nothing is said."""
    there, here = torchruns(name), tmp_path / "ours"
    done = as_reference(here, name, there.port)
    assert (there.status, done.returncode) == (0, 0), there.stderr + done.stderr
    assert our_lines(done) == []
    made_up = {"MASTER_ADDR", "MASTER_PORT"} if name not in CONTRACTS else set()
    made_up |= {"TORCHELASTIC_RUN_ID"} if name in MADE_UP else set()
    ranks = sorted(path.name for path in here.glob("[01]"))
    assert ranks == sorted(path.name for path in there.directory.glob("[01]")) != []
    for rank in ranks:
        theirs, mine = (json.loads((place / rank).read_text()) for place in (there.directory, here))
        env, own = theirs.pop("env"), mine.pop("env")
        assert differing(env, own) <= MAY_DIFFER | made_up
        assert (theirs.pop("directory"), mine.pop("directory")) == (str(there.directory), str(here))
        if name == "run-path":  # torchrun runs it in a forkserver's child: not -u, no session
            for key in ("unbuffered", "leads its session"):
                assert (theirs.pop(key), mine.pop(key)) == (False, True)
        assert mine == theirs
        if name in C10D:  # the endpoint is that of the agents' own store
            assert str(there.port) not in (env["MASTER_PORT"], own["MASTER_PORT"])
            assert env["MASTER_ADDR"] == own["MASTER_ADDR"] or name != "an address"
        if name in MADE_UP:
            assert (env["MASTER_ADDR"], own["MASTER_ADDR"]) == ("localhost", "127.0.0.1")
            assert "none" not in (env["TORCHELASTIC_RUN_ID"], own["TORCHELASTIC_RUN_ID"])


def test_one_node_with_c10d_needs_no_free_endpoint(tmp_path: Path) -> None:
    """Two jobs of the common line at once, with the endpoint of both taken by a stranger."""
    meet = """
        import os, socket, time
        end = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if os.environ["RANK"] == "0":
            socket.create_server(end).accept()
        else:
            while socket.socket().connect_ex(end):
                time.sleep(0.05)
        os.write(1, b"met\\n")
    """
    script(tmp_path, meet)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        words = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{stranger.getsockname()[1]}")
        flags = (*words, "--nproc-per-node=2", "worker.py")
        with going(OURS, tmp_path, *flags) as first, going(OURS, tmp_path, *flags) as second:
            for run in (first, second):
                assert (run.wait(), run.stdout) == (0, "met\n" * 2), run.stderr


@contextlib.contextmanager
def typed(kind: str, directory: Path) -> Iterator[int]:
    """A descriptor with `typed` to read and then its end, by now nobody's to write to."""
    if kind == "file":
        (directory / "input").write_text("read before\ntyped")
        with (directory / "input").open("rb", buffering=0) as file:
            file.readline()
            yield file.fileno()
        return
    read, write = os.pipe() if kind == "pipe" else (end.detach() for end in socket.socketpair())
    os.write(write, b"typed")
    os.close(write)
    with os.fdopen(read, "rb"):
        yield read


@pytest.mark.parametrize(
    ("launcher", "kind"), [(TORCHRUN, "pipe"), (OURS, "pipe"), (OURS, "file"), (OURS, "socket")]
)
def test_workers_share_the_callers_stdin(launcher: list[str], kind: str, tmp_path: Path) -> None:
    """The very same: who reads a part takes it from the others, and from the next restart."""
    script(tmp_path, "import os, sys; os.write(1, b'%r\\n' % sys.stdin.read())")
    with typed(kind, tmp_path) as stdin:
        done = launch(launcher, tmp_path, "--nproc-per-node=2", "worker.py", stdin=stdin)
    assert sorted(done.stdout.splitlines()) == ["''", "'typed'"], done.stderr


def test_workers_see_the_terminal_and_the_debugger_works_there(tmp_path: Path) -> None:
    """As under torchrun, but for stderr, whose last lines are the cause of a failure."""
    tells = "import os\nprint(*map(os.isatty, range(3)))"
    script(tmp_path, f"{tells}\nsecret = 6 * 7\nbreakpoint()\nprint('went on')")
    with seen(tmp_path, "worker.py", argv=OURS, env=environment(tmp_path)) as shown:
        shown.press(b"secret\n")
        shown.wait_for(r"42\s+\(Pdb\) ")
        shown.press(b"continue\n")
        assert shown.ended() == 0
        text = plain(shown.written)
    assert "True True False" in text
    assert text.endswith("went on\r\n")


def test_without_stdin_there_is_nothing_to_read(tmp_path: Path) -> None:
    script(tmp_path, "import sys; print(repr(sys.stdin.read()))")
    done = launch(["sh", "-c", 'exec "$@" <&-', "sh", *OURS], tmp_path, "worker.py")
    assert (done.returncode, done.stdout) == (0, "''\n"), done.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_workers_print_is_whole_for_a_slow_reader(stream: str, tmp_path: Path) -> None:
    """Lines that were written at once are not torn, and none is lost: nothing else keeps them."""
    says = f"""
        import os, sys
        for number in range(20000):
            line = f"rank {{os.environ['RANK']}} line {{number}} {{'.' * 80}}\\n"
            os.write(sys.{stream}.fileno(), line.encode())
    """
    script(tmp_path, says)
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    streams[stream] = subprocess.PIPE
    argv = [*OURS, "--nproc-per-node=2", "worker.py"]
    with subprocess.Popen(argv, cwd=tmp_path, env=environment(tmp_path), **streams) as process:
        pipe = process.stdout or process.stderr
        assert pipe is not None
        # Nobody reads until a worker can't write any more, and for longer than the end waits for readers.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(7.0)
        lines = pipe.read().decode().splitlines()
        assert process.wait(PATIENCE_S) == 0
    told = [re.fullmatch(r"rank ([01]) line (\d+) \.{80}", line) for line in lines]
    assert all(told)
    for rank in "01":
        assert [int(line[2]) for line in told if line and line[1] == rank] == list(range(20000))


def test_an_interrupt_ends_the_wait_for_a_slow_reader(tmp_path: Path) -> None:
    script(tmp_path, "import os; os.write(2, b'.' * 1000000); os.write(1, b'ready\\n')")
    argv, pipe = [*OURS, "worker.py"], subprocess.PIPE
    with subprocess.Popen(argv, cwd=tmp_path, env=environment(tmp_path), stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_gone(descendants_of(process.pid), PATIENCE_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) in (0, 130)


@pytest.mark.parametrize("argv", [OURS, distlaunch_argv("run", "-n", "1")], ids=["torchrun", "run"])
def test_an_interrupt_ends_the_wait_for_a_reader_that_reads_on_slowly(
    argv: list[str], tmp_path: Path
) -> None:
    lines = 40_000
    script(tmp_path, f"for _ in range({lines}): print('.' * 99)")
    words: dict[str, Any] = {"cwd": tmp_path, "env": environment(tmp_path), "stdout": subprocess.PIPE}
    with subprocess.Popen([*argv, "worker.py"], **words) as process:
        assert process.stdout is not None
        pieces = iter(partial(os.read, process.stdout.fileno(), 4096), b"")
        next(pieces)
        for _ in pieces:
            time.sleep(0.01)  # the reader's slowness
            if not descendants_of(process.pid):
                break
        process.send_signal(signal.SIGINT)
        rest = 0
        for piece in pieces:
            time.sleep(0.01)
            rest += len(piece)
        assert process.wait(PATIENCE_S) == 0
        assert rest < lines * 50


def test_reports_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    gone = "distlaunch: the current directory no longer exists: cd to one that does\n"
    for words in ("torchrun /worker.py", "ps", "logs", "stop", "dry-run -"):
        (tmp_path / "gone").mkdir()
        argv = ["sh", "-c", 'cd gone && rmdir ../gone && exec "$@"', "sh", *OURS[:-1]]
        done = launch(argv, tmp_path, *words.split())
        assert (done.returncode, done.stderr) == (2, gone)


def test_reports_the_root_cause_that_the_record_decorator_left(tmp_path: Path, torchruns: Torchruns) -> None:
    theirs, mine = torchruns("record"), as_reference(tmp_path, "record")
    assert (theirs.status, mine.returncode) == (1, 1)
    assert "ValueError: the root cause" in theirs.stderr
    assert re.search(r"(?m)^distlaunch: rank 1 .*failed first", mine.stderr)
    assert "distlaunch:   | ValueError: the root cause" in mine.stderr.splitlines()
    assert "SIGTERM" not in mine.stderr


@pytest.mark.parametrize("launcher", BOTH, ids=["torchrun", "ours"])
def test_the_launchers_own_error_file_gets_the_first_failure(launcher: list[str], tmp_path: Path) -> None:
    fails = """
        import json, os, sys
        message = {"message": "the root cause", "extraInfo": {"py_callstack": "", "timestamp": "1"}}
        json.dump({"message": message}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
        sys.exit(3)
    """
    script(tmp_path, fails)
    own = tmp_path / "error.json"
    assert launch(launcher, tmp_path, "worker.py", TORCHELASTIC_ERROR_FILE=str(own)).returncode
    message = json.loads(own.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("the root cause", 3)
    assert message["extraInfo"] == {"py_callstack": "", "timestamp": "1"}  # torch's reader needs both


def test_counts_restarts(tmp_path: Path, torchruns: Torchruns) -> None:
    theirs, mine = torchruns("restarts"), as_reference(tmp_path, "restarts")
    assert (theirs.status, mine.returncode) == (0, 0), mine.stderr
    for directory in (theirs.directory, tmp_path):
        # A rank that is stopped before it prints has an empty file here and there.
        found = [(path, text) for path, text in logs_of(directory) if text and path.endswith("stdout.log")]
        assert {path.split("/")[0] for path, _ in found} == {"attempt_0", "attempt_1", "attempt_2"}
        assert all(text == f"attempt {path[len('attempt_')]} of 2\n" for path, text in found)


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
