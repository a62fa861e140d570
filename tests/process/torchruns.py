"""Helpers that run `distlaunch torchrun` and torchrun in the same way."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness import PATIENCE_S, ROOT, Done, Going, completed, distlaunch_argv

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
OURS = distlaunch_argv("torchrun")
BOTH = (TORCHRUN, OURS)
NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
"""Looked for, not imported: each process that runs tests would take more than a second for that."""
TELL = """
    import json, os, signal, sys
    told = {
        "env": dict(os.environ),
        "argv": sys.argv,
        "main": __name__,
        "python": sys.executable,
        "directory": os.getcwd(),
        "unbuffered": sys.stdout.write_through,
        "leads its session": os.getsid(0) == os.getpid(),
        "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    }
    with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
        json.dump(told, file)
"""
CONTRACTS = {
    "one worker": ["--nproc-per-node=1"],
    "roles and restarts": ["--role=trainer", "--max-restarts=2", "--nproc-per-node=2"],
    "virtual local rank": ["--virtual-local-rank", "--nproc-per-node=2"],
    "virtual local rank of one": ["--virtual-local-rank"],
    "macros": ["--nproc-per-node=2"],
    "run-path": ["--run-path", "--nproc-per-node=2"],
}
C10D = {
    "a port and an id": ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}", "--rdzv-id=a b"],
    "no endpoint": ["--rdzv-backend=c10d", "--nnodes=1:1", "--rdzv-conf=join_timeout=9", "--node-rank=0"],
    "an address": ["--rdzv_backend", "c10d", "--rdzv_endpoint=127.0.0.1:{port}", "--local_addr=127.0.0.2"],
}
MADE_UP = {"plain": [], "standalone": ["--standalone"]}
PRINT = """
    import os
    os.write(1, b"out %d\\n" % int(os.environ["RANK"]))
    os.write(2, b"err %d\\n" % int(os.environ["RANK"]))
"""
OUTPUTS = {
    "tee": ["--tee=3"],
    "both": ["-r=1", "-t=2"],
    "maps": ["-r=0:1,2:3", "-t=1:3,2:1"],
    "filter": ["--local-ranks-filter=1"],
    "filter and tee": ["--local-ranks-filter=0,2", "--tee=3", "--role=trainer"],
    "filter and redirects": ["--local-ranks-filter=0,2", "-r=1:3,2:1"],
}
FAILS_RECORDED = """
    import os, signal
    if os.environ["RANK"] == "0":
        signal.pause()
    from torch.distributed.elastic.multiprocessing.errors import record
    @record
    def main():
        raise ValueError("the root cause")
    main()
"""
FAILS_TWICE = """
    import os
    count, most = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"]
    print(f"attempt {count} of {most}\\n", end="")  # one write: a rank may be stopped after it
    assert count == "2"
"""
DEVICES = {"virtual local rank": "4,5,7"}
TOLD = ("worker.py", ".", "--x", "a b", "--")
MACROS = {"macros": ("${local_rank}", "-$local_rank-$$x", "{rank} {{x}} ${x} $local_ranks {${local_rank}:}")}
LOGS = ("-r3", "--log-dir=logs", "worker.py")
REFERENCES = {
    name: (TELL, [*words, "--master-port={port}", "--rdzv-id=4", *TOLD, *MACROS.get(name, ())])
    for name, words in CONTRACTS.items()
}
"""By name: a script and torchrun's arguments, of which torchrun's own way is what ours is compared with."""
REFERENCES |= {name: (TELL, [*words, "--nproc-per-node=2", *TOLD[:2]]) for name, words in C10D.items()}
REFERENCES |= {name: (TELL, [*words, *TOLD[:2]]) for name, words in MADE_UP.items()}
REFERENCES |= {
    name: (PRINT, [*words, "--nproc-per-node=3", "--log-dir=logs", "worker.py"])
    for name, words in OUTPUTS.items()
}
REFERENCES |= {
    "record": (FAILS_RECORDED, ["--nproc-per-node=2", *LOGS]),
    "restarts": (FAILS_TWICE, ["--nproc-per-node=2", "--max-restarts=2", *LOGS]),
}
MANY_TORCHRUNS = """
import json, os, runpy, sys
import torch.distributed.launcher.api  # all that torchrun imports
pids = {}
for directory, words, environ in json.loads(sys.argv[1]):
    if pid := os.fork():
        pids[pid] = directory
        continue
    os.chdir(directory)
    os.environ.update(environ)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), fd)
    sys.argv = ["torchrun", *words]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    sys.exit()
for pid, directory in pids.items():
    with open(directory + "/status", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
"""
MAY_DIFFER = {
    *(f"DISTLAUNCH_{name}" for name in ("AGENT", "DEADLINE", "BACKEND", "JOB_ID", "RUN_ID")),  # ours alone
    "NODE_RANK",  # what other launchers call GROUP_RANK
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),  # the interface that leads to rank 0, where none is given
    # With GPUs: the flight recorder tells who missed a collective.
    *("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
    *("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "NCCL_RAS_ADDR"),
    "TORCHELASTIC_USE_AGENT_STORE",  # our launcher hosts no store: rank 0 does
    "TORCHELASTIC_ERROR_FILE",  # another private file
}
"""Variables of ranks in which torchrun and distlaunch are not alike."""

UNUSUAL = {"BASH_FUNC_f%%": "() {  echo 'a\nb'\n}", "my.var": "é"}
"""Variables that dash, as the sh of many systems, doesn't pass on."""


def environment(directory: Path, **more: str) -> dict[str, str]:
    """The caller's, without what is a launcher's, with this checkout, a TMPDIR and UNUSUAL ones."""
    prefixes = ("PET_", "TORCHELASTIC_", "TORCH_ELASTIC_", "OMP_", "PYTHON", "ACCELERATE_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
    (directory / "tmp").mkdir(exist_ok=True)
    ours = {"PYTHONPATH": str(ROOT), "TMPDIR": str(directory / "tmp"), "CUDA_VISIBLE_DEVICES": ""}
    return kept | ours | UNUSUAL | more


def launch(launcher: list[str], directory: Path, *words: str, **options: Any) -> Done:
    """Run a launcher in `directory` to its end, with what else `options` say: variables, and its `stdin`."""
    stdin = options.pop("stdin", subprocess.DEVNULL)
    env = environment(directory, **options)
    return completed([*launcher, *words], cwd=directory, env=env, stdin=stdin)


def ours(directory: Path, *words: str, **environ: str) -> Done:
    return launch(OURS, directory, *words, **environ)


def as_reference(directory: Path, name: str, port: int = 0) -> Done:
    """Run ours in `directory` with the script and the arguments of one of `REFERENCES`."""
    text, words = REFERENCES[name]
    script(directory, text)
    placed = (word.replace("{port}", str(port)) for word in words)
    return ours(directory, *placed, CUDA_VISIBLE_DEVICES=DEVICES.get(name, ""))


@contextlib.contextmanager
def going(launcher: list[str], directory: Path, *words: str) -> Iterator[Going]:
    """A launcher in `directory` that is ended when the test is."""
    run = Going(directory, [*launcher, *words], cwd=directory, env=environment(directory))
    try:
        yield run
    finally:
        run.kill()


class Ended(NamedTuple):
    """How torchrun went with one of `REFERENCES`, in a directory that several tests read."""

    directory: Path
    port: int
    status: int
    stdout: str
    stderr: str


def run_references(place: Path) -> None:
    """Run torchrun as each of `REFERENCES` says, all at once, in directories below `place`.

    Each is a fork of one process that has imported torch, for that takes longer than all the rest; it then
    does what `python -m torch.distributed.run` does. No two of them have no port but its default.
    """
    runs = []
    for name, (text, words) in REFERENCES.items():
        directory, port = place / name, str(free_port())
        script(directory, text)
        (directory / "tmp").mkdir()
        (directory / "port").write_text(port)
        more = {"TMPDIR": f"{directory}/tmp", "CUDA_VISIBLE_DEVICES": DEVICES.get(name, "")}
        runs.append((str(directory), [word.replace("{port}", port) for word in words], more))
    argv = [sys.executable, "-c", MANY_TORCHRUNS, json.dumps(runs)]
    subprocess.run(argv, cwd=place, env=environment(place), timeout=PATIENCE_S, check=True)


Torchruns = Callable[[str], Ended]


def ended_reference(place: Path, name: str) -> Ended:
    """What `run_references` has left of one."""
    port, status, out, err = (
        (place / name / file).read_text() for file in ("port", "status", "stdout", "stderr")
    )
    return Ended(place / name, int(port), int(status), out, err)


def script(directory: Path, text: str) -> None:
    """Write worker.py."""
    directory.mkdir(exist_ok=True)
    (directory / "worker.py").write_text(textwrap.dedent(text))


def free_port() -> int:
    """A port that was free a moment ago, and that the kernel gives to nobody who asks for any."""
    for port in random.sample(range(20000, 30000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def our_lines(run: Done | Going) -> list[str]:
    """What distlaunch itself said, but for what it found that a test beside this one had just killed."""
    lines = [line for line in run.stderr.splitlines() if line.startswith("distlaunch: ")]
    return [line for line in lines if not line.endswith("left over from a crashed agent")]


def assert_fine(done: Done) -> None:
    """A success about which nothing is said."""
    assert (done.returncode, our_lines(done)) == (0, []), done.stderr


def logs_of(directory: Path) -> set[tuple[str, str]]:
    """(path below the run's directory, text) of each .log file."""
    (run,) = (directory / "logs").iterdir()
    return {(str(path.relative_to(run)), path.read_text()) for path in run.rglob("*.log")}
