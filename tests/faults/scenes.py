"""What the tests of the catalogue share: workers as texts, processes held and measured, a clean end."""

import contextlib
import json
import os
import re
import signal
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.hosts import Bed, parent_of
from tests.faults.figures import Figures
from tests.harness import PATIENCE_S, Run, children_of, held, running

CPU = "nodes: 2\ngpus_per_node: 0\nprocs_per_node: 2\n"
ONE = "gpus_per_node: 0\n"
RANKS = 4
"""Of `CPU` and `on_hosts`."""


def on_hosts(bed: Bed) -> str:
    """The part of a job file for four ranks on three hosts, over ssh or as the bed has it."""
    nodes = "nodes: [{host: host1, procs: 1}, {host: host2, procs: 2}, {host: host3, procs: 1}]"
    how = json.dumps(bed.launcher or {"ssh": {"config": f"{bed.folder}/ssh_config"}})[1:-1]
    return f"gpus_per_node: 0\n{nodes}\n{how}\n"


def stop_after(seconds: float) -> tuple[str, str]:
    """The option that sets the grace."""
    return "--set", f"timeouts.stop={seconds:g}s"


def worker(does: str = "while True: signal.pause()", first: str = "") -> str:
    """A worker that does `first`, says that it is ready, and then what it `does`."""
    says = r"""os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\n".encode())"""
    parts = ["import os, signal, sys", textwrap.dedent(first), says, textwrap.dedent(does)]
    return "\n".join(parts) + "\n"


IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
SLEEPER = worker()
STUBBORN = worker(first=IGNORES)
LEAVES = worker(first="signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))")
"""Ends with 0, by a signal of its own."""


def open_gate(gate: Path) -> None:
    """Let the one worker go on that reads the fifo `gate`, as soon as it does."""
    os.close(os.open(gate, os.O_WRONLY))


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
