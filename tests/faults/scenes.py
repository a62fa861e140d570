"""Jobs of the catalog's tests, how they end, and what must be gone then."""

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.cluster.hosts import Bed, Node, Site, parent_of
from tests.cluster.workers import worker
from tests.faults.figures import Figures, Pace
from tests.harness import PATIENCE_S, Run, children_of, held, kill, running, write_job

CPU = "nodes: 2\ngpus_per_node: 0\nprocs_per_node: 2\n"
ONE = "gpus_per_node: 0\n"
NODE_LOST, INTERRUPTED = 71, 130
NOISE_S = 4.0
"""For a busy machine, on top of a promise that is shortened with the pace: late tries are not made up for."""
RANKS = 4
"""Of `CPU` and `on_hosts`."""


def on_hosts(bed: Bed) -> str:
    """The part of a job file for four ranks on three hosts, over ssh or as the bed has it."""
    nodes = "nodes: [{host: host1, procs: 1}, {host: host2, procs: 2}, {host: host3, procs: 1}]"
    how = json.dumps(bed.launcher or {"ssh": {"config": f"{bed.directory}/ssh_config"}})[1:-1]
    return f"gpus_per_node: 0\n{nodes}\n{how}\n"


def stop_after(seconds: float) -> tuple[str, str]:
    """The option that sets the grace."""
    return "--set", f"timeouts.stop={seconds:g}s"


LEAVES = worker("""
    def leave(*_):
        print("finished by itself", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGUSR1, leave)
    ready()
    wait()
""")
"""Ends with 0, by a signal of its own."""


class Ending(NamedTuple):
    """How a run has to end: its status, what it says, and the seconds that all may take.

    Where a parent of our own is killed, its children are reaped by init, `reaped` or not.
    """

    status: int
    words: str
    within_s: float
    reaped: bool = True


KILLED = "killed by signal 9 (SIGKILL)"
SIGKILLED = 128 + signal.SIGKILL


def killed(rank: int, node: str, within_s: float = 2.0) -> Ending:
    """How a run ends whose rank is killed by SIGKILL."""
    return Ending(SIGKILLED, f"rank {rank} ({node}) failed first: {KILLED}", within_s)


def family(run: Run, ranks: Iterable[int]) -> set[int]:
    """The processes of a run as they are now: these ranks, their agents and guardians, the links."""
    agents = {parent_of(pid) for pid in ranks}
    return {*ranks, *agents, *map(parent_of, agents), *children_of(run.process.pid)}


@contextlib.contextmanager
def clean(run: Run, pids: Mapping[int, int], figures: Figures, ending: Ending) -> Iterator[None]:
    """The body injects a fault; then the run ends as told, and nothing of it is left on any node.

    `pids` are the ranks' and whatever else must be gone. Time runs from the end of the body.
    """
    with held(family(run, pids.values())) as processes:
        yield
        began = time.monotonic()
        processes.wait_ends(pids.values(), began + PATIENCE_S)
        figures("all ranks gone", time.monotonic() - began, at_most=ending.within_s)
        ends(run, figures, ending, began)
        processes.wait_ends(processes.pids, began + ending.within_s + 1.0)
        if ending.reaped:
            processes.wait_reaped(time.monotonic() + 1.0)


@contextlib.contextmanager
def ends_clean(
    job: Path, figures: Figures, ending: Ending, *options: str, ready: int = RANKS, **more: Any
) -> Iterator[tuple[Run, dict[int, int]]]:
    """A run and its PIDs, once so many are `ready`; the body injects a fault, after which it ends `clean`."""
    with running(job, *options, **more) as run:
        pids = run.wait_ready(ready)
        with clean(run, pids, figures, ending):
            yield run, pids


def ends(run: Run, figures: Figures, ending: Ending, began: float) -> None:
    """The command ends as told, in time since `began`, and leaves no worker."""
    status = run.wait()
    figures("the command ended", time.monotonic() - began, at_most=ending.within_s)
    assert status == ending.status, run.stderr
    assert ending.words in run.stderr, run.stderr
    assert run.holders() == []
    assert_no_traceback(run.stderr)


def assert_no_traceback(stderr: str) -> None:
    """Neither the command nor an agent shows a traceback of its own; those of workers have a prefix."""
    assert not re.search(r"^Traceback|distlaunch/\w+/\w+\.py", stderr, re.MULTILINE), stderr


# Jobs that restart


def here(directory: Path, text: str, **keys: Any) -> Path:
    """A job on this machine whose workers have this text; a CPU job unless `keys` say otherwise."""
    return write_job(directory, text, yaml.safe_dump({"gpus_per_node": 0} | keys))


def there(site: Site, hosts: Sequence[Node], text: str, pace: Pace | None = None, **keys: Any) -> Path:
    """A job with one such worker on each of these hosts."""
    (site.directory / "worker.py").write_text(text)
    timeouts = (pace.keys if pace else {}) | keys.pop("timeouts", {})
    return site.job(hosts, command=[sys.executable, "worker.py"], timeouts=timeouts, **keys)


def starts(run: Run, attempt: int, count: int, within_s: float = PATIENCE_S) -> dict[int, int]:
    """rank → pid, once so many workers of an attempt are ready."""
    run.wait_for(f" of attempt {attempt}\n", count, within_s)
    rows = re.findall(rb"ready (\d+) (\d+) beside \d+ of attempt %d\n" % attempt, run.out)
    return {int(rank): int(pid) for rank, pid in rows}


def earlier_seen(run: Run, attempt: int) -> int:
    """How many processes of earlier attempts the workers of this one have seen at their start."""
    return sum(map(int, re.findall(rb" beside (\d+) of attempt %d\n" % attempt, run.out)))


@contextlib.contextmanager
def started_run(job: Path, count: int, **options: Any) -> Iterator[tuple[Run, dict[int, int]]]:
    """A run, and rank → pid once so many workers have started."""
    with running(job, **options) as run:
        yield run, run.wait_ready(count)


def kill_agent_and_guardian(rank: int) -> None:
    """Kill the agent of a worker and its guardian so that neither can clean up after the other."""
    agent = parent_of(rank)
    guardian = parent_of(agent)
    kill(agent, signal.SIGSTOP)  # first, since it resumes a guardian that was stopped
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
