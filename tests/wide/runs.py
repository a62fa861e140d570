"""Runs of so many nodes as are wanted, whose agents are the stand-in's, and what they cost the controller."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.harness import ROOT, distlaunch_argv, program

TICKS = os.sysconf("SC_CLK_TCK")
LIMIT_S = 120.0


class Cost(NamedTuple):
    """How a run ended, and what the controller took: CPU and wall time in seconds, memory in MiB.

    `stopping_s` is from the first rank's failure, as it was heard, until the last node was gone.
    """

    status: int
    stderr: str
    cpu_s: float
    wall_s: float
    memory_mib: float
    stopping_s: float | None


def run(directory: Path, nodes: int, procs: int = 8, wide: str = "end", *words: str) -> Cost:
    """A job of so many nodes with `procs` ranks each; `wide` is what the stand-in is told."""
    directory.mkdir(parents=True, exist_ok=True)
    program(directory / "srun", f'exec {shlex.quote(sys.executable)} -m tests.wide.srun "$@"')
    job = directory / "job.yaml"
    job.write_text(
        f"command: ['true']\nnodes: {nodes}\nprocs_per_node: {procs}\ngpus_per_node: 0\nbackend: gloo\n"
        "timeouts: {connect: 4m}\n"
    )
    os.mkfifo(gate := directory / "gate")
    path = {"PATH": f"{directory}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": f"n[0001-{nodes:04}]", "SLURM_CONF": "/dev/null"}
    environ = {**os.environ, **path, **slurm, "WIDE": wide, "WIDE_GATE": str(gate)}
    argv, null = distlaunch_argv("run", str(job), *words), subprocess.DEVNULL
    began = time.monotonic()
    with (directory / "stderr").open("wb") as err:
        child = subprocess.Popen(argv, env=environ, cwd=directory, stdin=null, stdout=null, stderr=err)
    if wide.startswith("fail"):
        _await_ranks(child, directory / "runs", nodes * procs)
        os.close(os.open(gate, os.O_RDWR | os.O_NONBLOCK))  # it waits for nobody who might have ended
    memory = _watched(child)
    wall_s = time.monotonic() - began
    # Ended and not yet reaped: these are its own, without its children's.
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS
    status, said = child.wait(), (directory / "stderr").read_text()
    return Cost(status, said, cpu_s, wall_s, memory, _stopping(directory / "runs"))


def _runs(child: "subprocess.Popen[bytes]") -> bool:
    """Whether it has not ended; it is not reaped."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None


def _await_ranks(child: "subprocess.Popen[bytes]", runs: Path, count: int) -> None:
    """Wait until so many ranks have started, or the command has ended."""
    while _runs(child):
        paths = [*runs.glob("*/events.jsonl")]
        if sum(path.read_bytes().count(b'"WorkerStarted"') for path in paths) >= count:
            return
        time.sleep(0.05)


def _stopping(runs: Path) -> float | None:
    lines = (line for path in runs.glob("*/events.jsonl") for line in path.read_text().splitlines())
    events = [json.loads(line) for line in lines]
    failed = [event["t"] for event in events if event.get("event") == "WorkerExited" and event["status"]]
    return events[-1]["t"] - min(failed) if failed else None


def _watched(child: "subprocess.Popen[bytes]") -> float:
    """Wait for its end without reaping it; its largest memory in MiB."""
    most, deadline = 0.0, time.monotonic() + LIMIT_S
    while _runs(child):
        if time.monotonic() > deadline:
            child.kill()
        peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{child.pid}/status").read_text())
        most = max(most, int(peak[1]) / 1024) if peak else most
        time.sleep(0.02)
    return most


def main() -> None:
    """Print what runs of these sizes cost: python -m tests.wide.runs [NODES …]."""
    import argparse
    import tempfile

    parser = argparse.ArgumentParser(prog="python -m tests.wide.runs", description=__doc__)
    parser.add_argument("nodes", type=int, nargs="*", default=[10, 100, 1000])
    sizes = parser.parse_args().nodes
    print(" nodes what         status   CPU s  ms/node  wall s    MiB stop s")
    for nodes in sizes:
        for wide in ("end", f"fail {nodes * 4}", "print 20"):
            with tempfile.TemporaryDirectory() as name:
                cost = run(Path(name), nodes, 8, wide)
                each = 1000 * cost.cpu_s / nodes
                figures = f"{cost.cpu_s:7.2f} {each:8.2f} {cost.wall_s:7.2f} {cost.memory_mib:6.0f}"
                stopping = "" if cost.stopping_s is None else f"{cost.stopping_s:6.2f}"
                print(f"{nodes:6} {wide:12} {cost.status:6} {figures} {stopping}", flush=True)


if __name__ == "__main__":
    main()
