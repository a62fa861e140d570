"""Jobs that start again: workers tell which generation they are of, and whether they see an earlier one."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.cluster.hosts import Bed, Site, find, parent_of
from tests.faults.conftest import Pace
from tests.harness import PATIENCE_S, Run, kill, write_job

NODE_LOST = 71
NOISE_S = 4.0
"""For a busy machine, on top of a promise that is shortened with the pace: late tries are not made up for."""

_OPENING = '''
import os, signal, socket, sys, time

RANK, GENERATION = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]


def earlier():
    """How many processes of this run are there that are not of this generation."""
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
    line = f"ready {rank} {os.getpid()} beside {earlier()} of generation {GENERATION}\\n"
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
    """A worker that has started: how many processes of earlier generations were there then."""

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


def starts(run: Run, generation: int, count: int, within_s: float = PATIENCE_S) -> dict[int, Start]:
    """rank → what it said, once so many of a generation have."""
    run.wait_for(f" of generation {generation}\n", count, within_s)
    rows = re.findall(rb"ready (\d+) (\d+) beside (\d+) of generation %d\n" % generation, run.out)
    return {int(rank): Start(int(pid), int(beside)) for rank, pid, beside in rows}


def pids(started: Mapping[int, Start]) -> list[int]:
    """Their PIDs."""
    return [start.pid for start in started.values()]


def open_gate(gate: Path) -> None:
    """Let the next worker go on that reads the fifo `gate`, as soon as it does."""
    os.close(os.open(gate, os.O_WRONLY))


def kill_agent_and_guardian(rank: int) -> None:
    """Kill the agent of a worker and its guardian so that neither can clean up after the other."""
    agent = parent_of(rank)
    guardian = parent_of(agent)
    kill(guardian, signal.SIGSTOP)
    kill(agent)
    kill(guardian)


def inside(bed: Bed, host: str, program: str, *arguments: str) -> None:
    """Run a program in a host's network, which must succeed."""
    argv = bed.argv("exec", host, "--", str(find(program)), *arguments)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def rule(bed: Bed, host: str, *words: str) -> Iterator[None]:
    """A rule of a host's firewall, for a while."""
    inside(bed, host, "iptables", "-w", "5", "-I", *words)
    try:
        yield
    finally:
        inside(bed, host, "iptables", "-w", "5", "-D", *words)


@contextlib.contextmanager
def closed(bed: Bed, host: str) -> Iterator[None]:
    """A host starts no agents; those that are there go on."""
    refuse = ("--reject-with", "tcp-reset")
    with rule(bed, host, "INPUT", "-p", "tcp", "--dport", str(bed.port), "--syn", "-j", "REJECT", *refuse):
        yield


def fell(bed: Bed, host: str, before: set[int]) -> None:
    """All that has been started on a host since `before` ends at once, as when it crashes."""
    network = os.stat(f"/proc/{bed.hosts[host].pid}/ns/net").st_ino
    fallen = []
    for pid in bed.processes() - before:
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}/ns/net").st_ino == network:
                fallen.append(pid)
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none sees another's end
        for pid in fallen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


def lost_within_s(pace: Pace) -> float:
    """So soon a node that can't be reached is told to be lost."""
    return min(20.0, pace.lease_s * 2 / 3 + NOISE_S)
