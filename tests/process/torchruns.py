"""`distlaunch torchrun` and torchrun, run in the same way: what the tests of both share."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness import PATIENCE_S, ROOT, Going, distlaunch_argv

Done = subprocess.CompletedProcess[str]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
OURS = distlaunch_argv("torchrun")
BOTH = (TORCHRUN, OURS)
NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
"""Looked for, not imported: each process that runs tests would take more than a second for that."""
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
    "DISTLAUNCH_DEADLINE": "ours alone",
    "DISTLAUNCH_BACKEND": "ours alone",
    "DISTLAUNCH_JOB_ID": "ours alone",
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
    """What distlaunch itself said, but for what it found that a test beside this one had just killed."""
    lines = [line for line in run.stderr.splitlines() if line.startswith("distlaunch: ")]
    return [line for line in lines if not line.endswith("left by a dead agent")]


def assert_fine(done: Done) -> None:
    """A success about which nothing is said."""
    assert done.returncode == 0, done.stderr
    assert our_lines(done) == []


def touched(folder: Path) -> set[str]:
    return {entry.name for entry in (folder / "out").iterdir()}


# Output, next to real torchrun


def logs_of(folder: Path) -> set[tuple[str, str]]:
    """(path below the run's folder, text) of each .log file."""
    (run,) = (folder / "logs").iterdir()
    return {(str(path.relative_to(run)), path.read_text()) for path in run.rglob("*.log")}


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
