"""Measures the cost of output: large output over ssh and locally, and a rank with a stuck terminal."""

import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path

from .contest import Bar, Contest, Timed, command, shell
from .starting import OURS

MB_OVER_SSH, MB_HERE, RANKS_HERE = 100, 50, 8
LINES = 20_000
_PRINTS = """
import sys
line = b"%s 0.123456789 lr=0.0003 tokens/s=123456\\n" % (b"x" * 40)
block = line * 1000
for _ in range(int(sys.argv[1]) * 1000000 // len(block)):
    sys.stdout.buffer.write(block)
"""
_PACED = """
import sys, time
began = time.perf_counter()
for number in range(int(sys.argv[1])):
    print("step", number, flush=True)
    ahead = began + number / 10_000 - time.perf_counter()
    if ahead > 0.002:
        time.sleep(ahead)
open(sys.argv[2], "w").write(str(time.perf_counter() - began))
"""


def over_ssh(directory: Path, ssh_config: Path) -> Contest:
    """Two ranks on two hosts print 100 MB each."""
    script = directory / "prints.py"
    script.write_text(_PRINTS)
    job = directory / "prints.yaml"
    job.write_text(
        f"script: prints.py\nargs: ['{MB_OVER_SSH}']\ngpus_per_node: 0\nnodes: [host1, host2]\n"
        f"python: {sys.executable}\nssh: {{config: {ssh_config}}}\n"
    )
    run = f"{sys.executable} -m distlaunch run --quiet {job} --set logs.dir={directory}/runs"
    bare = " & ".join(
        f"ssh -F {ssh_config} host{i} {sys.executable} -u {script} {MB_OVER_SSH} >{directory}/host{i}.out"
        for i in (1, 2)
    )
    ways = {
        "distlaunch, shown and kept": _swept(shell(f"{run} | cat >/dev/null"), directory),
        "distlaunch, kept": _swept(shell(f"{run} --set logs.console=none"), directory),
        "parallel ssh, output to files": shell(f"{bare}; wait"),
    }
    other = "parallel ssh, output to files"
    bars = (Bar(other, 1.5, 1.2), Bar(other, 1.25, 1.1, ours="distlaunch, kept"))
    return Contest(f"2 ranks over ssh print {MB_OVER_SSH} MB each", ways, bars)


def here(directory: Path) -> Contest:
    """Eight ranks on this machine print 50 MB each."""
    script = directory / "prints.py"
    script.write_text(_PRINTS)
    job = directory / "prints_here.yaml"
    job.write_text(
        f"script: prints.py\nargs: ['{MB_HERE}']\ngpus_per_node: 0\nprocs_per_node: {RANKS_HERE}\n"
    )
    run = f"{sys.executable} -m distlaunch run --quiet {job} --set logs.dir={directory}/runs"
    ways = {"distlaunch": _swept(shell(f"{run} | cat >/dev/null"), directory)}
    if shutil.which("mpirun"):
        root = "--allow-run-as-root" if os.geteuid() == 0 else ""
        tagged = f"mpirun {root} --oversubscribe --tag-output -n {RANKS_HERE}"
        ways["mpirun --tag-output"] = shell(f"{tagged} {sys.executable} {script} {MB_HERE} | cat >/dev/null")
    missing = [] if len(ways) > 1 else ["mpirun --tag-output"]
    bars = (Bar("mpirun --tag-output", 0.8, 0.5),)
    return Contest(f"{RANKS_HERE} ranks here print {MB_HERE} MB each", ways, bars, missing)


def stuck_terminal(directory: Path) -> Contest:
    """A rank prints 10,000 lines a second to a terminal that no process reads, and to a file."""
    script, took, job = directory / "paced.py", directory / "took", directory / "paced.yaml"
    script.write_text(_PACED)
    job.write_text(f"script: paced.py\nargs: ['{LINES}', {took}]\ngpus_per_node: 0\n")

    def ours() -> float:
        reader, terminal = pty.openpty()  # never read, so it is full after some kilobytes
        argv = [*OURS, "run", str(job), "--set", f"logs.dir={directory}/runs"]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal)
        os.close(terminal)
        try:
            while not took.exists() or not took.read_text():
                if process.poll() is not None:
                    break
                time.sleep(0.01)  # a check is cheap, but not free
        finally:
            process.kill()
            process.wait()
            os.close(reader)
        return _taken(took)

    def to_a_file() -> float:
        with (directory / "paced.out").open("wb") as file:
            command([sys.executable, "-u", str(script), str(LINES), str(took)], stdout=file)()
        return _taken(took)

    bars = (Bar("> file", 1.02, 1.0),)
    return Contest(f"a rank prints {LINES} lines", {"stuck terminal": ours, "> file": to_a_file}, bars)


def _taken(took: Path) -> float:
    seconds = float(took.read_text())
    took.unlink()
    return seconds


def _swept(once: Timed, directory: Path) -> Timed:
    """Return `once` with its log files deleted afterwards, so they don't fill the disk."""

    def then() -> float:
        took = once()
        shutil.rmtree(directory / "runs", ignore_errors=True)
        return took

    return then
