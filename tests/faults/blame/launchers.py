"""The launchers that are asked: each runs a script that fails, here or over hosts, in bounded time."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.hosts import GONE_S, Bed
from tests.faults.blame.cases import Case
from tests.faults.blame.verdicts import Opinion, of_distlaunch, of_torchrun
from tests.harness import PATIENCE_S, distlaunch_argv, held, holders_of

PORT = 29513
LIMIT_S = 120.0
"""A job may take so long in all."""
OTHERS_S = 15.0
"""A node's command may take so long once another node's has ended."""
_MARK = "BLAME_RUN"


class Ended(NamedTuple):
    """Commands that have ended, and the time (monotonic) of the last end; `texts` are what each printed.

    `hung`: commands that had to be killed; `left`: processes that had to be, a moment after the commands.
    """

    texts: Sequence[str]
    outs: Sequence[str]
    hung: int
    left: int
    took_s: float
    at: float


def run_all(argvs: Sequence[Sequence[str]], directory: Path, bed: Bed | None) -> Ended:
    """Run commands at the same time, in `directory`, and have nothing left of them, here or on the hosts.

    They print to files, so that they wait for no reader.
    """
    before, began, env = _processes(directory, bed), time.monotonic(), {**os.environ, _MARK: str(directory)}
    commands, texts = [], [(directory / f"{i}.out", directory / f"{i}.err") for i in range(len(argvs))]
    for argv, (out, err) in zip(argvs, texts, strict=True):
        with out.open("wb") as stdout, err.open("wb") as stderr:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
            commands.append(subprocess.Popen(argv, cwd=directory, env=env, **streams))
    try:
        hung = _wait(commands)
        ended_at = time.monotonic()
    finally:
        left = _sweep(directory, bed, before)
    for command in commands:
        command.wait(PATIENCE_S)
    outs, errs = ([path.read_text(errors="replace") for path in paths] for paths in zip(*texts, strict=True))
    return Ended(errs, outs, hung, left, ended_at - began, ended_at)


def _wait(commands: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Wait for all to end; how many had to be killed."""
    deadline = time.monotonic() + LIMIT_S
    with held([command.pid for command in commands]) as processes:
        for command in commands:
            if processes.has_ended(command.pid, deadline):
                deadline = min(deadline, time.monotonic() + OTHERS_S)
    hung = [command for command in commands if command.poll() is None]
    for command in hung:
        command.kill()
    return len(hung)


def _processes(directory: Path, bed: Bed | None) -> set[int]:
    return {*holders_of(f"{_MARK}={directory}"), *(bed.processes() if bed else ())}


def _sweep(directory: Path, bed: Bed | None, before: set[int]) -> int:
    """End what is still there after a moment; how many processes that were."""
    with held(_processes(directory, bed) - before) as processes:
        until = time.monotonic() + GONE_S
        left = [pid for pid in processes.pids if not processes.has_ended(pid, until)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):  # it was faster
                os.kill(pid, signal.SIGKILL)
        processes.wait_ends(left, time.monotonic() + PATIENCE_S)
    return len(left)


class Outcome(NamedTuple):
    """What came of one run.

    `down_s` are the seconds from the end of whichever rank failed first to that of the command; None where
    that is not known, as of torchrun.
    """

    opinion: Opinion
    ended: Ended
    down_s: float | None = None


def _shape(case: Case, bed: Bed | None) -> tuple[int, int]:
    """Nodes, and ranks of each: all here; over hosts one on each of two or three, or two on each of two."""
    if bed is None:
        return 1, case.ranks
    return (3, 1) if case.ranks == 3 else (2, case.ranks // 2)


def by_distlaunch(case: Case, directory: Path, bed: Bed | None) -> Outcome:
    """One `distlaunch run`, here, also where its ranks are on hosts."""
    path = directory / "job.yaml"
    path.write_text(json.dumps(_job(case, bed)))
    ended = run_all([distlaunch_argv("run", str(path), "--json")], directory, bed)
    try:
        document = json.loads(ended.outs[0])
    except ValueError:
        return Outcome(Opinion(0.0, "nothing", ["--json: no result"]), ended)
    first = _first_failure(Path(document["directory"]))
    down_s = ended.at - first if first else None
    return Outcome(of_distlaunch(case, document, ended.texts[0]), ended, down_s)


def _job(case: Case, bed: Bed | None) -> dict[str, Any]:
    script, *arguments = case.argv
    nodes, procs = _shape(case, bed)
    job = {"script": script, "args": arguments, "gpus_per_node": 0, "procs_per_node": procs}
    if bed is None:
        return {**job, "nodes": nodes}
    return {**job, "nodes": list(bed.hosts)[:nodes], "ssh": {"config": str(bed.directory / "ssh_config")}}


def _first_failure(directory: Path) -> float | None:
    """When the first rank that failed has ended (monotonic)."""
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    began = events[0]["time"] - events[0]["t"] - (time.time() - time.monotonic())
    failed = [event for event in events if event["event"] == "WorkerExited" and event["status"]]
    return min((began + event["at"] for event in failed), default=None)


def by_torchrun(case: Case, directory: Path, bed: Bed | None) -> Outcome:
    """torchrun, over hosts as people start it by hand on each of them."""
    ended = run_all(_torchruns([sys.executable, "-m", "torch.distributed.run"], case, bed), directory, bed)
    return Outcome(of_torchrun(case, ended.texts), ended)


def by_joined(case: Case, directory: Path, bed: Bed | None) -> Outcome:
    """`distlaunch torchrun`, started by hand in the same way: its launchers join one run."""
    ended = run_all(_torchruns(distlaunch_argv("torchrun"), case, bed), directory, bed)
    logs = re.search(r"logs: (\S+)", ended.texts[0])
    if not logs:
        return Outcome(Opinion(0.0, "nothing", ["no summary"]), ended)
    document = json.loads(Path(logs[1], "summary.json").read_text())
    return Outcome(of_distlaunch(case, document, ended.texts[0]), ended)


def _torchruns(launcher: Sequence[str], case: Case, bed: Bed | None) -> Sequence[Sequence[str]]:
    """The command lines of a torchrun, or of one that takes its flags, on each node."""
    nodes, procs = _shape(case, bed)
    words = [*launcher, f"--nproc-per-node={procs}"]
    if bed is None:
        return [[*words, "--standalone", *case.argv]]
    hosts = list(bed.hosts.values())[:nodes]
    words += [f"--nnodes={nodes}", f"--master-addr={hosts[0].address}", f"--master-port={PORT}"]
    return [
        bed.argv("exec", host.name, "--", *words, f"--node-rank={number}", *case.argv)
        for number, host in enumerate(hosts)
    ]


LAUNCHERS: Mapping[str, Callable[[Case, Path, Bed | None], Outcome]] = {
    "distlaunch": by_distlaunch,
    "distlaunch torchrun": by_joined,
    "torchrun": by_torchrun,
}
