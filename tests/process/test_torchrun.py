"""`distlaunch torchrun` next to torchrun: what scripts see, what users see, and how it ends.

The first part holds what PyTorch's own launcher tests hold (test/distributed/launcher), in our words.
Left out:

* test_launch_shutdown, test_launch_elastic_agent_raise_exception, the tests of `launch_agent`,
  `elastic_launch` and the rendezvous handler: they mock parts of torch's agent; there is none here.
* test_launch_function and the like: functions are `torch.distributed.launcher.api`'s, not the command line's.
* what needs an etcd server: etcd is handed over to torch as c10d on several nodes is, and that is tested.
* test_nproc_gpu_launch_configurations, test_nproc_xpu_launch_configurations: they mock GPUs; with given
  numbers of GPUs tests/unit/test_torchrun_flags.py has them.
* test_virtual_local_rank compiles on two GPUs; here the variables are compared.
* test_script_local_rank: torch.distributed.launch is another command.
* test_run_supervisor: its backend was never released.
"""

import contextlib
import json
import os
import pty
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import (
    PATIENCE_S,
    ROOT,
    Going,
    descendants_of,
    distlaunch_argv,
    ended_well,
    on_time,
    wait_gone,
)

pytest.importorskip("torch", reason="torch is not installed")

Done = subprocess.CompletedProcess[str]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
OURS = distlaunch_argv("torchrun")
BOTH = (TORCHRUN, OURS)
TOUCH = """
    import os, pathlib, sys
    folder = sys.argv[1].removeprefix("--touch-file-dir=")
    for name in (
        "LOCAL_RANK RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE ROLE_WORLD_SIZE"
        " TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_ERROR_FILE"
        " MASTER_ADDR MASTER_PORT SENTINEL"
    ).split():
        print(name, "=", os.environ[name])
    if sys.argv[2:] == ["--fail"]:
        raise RuntimeError("as asked")
    pathlib.Path(folder, os.environ["RANK"]).touch()
"""
TELL = """
    import json, os, signal, sys
    told = {
        "env": dict(os.environ),
        "argv": sys.argv,
        "main": __name__,
        "python": sys.executable,
        "folder": os.getcwd(),
        "unbuffered": sys.stdout.write_through,
        "leads its session": os.getsid(0) == os.getpid(),
        "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    }
    with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
        json.dump(told, file)
"""
STUBBORN = """
    import os, signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"ready %s %d\\n" % (os.environ["RANK"].encode(), os.getpid()))
    while True:
        signal.pause()
"""
WAITING = STUBBORN.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "")
MAY_DIFFER = {
    "DISTLAUNCH_AGENT": "ours alone",
    "DISTLAUNCH_BACKEND": "ours alone",
    "DISTLAUNCH_RUN_ID": "ours alone",
    "NODE_RANK": "ours alone: what other launchers call GROUP_RANK",
    "GLOO_SOCKET_IFNAME": "ours alone: the interface that leads to rank 0, where none is given",
    "NCCL_SOCKET_IFNAME": "ours alone: the interface that leads to rank 0, where none is given",
    "TORCH_FR_BUFFER_SIZE": "ours alone, with GPUs: the flight recorder tells who missed a collective",
    "TORCH_FR_DUMP_TEMP_FILE": "ours alone, with GPUs: the flight recorder tells who missed a collective",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "ours alone, with GPUs: the flight recorder tells who missed a collective",
    "TORCHELASTIC_USE_AGENT_STORE": "our launcher hosts no store: rank 0 does",
    "TORCHELASTIC_ERROR_FILE": "another private file",
}


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The caller's, without what is a launcher's, with this checkout and a TMPDIR below `folder`."""
    prefixes = ("PET_", "TORCHELASTIC_", "TORCH_ELASTIC_", "OMP_", "PYTHON", "ACCELERATE_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
    (folder / "tmp").mkdir(exist_ok=True)
    ours = {
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder / "tmp"),
        "CUDA_VISIBLE_DEVICES": "",
        "SENTINEL": "here",
    }
    return kept | ours | more


def fed(launcher: list[str], folder: Path, *words: str, stdin: int, environ: dict[str, str]) -> Done:
    """Run a launcher in `folder` to its end; `stdin` is a descriptor."""
    return subprocess.run(
        [*launcher, *words],
        cwd=folder,
        env=environ,
        stdin=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def launch(launcher: list[str], folder: Path, *words: str, **environ: str) -> Done:
    """Run a launcher in `folder` to its end, with these variables."""
    return fed(launcher, folder, *words, stdin=subprocess.DEVNULL, environ=environment(folder, **environ))


def ours(folder: Path, *words: str, **environ: str) -> Done:
    return launch(OURS, folder, *words, **environ)


@contextlib.contextmanager
def going(launcher: list[str], folder: Path, *words: str) -> Iterator[Going]:
    """A launcher in `folder` that is ended when the test is."""
    run = Going(folder, [*launcher, *words], cwd=folder, env=environment(folder))
    try:
        yield run
    finally:
        run.kill()


def both(folder: Path, *words: str) -> tuple[Going, Going]:
    """Run torchrun and ours at the same time, each in a folder of its own, to their ends."""
    folders = [folder / name for name in ("torchrun", "ours")]
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(going(launcher, place, *words))
            for launcher, place in zip(BOTH, folders, strict=True)
        ]
        for run in runs:
            run.wait()
    return runs[0], runs[1]


def script(folder: Path, text: str) -> None:
    """Write worker.py."""
    folder.mkdir(exist_ok=True)
    (folder / "worker.py").write_text(textwrap.dedent(text))


def scripts(folder: Path, text: str) -> None:
    """Write worker.py for `both`."""
    for name in ("torchrun", "ours"):
        script(folder / name, text)


def free_port() -> int:
    """A port that was free a moment ago, and that the kernel gives to nobody who asks for any."""
    for port in random.sample(range(20000, 30000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def our_lines(run: Done | Going) -> list[str]:
    """What distlaunch itself said."""
    return [line for line in run.stderr.splitlines() if line.startswith("distlaunch: ")]


def assert_fine(done: Done) -> None:
    """A success about which nothing is said."""
    assert done.returncode == 0, done.stderr
    assert our_lines(done) == []


def touched(folder: Path) -> set[str]:
    return {entry.name for entry in (folder / "out").iterdir()}


# What PyTorch's own tests hold


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder with a script that touches out/RANK."""
    (tmp_path / "out").mkdir()
    script(tmp_path, TOUCH)
    shell = tmp_path / "worker.sh"
    shell.write_text('#!/bin/sh\necho "rank $RANK"\n: > "$1/$RANK"\n')
    shell.chmod(0o755)
    return tmp_path


ALL_FOUR = {"0", "1", "2", "3"}
FOUR_WAYS = {
    "plain": ["--rdzv-id=17", "--nnodes=1"],
    "as torch.distributed.launch had it": ["--master-addr=localhost", "--node-rank=0"],
    "standalone": ["--standalone"],
    "run-path": ["--run-path"],
    "underscores": ["--max_restarts=0", "--rdzv_id", "3"],
}


@pytest.mark.parametrize("words", FOUR_WAYS.values(), ids=FOUR_WAYS)
def test_every_worker_runs(out: Path, words: list[str]) -> None:
    port = [f"--master-port={free_port()}"] if "--node-rank=0" in words else []
    done = ours(out, *words, *port, "--nproc-per-node=4", "worker.py", "--touch-file-dir=out")
    assert_fine(done)
    assert touched(out) == ALL_FOUR


def test_flags_without_effect_are_told_and_do_not_matter(out: Path) -> None:
    words = ("--monitor-interval=1", "--start-method=spawn", "--nproc-per-node=4")
    done = ours(out, *words, "worker.py", "--touch-file-dir=out")
    assert (done.returncode, touched(out)) == (0, ALL_FOUR)
    assert [line.split(" has no effect")[0] for line in our_lines(done)] == [
        "distlaunch: --start-method",
        "distlaunch: --monitor-interval",
    ]


def test_a_command_that_is_not_python(out: Path) -> None:
    refused = ours(out, "--no-python", "--module", "./worker.sh", "out")
    assert refused.returncode == 2
    assert our_lines(refused) == ["distlaunch: --no-python and --module can't be combined"]
    assert_fine(ours(out, "--no-python", "./worker.sh", "out"))
    assert touched(out) == {"0"}
    assert_fine(ours(out, "--no-python", "--nproc-per-node=4", "./worker.sh", "out"))
    assert touched(out) == ALL_FOUR


def test_variables_are_the_defaults(out: Path) -> None:
    flags = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4", "PET_RDZV_ID": "8", "PET_NO_PYTHON": "1"}
    assert ours(out, "./worker.sh", "out", PET_MODULE="1", **flags).returncode == 2
    assert_fine(ours(out, "./worker.sh", "out", PET_MODULE="0", **flags))
    assert touched(out) == ALL_FOUR


@pytest.mark.parametrize("word", ["auto", "cpu"])
def test_as_many_workers_as_torch_counts_cores(out: Path, word: str) -> None:
    count = "import torch; print(torch._utils.cpu_count())"
    cores = int(launch([sys.executable, "-c"], out, count).stdout)
    assert_fine(ours(out, f"--nproc-per-node={word}", "--no-python", "./worker.sh", "out"))
    assert len(touched(out)) == cores


def test_an_unknown_number_of_workers_is_refused(out: Path) -> None:
    done = ours(out, "--nproc-per-node=unknown", "worker.py", "--touch-file-dir=out")
    assert (done.returncode, touched(out), len(done.stderr.splitlines())) == (2, set(), 1)


def elastic_words(nodes: str) -> list[str]:
    return [
        f"--nnodes={nodes}",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{free_port()}",
        "--rdzv-conf=join_timeout=30,last_call_timeout=1",
        "--rdzv-id=9",
        "worker.py",
        "--touch-file-dir=out",
    ]


def handed_over(done: Done | Going) -> bool:
    (line,) = our_lines(done)
    return line.endswith("-m torch.distributed.run") and "needs torch's elastic agent; handing over" in line


def test_an_elastic_job_is_handed_over_and_works(out: Path) -> None:
    done = ours(out, *elastic_words("1:2"))
    assert (done.returncode, touched(out)) == (0, {"0", "1"}), done.stderr
    assert handed_over(done)


def test_an_elastic_jobs_failure_is_torchs(out: Path) -> None:
    done = ours(out, *elastic_words("1:2"), "--fail")
    assert (done.returncode, touched(out)) == (1, set())
    assert handed_over(done)
    assert "ChildFailedError" in done.stderr


def test_two_elastic_launchers_meet(out: Path) -> None:
    words = elastic_words("2")
    with going(OURS, out, *words) as first, going(OURS, out, *words) as second:
        assert (first.wait(), second.wait()) == (0, 0), first.stderr + second.stderr
        assert handed_over(first)
    assert touched(out) == ALL_FOUR


@pytest.mark.parametrize("words", [[], ["--run-path"]], ids=["plain", "run-path"])
def test_torch_knows_its_launcher(tmp_path: Path, words: list[str]) -> None:
    script(tmp_path, "import torch.distributed; print(torch.distributed.is_torchelastic_launched())")
    assert ours(tmp_path, *words, "worker.py").stdout == "True\n"


def test_without_a_launcher_torch_knows_none(tmp_path: Path) -> None:
    script(tmp_path, "import torch.distributed; print(torch.distributed.is_torchelastic_launched())")
    assert launch([sys.executable], tmp_path, "worker.py").stdout == "False\n"


@pytest.mark.parametrize("scheme", ["tcp", "env"])
def test_process_groups(tmp_path: Path, scheme: str) -> None:
    script(
        tmp_path,
        """
        import os, sys, torch, torch.distributed as dist
        whole = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        dist.init_process_group("gloo", init_method=sys.argv[1], **(whole if "tcp" in sys.argv[1] else {}))
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total)
        print(f"sum {total.item()}\\n", end="")
        dist.destroy_process_group()
        """,
    )
    port = free_port()
    method = f"tcp://localhost:{port}" if scheme == "tcp" else "env://"
    flags = ("--run-path", "--nproc-per-node=2", "--master-addr=localhost", f"--master-port={port}")
    done = ours(tmp_path, *flags, "worker.py", method)
    ended_well(done.returncode, done.stdout, done.stderr, last="sum 1\n", times=2)
    assert_fine(done)
    assert done.stdout == "sum 1\n" * 2


def test_captured_output_has_the_prefix_of_the_variable(out: Path) -> None:
    done = ours(
        out,
        *("--redirect=3", "--tee=3", "--nproc-per-node=4", "--no-python", "./worker.sh", "out"),
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[rank${rank}]: ",
    )
    assert_fine(done)
    assert sorted(done.stdout.splitlines()) == [f"[rank{rank}]: rank {rank}" for rank in range(4)]


def test_plug_ins_for_logs_are_handed_over(out: Path) -> None:
    """torch finds them by their entry points, as in its own test."""
    (out / "mine-0.dist-info").mkdir()
    (out / "mine-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 0\n")
    (out / "mine-0.dist-info" / "entry_points.txt").write_text("[torchrun.logs_specs]\nmine = mine:Mine\n")
    (out / "mine.py").write_text(
        "from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs\n"
        "class Mine(DefaultLogsSpecs):\n"
        "    def __init__(self, **more):\n"
        "        super().__init__(**more)\n"
        "        print('the plug-in')\n"
    )
    done = ours(
        out,
        *("--logs_specs=mine", "--standalone", "worker.py", "--touch-file-dir=out"),
        PYTHONPATH=f"{ROOT}:{out}",
    )
    assert (done.returncode, touched(out)) == (0, {"0"}), done.stderr
    assert handed_over(done)
    assert "the plug-in" in done.stdout


def test_an_interpreter_that_is_missing_is_told_in_a_line(out: Path) -> None:
    done = ours(out, *elastic_words("2"), PYTHON_EXEC="/nowhere/python")
    assert (done.returncode, our_lines(done)[1:]) == (
        1,
        ["distlaunch: PYTHON_EXEC: /nowhere/python: No such file or directory"],
    )
    assert "Traceback" not in done.stderr


# What scripts see, next to real torchrun


def told(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / str(rank)).read_text())
    return found


def differing(theirs: dict[str, str], mine: dict[str, str]) -> set[str]:
    return {name for name in {*theirs, *mine} if theirs.get(name) != mine.get(name)} - {
        "TMPDIR",
        "PWD",
        "OLDPWD",
    }


CONTRACTS = {
    "one worker": ["--nproc-per-node=1"],
    "roles and restarts": ["--role=trainer", "--max-restarts=2", "--nproc-per-node=2"],
    "virtual local rank": ["--virtual-local-rank", "--nproc-per-node=2"],
    "run-path": ["--run-path", "--nproc-per-node=2"],
}


@pytest.mark.parametrize("words", CONTRACTS.values(), ids=CONTRACTS)
def test_workers_get_what_torchrun_gives(tmp_path: Path, words: list[str]) -> None:
    scripts(tmp_path, TELL)
    port = f"--master-port={free_port()}"
    devices = "4,5,7" if "--virtual-local-rank" in words else ""
    for name, launcher in zip(("torchrun", "ours"), BOTH, strict=True):  # one after the other: one port
        flags, args = (*words, port, "--rdzv-id=4"), (".", "--x", "a b", "--")
        done = launch(launcher, tmp_path / name, *flags, "worker.py", *args, CUDA_VISIBLE_DEVICES=devices)
        assert done.returncode == 0, done.stderr
    for rank in range(2 if "--nproc-per-node=2" in words else 1):
        theirs, mine = (told(tmp_path / name, rank) for name in ("torchrun", "ours"))
        assert differing(theirs.pop("env"), mine.pop("env")) <= set(MAY_DIFFER)
        assert theirs.pop("folder") == str(tmp_path / "torchrun")
        assert mine.pop("folder") == str(tmp_path / "ours")
        if "--run-path" in words:  # torchrun runs it in a forkserver's child: not -u, no session
            for key in ("unbuffered", "leads its session"):
                assert (theirs.pop(key), mine.pop(key)) == (False, True)
        assert mine == theirs


C10D = {
    "localhost:0": ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
    "a port and an id": ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}", "--rdzv-id=a b"],
    "no endpoint": ["--rdzv-backend=c10d", "--nnodes=1:1", "--rdzv-conf=join_timeout=9", "--node-rank=0"],
    "an address": ["--rdzv_backend", "c10d", "--rdzv_endpoint=127.0.0.1:{port}", "--local_addr=127.0.0.2"],
    "a master that torch ignores": ["--rdzv-backend=c10d", "--master-addr=nowhere", "--master-port={port}"],
}


@pytest.mark.parametrize("words", C10D.values(), ids=C10D)
def test_one_node_with_c10d_is_ours(tmp_path: Path, words: list[str]) -> None:
    """Nothing is elastic with one node: workers get what torch's agent gives them, and nothing is said."""
    scripts(tmp_path, TELL)
    port = free_port()
    flags = [word.format(port=port) for word in words]
    theirs, mine = both(tmp_path, *flags, "--nproc-per-node=2", "--max-restarts=1", "worker.py", ".")
    assert [run.process.returncode for run in (theirs, mine)] == [0, 0], mine.stderr
    assert our_lines(mine) == []
    for rank in range(2):
        there, here = (told(tmp_path / name, rank)["env"] for name in ("torchrun", "ours"))
        assert differing(there, here) <= {*MAY_DIFFER, "MASTER_ADDR", "MASTER_PORT"}
        assert str(port) not in (there["MASTER_PORT"], here["MASTER_PORT"])  # that is the agents' own store's
        given = [word for word in words if word.startswith("--local_addr")]
        assert there["MASTER_ADDR"] == here["MASTER_ADDR"] or not given


def test_one_node_with_c10d_needs_no_free_endpoint(tmp_path: Path) -> None:
    """Two jobs of the common line at once, with the endpoint of both taken by a stranger."""
    script(
        tmp_path,
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor(1)
        dist.all_reduce(total)
        os.write(1, b"%d\\n" % total.item())
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        words = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{stranger.getsockname()[1]}")
        flags = (*words, "--nproc-per-node=2", "worker.py")
        with going(OURS, tmp_path, *flags) as first, going(OURS, tmp_path, *flags) as second:
            for run in (first, second):
                ended_well(run.wait(), run.stdout, run.stderr, last="2\n", times=2)
                assert run.stdout == "2\n2\n"


@pytest.mark.parametrize("words", [[], ["--standalone"]], ids=["plain", "standalone"])
def test_without_an_endpoint_the_place_and_the_id_are_made_up(tmp_path: Path, words: list[str]) -> None:
    scripts(tmp_path, TELL)
    assert [run.process.returncode for run in both(tmp_path, *words, "worker.py", ".")] == [0, 0]
    theirs, mine = (told(tmp_path / name, 0)["env"] for name in ("torchrun", "ours"))
    made_up = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    assert differing(theirs, mine) <= set(MAY_DIFFER) | made_up
    assert (theirs["MASTER_ADDR"], mine["MASTER_ADDR"]) == ("localhost", "127.0.0.1")
    assert "none" not in (theirs["TORCHELASTIC_RUN_ID"], mine["TORCHELASTIC_RUN_ID"])


def test_a_given_number_of_threads_stays(tmp_path: Path) -> None:
    script(tmp_path, TELL)
    assert_fine(ours(tmp_path, "--nproc-per-node=2", "worker.py", ".", OMP_NUM_THREADS="5"))
    assert {told(tmp_path, rank)["env"]["OMP_NUM_THREADS"] for rank in range(2)} == {"5"}


def test_the_interpreter_of_the_variable_is_used(tmp_path: Path) -> None:
    script(tmp_path, "import sys; print(sys.executable)")
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    assert ours(tmp_path, "worker.py", PYTHON_EXEC=str(python)).stdout == f"{python}\n"


@contextlib.contextmanager
def typed(kind: str, folder: Path) -> Iterator[int]:
    """A descriptor with `typed` to read and then its end, by now nobody's to write to."""
    if kind == "file":
        (folder / "input").write_text("read before\ntyped")
        with (folder / "input").open("rb", buffering=0) as file:
            file.readline()
            yield file.fileno()
        return
    read, write = os.pipe() if kind == "pipe" else (end.detach() for end in socket.socketpair())
    os.write(write, b"typed")
    os.close(write)
    with os.fdopen(read, "rb"):
        yield read


@pytest.mark.parametrize("kind", ["pipe", "file", "socket"])
@pytest.mark.parametrize("launcher", BOTH)
def test_workers_share_the_callers_stdin(launcher: list[str], kind: str, tmp_path: Path) -> None:
    """The very same: who reads a part takes it from the others, and from the next restart."""
    script(tmp_path, "import os, sys; os.write(1, b'%r\\n' % sys.stdin.read())")
    with typed(kind, tmp_path) as stdin:
        done = fed(
            launcher, tmp_path, "--nproc-per-node=2", "worker.py", stdin=stdin, environ=environment(tmp_path)
        )
    assert sorted(done.stdout.splitlines()) == ["''", "'typed'"], done.stderr


@pytest.mark.parametrize("launcher", BOTH)
def test_the_debugger_works_in_a_terminal(launcher: list[str], tmp_path: Path) -> None:
    script(tmp_path, "secret = 6 * 7\nbreakpoint()\nprint('went on')")
    ours_end, launchers_end = pty.openpty()
    try:
        process = subprocess.Popen(
            [*launcher, "worker.py"],
            cwd=tmp_path,
            env=environment(tmp_path),
            stdin=launchers_end,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        os.write(ours_end, b"secret\n")
        said = b""
        while b"42\n(Pdb) " not in said:  # a prompt comes without a line's end
            piece = os.read(process.stdout.fileno(), 4096)
            assert piece, said
            said += piece
        os.write(ours_end, b"continue\n")
        assert process.communicate(timeout=PATIENCE_S)[0].endswith(b"went on\n")
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
        os.close(ours_end)
        os.close(launchers_end)


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


@pytest.mark.parametrize("launcher", BOTH)
def test_what_workers_print_is_whole_for_a_slow_reader(launcher: list[str], tmp_path: Path) -> None:
    """Lines that were written at once are not torn, and none is lost: nothing else keeps them."""
    script(tmp_path, SAYS)
    argv = [*launcher, "--nproc-per-node=2", "worker.py"]
    with subprocess.Popen(
        argv, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        # Nobody reads until a worker can't write any more, and for longer than the end waits for readers.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(7.0)
        lines = process.stdout.read().decode().splitlines()
        assert process.wait(PATIENCE_S) == 0
    told = [re.fullmatch(r"rank ([01]) line (\d+) \.{80}", line) for line in lines]
    assert all(told)
    for rank in "01":
        assert [int(line[2]) for line in told if line and line[1] == rank] == list(range(20000))


def test_what_workers_say_on_stderr_waits_for_a_slow_reader(tmp_path: Path) -> None:
    script(tmp_path, SAYS.replace("os.write(1,", "os.write(2,"))
    with subprocess.Popen(
        [*OURS, "worker.py"], cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(7.0)
        assert process.stderr.read().count(b" line ") == 20000
        assert process.wait(PATIENCE_S) == 0


def unread(folder: Path) -> subprocess.Popen[bytes]:
    """Our launcher, whose output is read by nobody but the test."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*OURS, "worker.py"], cwd=folder, env=environment(folder), stdout=pipe, stderr=pipe
    )


def test_lines_on_stderr_that_are_not_shown_are_counted(tmp_path: Path) -> None:
    """More of them wait for a reader than are kept in memory."""
    says = SAYS.replace("os.write(1,", "os.write(2,").replace("20000", "150000")
    script(tmp_path, f"import os; os.write(1, b'%d\\n' % os.getpid())\n{textwrap.dedent(says)}")
    with unread(tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        wait_gone(descendants_of(process.pid), PATIENCE_S)  # the agent too: the launcher has it all
        said = process.stderr.read().decode()
        assert process.wait(PATIENCE_S) == 0
    told = re.search(r"distlaunch: (\d+) lines not shown: the reader was too slow\n", said)
    assert told
    assert int(told[1]) + said.count(" line ") == 150000


def test_an_interrupt_ends_the_wait_for_a_slow_reader(tmp_path: Path) -> None:
    ends = "import os; os.write(2, b'.' * 1000000); os.write(1, b'ready 0 %d\\n' % os.getpid())"
    script(tmp_path, ends)
    with unread(tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_gone(descendants_of(process.pid), PATIENCE_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(10.0) in (0, 130)


@pytest.mark.parametrize(("launcher", "terminals"), [(TORCHRUN, "111"), (OURS, "110")])
def test_workers_see_the_terminal(launcher: list[str], terminals: str, tmp_path: Path) -> None:
    """But for stderr, whose last words are the cause of a failure."""
    script(tmp_path, "import os; print(*map(os.isatty, range(3)))")
    ours_end, launchers_end = pty.openpty()
    process = subprocess.Popen(
        [*launcher, "worker.py"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdin=launchers_end,
        stdout=launchers_end,
        stderr=launchers_end,
    )
    os.close(launchers_end)
    said = b""
    with os.fdopen(ours_end, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # EIO is its end
        while piece := terminal.read(4096):
            said += piece
    assert process.wait(PATIENCE_S) == 0
    assert " ".join(str(flag == "1") for flag in terminals).encode() in said


def test_a_job_that_was_stopped_for_a_while_goes_on(tmp_path: Path) -> None:
    """As a batch system suspends jobs: all of it stops, for longer than the guardian looks away."""
    script(tmp_path, CATCHES)
    with going(OURS, tmp_path, "--nproc-per-node=2", "worker.py") as run:
        run.wait_ready(2)
        family = [run.process.pid, *descendants_of(run.process.pid)]
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(6.0)
        for pid in family:
            os.kill(pid, signal.SIGCONT)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert run.stdout.count("got SIGINT") == 2


def test_a_working_directory_that_is_gone_is_told(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    argv = ["sh", "-c", 'cd gone && rmdir ../gone && exec "$@"', "sh", *OURS]
    done = launch(argv, tmp_path, "/worker.py")
    assert (done.returncode, done.stderr.splitlines()) == (
        1,
        ["distlaunch: can't read the current directory: No such file or directory"],
    )


def test_python_m_works_too(tmp_path: Path) -> None:
    script(tmp_path, "import sys; print(sys.argv[1:])")
    done = launch([sys.executable, "-m", "distlaunch.torchrun"], tmp_path, "worker.py", "--nnodes", "-h")
    assert done.stdout == "['--nnodes', '-h']\n"


def test_a_module(tmp_path: Path) -> None:
    script(tmp_path, "import sys; print(__name__, sys.argv[1:])")
    assert ours(tmp_path, "-m", "worker", "a").stdout == "__main__ ['a']\n"


def test_the_record_decorators_root_cause_is_told(tmp_path: Path) -> None:
    scripts(
        tmp_path,
        """
        import os, signal
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            if os.environ["RANK"] == "1":
                raise ValueError("the root cause")
            signal.pause()
        main()
        """,
    )
    theirs, mine = both(tmp_path, "--nproc-per-node=2", "--redirects=3", "--log-dir=logs", "worker.py")
    assert (theirs.process.returncode, mine.process.returncode) == (1, 1)
    assert "ValueError: the root cause" in theirs.stderr
    (worker,) = {line for line in our_lines(mine) if "failed first" in line}
    assert worker.startswith("distlaunch: rank 1 ")
    assert "distlaunch:   | ValueError: the root cause" in mine.stderr.splitlines()
    assert "SIGTERM" not in mine.stderr


def test_the_error_file_is_read(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import json, os, sys
        more = {"py_callstack": "only in the file", "timestamp": "1"}
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": {"message": "m", "extraInfo": more}}, file)
        sys.exit(3)
        """,
    )
    done = ours(tmp_path, "worker.py")
    assert done.returncode == 3
    assert "distlaunch:   | only in the file" in done.stderr.splitlines()


def test_restarts_are_counted(tmp_path: Path) -> None:
    text = """
        import os, sys
        count, most = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"]
        print(f"attempt {count} of {most}\\n", end="")  # one write: a rank may be stopped after it
        sys.exit(count != "2")
    """
    scripts(tmp_path, text)
    words = ("--nproc-per-node=2", "--max-restarts=2", "--log-dir=logs", "-r1", "worker.py")
    theirs, mine = both(tmp_path, *words)
    assert (theirs.process.returncode, mine.process.returncode) == (0, 0), mine.stderr
    # A rank that is stopped before it prints has an empty file here and there.
    seen = [
        {(path, text) for path, text in logs_of(tmp_path / name) if text} for name in ("torchrun", "ours")
    ]
    for found in seen:
        assert {path.split("/")[0] for path, _ in found} == {"attempt_0", "attempt_1", "attempt_2"}
        assert all(text == f"attempt {path[len('attempt_')]} of 2\n" for path, text in found)


def test_restarts_end(tmp_path: Path) -> None:
    script(tmp_path, "import os, sys; print(os.environ['TORCHELASTIC_RESTART_COUNT']); sys.exit(9)")
    done = ours(tmp_path, "--max-restarts=1", "worker.py")
    assert (done.returncode, done.stdout) == (9, "0\n1\n")


# Output, next to real torchrun


def logs_of(folder: Path) -> set[tuple[str, str]]:
    """(path below the run's folder, text) of each .log file."""
    (run,) = (folder / "logs").iterdir()
    return {(str(path.relative_to(run)), path.read_text()) for path in run.rglob("*.log")}


PRINT = """
    import os, sys
    rank = os.environ["RANK"]
    sys.stdout.write(f"out {rank}\\n")
    sys.stdout.flush()
    sys.stderr.write(f"err {rank}\\n")
"""
OUTPUTS = {
    "redirects": ["--redirects=3"],
    "tee": ["--tee=3"],
    "both": ["-r=1", "-t=2"],
    "maps": ["-r=0:1,2:3", "-t=1:3,2:1"],
    "filter": ["--local-ranks-filter=1"],
    "filter and tee": ["--local-ranks-filter=0,2", "--tee=3", "--role=trainer"],
    "filter and redirects": ["--local-ranks-filter=0,2", "-r=1:3,2:1"],
}


@pytest.mark.parametrize("words", OUTPUTS.values(), ids=OUTPUTS)
def test_output_goes_where_torchrun_puts_it(tmp_path: Path, words: list[str]) -> None:
    scripts(tmp_path, PRINT)
    theirs, mine = both(tmp_path, *words, "--nproc-per-node=3", "--log-dir=logs", "worker.py")
    assert (theirs.process.returncode, mine.process.returncode) == (0, 0), mine.stderr
    assert lines_of_ranks(mine.stdout) == lines_of_ranks(theirs.stdout)
    assert lines_of_ranks(mine.stderr) == lines_of_ranks(theirs.stderr)
    there, here = (logs_of(tmp_path / name) for name in ("torchrun", "ours"))
    assert here == there


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


def test_the_prefixs_template(tmp_path: Path) -> None:
    script(tmp_path, PRINT)
    template = "--log-line-prefix-template=<${role_name}/${local_rank}/${rank}/$other> "
    done = ours(tmp_path, template, "--tee=1", "--role=trainer", "--log-dir=logs", "worker.py")
    assert_fine(done)
    assert done.stdout == "<trainer/0/0/$other> out 0\n"


def test_lines_of_teed_ranks_are_not_glued(tmp_path: Path) -> None:
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


def test_a_log_folder_that_is_a_file_is_told_in_a_line(tmp_path: Path) -> None:
    script(tmp_path, PRINT)
    done = ours(tmp_path, "--log-dir=worker.py", "worker.py")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)


# How it ends


def test_a_workers_status_is_ours(tmp_path: Path) -> None:
    scripts(tmp_path, "import os, signal, sys\nif os.environ['RANK'] == '1': sys.exit(7)\nsignal.pause()")
    theirs, mine = both(tmp_path, "--nproc-per-node=2", "worker.py")
    assert (theirs.process.returncode, mine.process.returncode) == (1, 7)
    assert "Traceback" not in mine.stderr


@pytest.mark.parametrize("more", [[], ["--max-restarts=3"]])
def test_a_script_that_does_not_exist_is_told_in_a_line(tmp_path: Path, more: list[str]) -> None:
    """Python would end with 2 in every worker, which is what a mistake on the command line has."""
    done = ours(tmp_path, *more, "--nproc-per-node=2", "nosuch.py")
    assert done.returncode == 127
    assert our_lines(done)[0].endswith("could not be started: nosuch.py: No such file or directory")
    assert "can't open file" not in done.stderr


def test_a_script_on_stdin_and_a_folder_are_no_missing_files(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text("print('main')")
    assert ours(tmp_path, "package").stdout == "main\n"
    assert ours(tmp_path, "--", "-").returncode == 0


def test_a_workers_own_status_of_2_is_ours(tmp_path: Path) -> None:
    script(tmp_path, "raise SystemExit(2)")
    assert ours(tmp_path, "worker.py").returncode == 2


def test_a_killed_workers_status_is_128_and_the_signal(tmp_path: Path) -> None:
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
def test_a_signal_to_the_launcher(tmp_path: Path, signum: int, status: int) -> None:
    script(tmp_path, WAITING)
    with going(OURS, tmp_path, "--nproc-per-node=2", "worker.py") as run:
        pids = run.wait_ready(2)
        run.process.send_signal(signum)
        assert run.wait() == status
    wait_gone(list(pids.values()), 1.0)
    first, *_, others, last = our_lines(run)
    assert first == f"distlaunch: stopped by {signal.Signals(signum).name}"
    assert others == "distlaunch: ranks 0-1: stopped by distlaunch"
    assert f"exit status {status}" in last
    assert "/distlaunch/" not in run.stderr  # no traceback of ours
    workers_own = "KeyboardInterrupt" in run.stderr
    assert workers_own == (signum == signal.SIGINT)
    assert workers_own or len(run.stderr.splitlines()) == 3


CATCHES = """
    import os, signal, sys
    def leave(signum, frame):
        os.write(1, f"got {signal.Signals(signum).name}\\n".encode())
        sys.exit(0)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):
        signal.signal(getattr(signal, name), leave)
    signal.sigtimedwait([], 0.5)  # torchrun passes signals on only once it has started all its workers
    os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
    while True:
        signal.pause()
"""


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


def test_stubborn_workers_have_the_shutdown_timeout(tmp_path: Path) -> None:
    script(tmp_path, STUBBORN)
    with going(OURS, tmp_path, "--nproc-per-node=2", "--shutdown-timeout=3", "worker.py") as run:
        pids = run.wait_ready(2)
        began = time.monotonic()
        run.process.terminate()
        assert run.wait() == 143
        took_s = time.monotonic() - began
    wait_gone(list(pids.values()), 0.0)
    assert took_s >= 3
    on_time("all ended", took_s, 4.0)


def test_the_shutdown_timeout_holds_after_a_failure_too(tmp_path: Path) -> None:
    """torchrun gives the others 30 s then, whatever is asked for."""
    script(tmp_path, STUBBORN)
    with going(OURS, tmp_path, "--nproc-per-node=2", "--shutdown-timeout=1", "worker.py") as run:
        pids = run.wait_ready(2)
        began = time.monotonic()
        os.kill(pids[0], signal.SIGKILL)
        assert run.wait() == 137
        took_s = time.monotonic() - began
    wait_gone(list(pids.values()), 0.0)
    assert took_s >= 1
    on_time("all ended", took_s, 2.0)


def test_workers_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    script(tmp_path, WAITING)
    with going(OURS, tmp_path, "--nproc-per-node=2", "--log-dir=runs", "worker.py") as run:
        pids = run.wait_ready(2)
        run.process.kill()
        run.wait()
        wait_gone(list(pids.values()), 5.0)


def test_help(tmp_path: Path) -> None:
    done = ours(tmp_path, "--nproc-per-node", "2", "-h")
    assert_fine(done)
    assert "--shutdown-timeout" in done.stdout
    with going(OURS, tmp_path, "-h") as run:
        assert run.process.stdout
        run.process.stdout.close()
        run.wait()
        assert "Traceback" not in run.stderr


# How fast it is, and scripts that others wrote


def seconds(launcher: list[str], folder: Path) -> float:
    began = time.monotonic()
    done = launch(launcher, folder, "--nproc-per-node=4", "--no-python", "true")
    assert done.returncode == 0, done.stderr
    return time.monotonic() - began


@pytest.mark.alone
def test_it_starts_ten_times_faster_than_torchrun(tmp_path: Path, record_property: Any) -> None:
    """In pairs, of which the best of each counts: what else the machine does only adds to it."""
    pairs = [(seconds(TORCHRUN, tmp_path), seconds(OURS, tmp_path)) for _ in range(3)]
    theirs, mine = (min(column) for column in zip(*pairs, strict=True))
    record_property("seconds", [theirs, mine])
    on_time(f"a tenth of torchrun's {theirs:.3f} s", mine, theirs / 10)


ACCELERATE = {
    "test_ops": ["worker.py"],
    "test_sync": ["-m", "accelerate.test_utils.scripts.test_sync"],
}


@pytest.mark.parametrize("words", ACCELERATE.values(), ids=ACCELERATE)
def test_accelerates_own_tests(tmp_path: Path, words: list[str]) -> None:
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
        done = launch(launcher, tmp_path / name, *flags, *words, ACCELERATE_USE_CPU="true")
        assert done.returncode == 0, done.stderr
        kept[name] = {(path, said) for path, said in logs_of(tmp_path / name) if said}
    assert kept["ours"] == kept["torchrun"]
    said = dict(kept["ours"])["attempt_0/0/stdout.log"]
    assert "Num processes: 2" in said or "Test Distributed `no_sync`" in said
