"""Jobs that restart: workers tell which attempt they are of, and whether they see an earlier one."""

import contextlib
import re
import signal
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.cluster.hosts import Site, parent_of
from tests.faults.figures import Pace
from tests.faults.scenes import assert_no_traceback
from tests.harness import PATIENCE_S, Run, kill, running, write_job

NODE_LOST, INTERRUPTED = 71, 130
NOISE_S = 4.0
"""For a busy machine, on top of a promise that is shortened with the pace: late tries are not made up for."""

_OPENING = '''
import os, signal, socket, sys, time
RANK, ATTEMPT = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
def earlier():
    """How many processes of this run are there that are not of this attempt."""
    names = "DISTLAUNCH_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
    run, own = (f"{name}={os.environ[name]}\\0" for name in names)
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = open(f"/proc/{pid}/environ", errors="replace").read()
        except OSError:
            continue
        found += run in environ and own not in environ
    return found
def ready(rank=RANK):
    line = f"ready {rank} {os.getpid()} beside {earlier()} of attempt {ATTEMPT}\\n"
    os.write(1, line.encode())
def resist():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def wait():
    while True:
        signal.pause()
def daemon():
    """Two forks and a session away; it ends by itself if nobody ends it."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.alarm(120)
            ready(100 + int(RANK))
            signal.pause()
        os._exit(0)
    os.wait()
'''

SLEEPER = "ready()\nwait()"
STUBBORN = "resist()\nready()\nwait()"


class Start(NamedTuple):
    """A worker that has started: how many processes of earlier attempts were there then."""

    pid: int
    beside: int


def worker(does: str) -> str:
    """The text of a worker."""
    return f"{_OPENING}\n\n{textwrap.dedent(does)}\n"


def here(folder: Path, does: str, **keys: Any) -> Path:
    """A job on this machine whose workers do so; a CPU job unless `keys` say otherwise."""
    return write_job(folder, worker(does), yaml.safe_dump({"gpus_per_node": 0} | keys))


def there(site: Site, hosts: list[str], does: str, pace: Pace, **keys: Any) -> Path:
    """A job with one such worker on each of these hosts."""
    (site.folder / "worker.py").write_text(worker(does))
    timeouts = pace.keys | keys.pop("timeouts", {})
    return site.job(hosts, command=[sys.executable, "worker.py"], timeouts=timeouts, **keys)


def starts(run: Run, attempt: int, count: int, within_s: float = PATIENCE_S) -> dict[int, Start]:
    """rank → what it said, once so many of an attempt have."""
    run.wait_for(f" of attempt {attempt}\n", count, within_s)
    rows = re.findall(rb"ready (\d+) (\d+) beside (\d+) of attempt %d\n" % attempt, run.out)
    return {int(rank): Start(int(pid), int(beside)) for rank, pid, beside in rows}


@contextlib.contextmanager
def started_run(job: Path, count: int, **options: Any) -> Iterator[tuple[Run, dict[int, Start]]]:
    """A run of which so many workers have started."""
    with running(job, **options) as run:
        yield run, starts(run, 0, count)


def pids(started: Mapping[int, Start]) -> list[int]:
    """Their PIDs."""
    return [start.pid for start in started.values()]


def kill_agent_and_guardian(rank: int) -> None:
    """Kill the agent of a worker and its guardian so that neither can clean up after the other."""
    agent = parent_of(rank)
    guardian = parent_of(agent)
    kill(guardian, signal.SIGSTOP)
    kill(agent)
    kill(guardian)


def lost_within_s(pace: Pace) -> float:
    """So soon a node that can't be reached is told to be lost."""
    return min(20.0, pace.lease_s * 2 / 3 + NOISE_S)


def interrupted(run: Run) -> None:
    """Ctrl-C ends the run, everywhere."""
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == INTERRUPTED
    assert run.holders() == []


def lost(run: Run) -> None:
    """The run ends as one that has lost a node, everywhere."""
    assert run.wait() == NODE_LOST
    assert_no_traceback(run.stderr)
    assert run.holders() == []
