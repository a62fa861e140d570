"""Commands that start a job are run to their ends in bounded time, and what is left of them is ended."""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.cluster.hosts import GONE_S, Bed
from tests.harness import PATIENCE_S, held, holders_of

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
    statuses: Sequence[int]
    hung: int
    left: int
    took_s: float
    at: float


class _Command:
    """A command that goes on; it prints to files, so that it waits for no reader."""

    def __init__(self, argv: Sequence[str], folder: Path, name: str) -> None:
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            env = {**os.environ, _MARK: str(folder)}
            self.process = subprocess.Popen(
                argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env
            )

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")


def run_all(argvs: Sequence[Sequence[str]], folder: Path, bed: Bed | None) -> Ended:
    """Run commands at the same time, in `folder`, and have nothing left of them, here or on the hosts."""
    before, began = _processes(folder, bed), time.monotonic()
    commands = [_Command(argv, folder, f"command{number}") for number, argv in enumerate(argvs)]
    try:
        hung = _wait(commands)
        ended_at = time.monotonic()
    finally:
        left = _sweep(folder, bed, before)
    statuses = [command.process.wait(PATIENCE_S) for command in commands]
    errs, outs = [command.err for command in commands], [command.out for command in commands]
    return Ended(errs, outs, statuses, hung, left, ended_at - began, ended_at)


def _wait(commands: Sequence[_Command]) -> int:
    """Wait for all to end; how many had to be killed."""
    deadline = time.monotonic() + LIMIT_S
    going = {os.pidfd_open(command.process.pid): command for command in commands}
    try:
        while going and (ended := _readable(list(going), deadline)):
            deadline = min(deadline, time.monotonic() + OTHERS_S)
            for pidfd in ended:
                del going[pidfd]
                os.close(pidfd)
    finally:
        for pidfd, command in going.items():
            os.close(pidfd)
            command.process.kill()
    return len(going)


def _readable(descriptors: Sequence[int], deadline: float) -> list[int]:
    return select.select(descriptors, [], [], max(0.0, deadline - time.monotonic()))[0]


def _processes(folder: Path, bed: Bed | None) -> set[int]:
    return {*holders_of(f"{_MARK}={folder}"), *(bed.processes() if bed else ())}


def _sweep(folder: Path, bed: Bed | None, before: set[int]) -> int:
    """End what is still there after a moment; how many processes that were."""
    with held(_processes(folder, bed) - before) as processes:
        until = time.monotonic() + GONE_S
        left = [pid for pid in processes.pids if not processes.has_ended(pid, until)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):  # it was faster
                os.kill(pid, signal.SIGKILL)
        processes.wait_ends(left, time.monotonic() + PATIENCE_S)
    return len(left)
