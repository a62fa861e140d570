"""The environment, streams and restarts that scripts see under `distlaunch torchrun`, next to torchrun."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import PATIENCE_S, descendants_of, ended_well, wait_gone
from tests.process.commands import adds
from tests.process.test_view import plain, seen
from tests.process.torchruns import (
    BOTH,
    C10D,
    CONTRACTS,
    MADE_UP,
    MAY_DIFFER,
    NEEDS_TORCH,
    OURS,
    TORCHRUN,
    Torchruns,
    as_reference,
    environment,
    fed,
    free_port,
    going,
    launch,
    logs_of,
    our_lines,
    script,
)

pytestmark = NEEDS_TORCH


def told(directory: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / str(rank)).read_text())
    return found


OF_THE_CALLER = {"TMPDIR", "PWD", "OLDPWD", "XDG_CACHE_HOME", "XDG_STATE_HOME"}


def differing(theirs: dict[str, str], mine: dict[str, str]) -> set[str]:
    names = {name for name in {*theirs, *mine} if theirs.get(name) != mine.get(name)}
    return {name for name in names - OF_THE_CALLER if not name.startswith("PYTEST_")}


@pytest.mark.parametrize("name", CONTRACTS)
def test_workers_get_what_torchrun_gives(tmp_path: Path, torchruns: Torchruns, name: str) -> None:
    words, there = CONTRACTS[name], torchruns(name)
    done = as_reference(tmp_path / "ours", name, there.port)
    assert (there.status, done.returncode) == (0, 0), there.stderr + done.stderr
    for rank in range(2 if "--nproc-per-node=2" in words else 1):
        theirs, mine = (told(directory, rank) for directory in (there.directory, tmp_path / "ours"))
        assert differing(theirs.pop("env"), mine.pop("env")) <= MAY_DIFFER
        assert theirs.pop("directory") == str(there.directory)
        assert mine.pop("directory") == str(tmp_path / "ours")
        if "--run-path" in words:  # torchrun runs it in a forkserver's child: not -u, no session
            for key in ("unbuffered", "leads its session"):
                assert (theirs.pop(key), mine.pop(key)) == (False, True)
        assert mine == theirs


@pytest.mark.parametrize("name", C10D)
def test_runs_one_node_with_c10d_itself(tmp_path: Path, torchruns: Torchruns, name: str) -> None:
    """Nothing is elastic with one node: workers get what torch's agent gives them, and nothing is said."""
    theirs, port = torchruns(name), free_port()
    mine = as_reference(tmp_path, name, port)
    assert (theirs.status, mine.returncode) == (0, 0), mine.stderr
    assert our_lines(mine) == []
    for rank in range(2):
        there, here = (told(directory, rank)["env"] for directory in (theirs.directory, tmp_path))
        assert differing(there, here) <= {*MAY_DIFFER, "MASTER_ADDR", "MASTER_PORT"}
        assert there["MASTER_PORT"] != str(theirs.port)  # that is the agents' own store's
        assert here["MASTER_PORT"] != str(port)
        assert there["MASTER_ADDR"] == here["MASTER_ADDR"] or name != "an address"


def test_one_node_with_c10d_needs_no_free_endpoint(tmp_path: Path) -> None:
    """Two jobs of the common line at once, with the endpoint of both taken by a stranger."""
    script(tmp_path, adds())
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        words = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{stranger.getsockname()[1]}")
        flags = (*words, "--nproc-per-node=2", "worker.py")
        with going(OURS, tmp_path, *flags) as first, going(OURS, tmp_path, *flags) as second:
            for run in (first, second):
                ended_well(run.wait(), run.stdout, run.stderr, last="sum 2\n", times=2)
                assert run.stdout == "sum 2\n" * 2


@pytest.mark.parametrize("name", MADE_UP)
def test_makes_up_address_and_id_without_an_endpoint(tmp_path: Path, torchruns: Torchruns, name: str) -> None:
    there, done = torchruns(name), as_reference(tmp_path, name)
    assert (there.status, done.returncode) == (0, 0), done.stderr
    theirs, mine = (told(directory, 0)["env"] for directory in (there.directory, tmp_path))
    made_up = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    assert differing(theirs, mine) <= MAY_DIFFER | made_up
    assert (theirs["MASTER_ADDR"], mine["MASTER_ADDR"]) == ("localhost", "127.0.0.1")
    assert "none" not in (theirs["TORCHELASTIC_RUN_ID"], mine["TORCHELASTIC_RUN_ID"])


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
        done = fed(
            launcher, tmp_path, "--nproc-per-node=2", "worker.py", stdin=stdin, environ=environment(tmp_path)
        )
    assert sorted(done.stdout.splitlines()) == ["''", "'typed'"], done.stderr


@pytest.mark.parametrize(("launcher", "terminals"), [(TORCHRUN, "True True True"), (OURS, "True True False")])
def test_workers_see_the_terminal_and_the_debugger_works_there(
    launcher: list[str], terminals: str, tmp_path: Path
) -> None:
    """But for stderr, whose last lines are the cause of a failure."""
    tells = "import os\nprint(*map(os.isatty, range(3)))"
    script(tmp_path, f"{tells}\nsecret = 6 * 7\nbreakpoint()\nprint('went on')")
    with seen(tmp_path, "worker.py", argv=launcher, env=environment(tmp_path)) as shown:
        shown.press(b"secret\n")
        shown.wait_for(r"42\s+\(Pdb\) ")
        shown.press(b"continue\n")
        assert shown.ended() == 0
        text = plain(shown.written)
    assert terminals in text
    assert text.endswith("went on\r\n")


def test_without_stdin_there_is_nothing_to_read(tmp_path: Path) -> None:
    script(tmp_path, "import sys; print(repr(sys.stdin.read()))")
    done = launch(["sh", "-c", 'exec "$@" <&-', "sh", *OURS], tmp_path, "worker.py")
    assert (done.returncode, done.stdout) == (0, "''\n"), done.stderr


SAYS = """
    import os, sys
    for fd in range(3):
        os.write(2, b"%d" % os.isatty(fd))
    for number in range(20000):
        os.write(1, b"rank %s line %d %s\\n" % (os.environ["RANK"].encode(), number, b"." * 80))
"""


@pytest.mark.parametrize(
    ("launcher", "fd"), [(TORCHRUN, 1), (OURS, 1), (OURS, 2)], ids=["torchrun", "ours", "ours, stderr"]
)
def test_what_workers_print_is_whole_for_a_slow_reader(launcher: list[str], fd: int, tmp_path: Path) -> None:
    """Lines that were written at once are not torn, and none is lost: nothing else keeps them."""
    script(tmp_path, SAYS.replace("os.write(1,", f"os.write({fd},"))
    streams: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    streams[("stdout", "stderr")[fd - 1]] = subprocess.PIPE
    argv = [*launcher, "--nproc-per-node=2", "worker.py"]
    with subprocess.Popen(argv, cwd=tmp_path, env=environment(tmp_path), **streams) as process:
        pipe = process.stdout or process.stderr
        assert pipe is not None
        # Nobody reads until a worker can't write any more, and for longer than the end waits for readers.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(7.0)
        lines = pipe.read().decode().splitlines()
        assert process.wait(PATIENCE_S) == 0
    told = [re.fullmatch(r"[01]*rank ([01]) line (\d+) \.{80}", line) for line in lines]
    assert all(told)
    for rank in "01":
        assert [int(line[2]) for line in told if line and line[1] == rank] == list(range(20000))


def test_an_interrupt_ends_the_wait_for_a_slow_reader(tmp_path: Path) -> None:
    ends = "import os; os.write(2, b'.' * 1000000); os.write(1, b'ready 0 %d\\n' % os.getpid())"
    script(tmp_path, ends)
    argv, pipe = [*OURS, "worker.py"], subprocess.PIPE
    with subprocess.Popen(argv, cwd=tmp_path, env=environment(tmp_path), stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_gone(descendants_of(process.pid), PATIENCE_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) in (0, 130)


@pytest.mark.parametrize(
    "words", [("torchrun", "/worker.py"), ("ps",), ("logs",), ("stop",), ("dry-run", "-")]
)
def test_reports_a_working_directory_that_is_gone(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "gone").mkdir()
    argv = ["sh", "-c", 'cd gone && rmdir ../gone && exec "$@"', "sh", *OURS[:-1]]
    done = launch(argv, tmp_path, *words)
    assert (done.returncode, done.stderr) == (
        2,
        "distlaunch: the current directory no longer exists: cd to one that does\n",
    )


def test_reports_the_root_cause_that_the_record_decorator_left(tmp_path: Path, torchruns: Torchruns) -> None:
    theirs, mine = torchruns("record"), as_reference(tmp_path, "record")
    assert (theirs.status, mine.returncode) == (1, 1)
    assert "ValueError: the root cause" in theirs.stderr
    (worker,) = {line for line in our_lines(mine) if "failed first" in line}
    assert worker.startswith("distlaunch: rank 1 ")
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
    own = str(tmp_path / "error.json")
    assert launch(launcher, tmp_path, "worker.py", TORCHELASTIC_ERROR_FILE=own).returncode
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("the root cause", 3)


def test_counts_restarts(tmp_path: Path, torchruns: Torchruns) -> None:
    theirs, mine = torchruns("restarts"), as_reference(tmp_path, "restarts")
    assert (theirs.status, mine.returncode) == (0, 0), mine.stderr
    for directory in (theirs.directory, tmp_path):
        # A rank that is stopped before it prints has an empty file here and there.
        found = [(path, text) for path, text in logs_of(directory) if text and path.endswith("stdout.log")]
        assert {path.split("/")[0] for path, _ in found} == {"attempt_0", "attempt_1", "attempt_2"}
        assert all(text == f"attempt {path[len('attempt_')]} of 2\n" for path, text in found)
