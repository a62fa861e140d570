"""Measures the cost of a run while its ranks work, and the time for restarting and ending it."""

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .contest import Contest
from .starting import OURS

RANKS, MANY, SETTLED_S, IDLE_S, LIMIT_S = 8, 64, 30.0, 20.0, 60.0
_WAITS = """
import os, signal, sys
if os.environ["RANK"] == "0" and len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    sys.exit(1)
signal.pause()
"""


def memory(directory: Path) -> Contest:
    """Measure private memory in MiB."""
    ways = {
        f"agent and guardian of {RANKS} ranks": lambda: _of_agent(directory),
        f"controller of {MANY} ranks": lambda: _of_controller(directory),
    }
    return Contest("memory at rest", ways, unit="MiB", limits=(16.0, 64.0))


def idle(directory: Path) -> Contest:
    """Measure CPU time of an idle run in percent of one core."""
    ways = {f"agent and guardian of {RANKS} ranks": lambda: _share_of_agent(directory)}
    return Contest(f"CPU at rest, over {IDLE_S:g} s", ways, unit="%", limits=(0.1,))


def ending(directory: Path) -> Contest:
    """Measure the seconds from the end of a rank until all ranks have restarted, and until all have ended."""
    ways = {
        "restart": lambda: _after_failure(directory, 1, "WorkerStarted"),
        "tear-down": lambda: _after_failure(directory, 0, "WorkerExited"),
    }
    return Contest(f"{RANKS} ranks here, one of which fails", ways)


@contextlib.contextmanager
def _running(
    directory: Path, ranks: int, starts: int, restarts: int = 0, *args: str
) -> Iterator[tuple[int, Path]]:
    """Yield the process and directory of a run that has started that many ranks, or has ended."""
    runs = directory / "runs"
    before = set(runs.glob("*"))
    process = subprocess.Popen(_argv(directory, ranks, restarts, *args), stderr=subprocess.DEVNULL)
    try:
        _wait(lambda: set(runs.glob("*")) - before)
        (run,) = set(runs.glob("*")) - before
        _wait(lambda: process.poll() is not None or _count(run, "WorkerStarted") == starts)
        yield process.pid, run
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)


def _argv(directory: Path, ranks: int, restarts: int, *args: str) -> list[str]:
    script, job = directory / "waits.py", directory / "waits.yaml"
    script.write_text(_WAITS)
    keys = {"script": str(script), "args": args, "gpus_per_node": 0, "procs_per_node": ranks}
    more = {"restarts": restarts, "timeouts": {"join": "none"}, "logs": {"dir": str(directory / "runs")}}
    job.write_text(json.dumps({**keys, **more}))
    return [*OURS, "run", "--quiet", str(job)]


def _wait(holds: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit("the ranks did not start")
        time.sleep(0.02)


def _events(run: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError):
        whole, _, _ = (run / "events.jsonl").read_text().rpartition("\n")  # the last line may be incomplete
        return [json.loads(line) for line in whole.splitlines()]
    return []


def _count(run: Path, name: str) -> int:
    return sum(event.get("event") == name for event in _events(run))


def _of_agent(directory: Path) -> float:
    with _running(directory, RANKS, RANKS) as (pid, _):
        return sum(_private_mib(each) for each in _agent(pid))


def _of_controller(directory: Path) -> float:
    with _running(directory, MANY, MANY) as (pid, _):
        return _private_mib(pid)


def _share_of_agent(directory: Path) -> float:
    with _running(directory, RANKS, RANKS) as (pid, _):
        pids = _agent(pid)
        time.sleep(SETTLED_S)  # until then, the agent checks whether they join a rendezvous
        before = sum(map(_cpu_s, pids))
        time.sleep(IDLE_S)
        return 100 * (sum(map(_cpu_s, pids)) - before) / IDLE_S


def _after_failure(directory: Path, restarts: int, until: str) -> float:
    failed = directory / "failed"
    failed.unlink(missing_ok=True)
    with _running(directory, RANKS, 2 * RANKS, restarts, str(failed)) as (_, run):
        pass
    events = _events(run)
    at = next(event["t"] for event in events if event.get("event") == "WorkerExited" and event["status"] == 1)
    return float([event["t"] for event in events if event.get("event") == until][: RANKS * 2][-1] - at)


def _agent(pid: int) -> list[int]:
    """Return the guardian, which is a child of the command, and the agent, which is its child."""
    (guardian,) = _children(pid)
    (agent,) = _children(guardian)
    return [guardian, agent]


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _private_mib(pid: int) -> float:
    rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return sum(int(row[1]) for row in rows if row[0].startswith("Private_")) / 1024


def _cpu_s(pid: int) -> float:
    """Return the CPU time in seconds, to the nanosecond, unlike /proc/PID/stat."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
