"""Helpers that start several launchers, here on one machine, which join one run."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.harness import Going, descendants_of, wait_gone
from tests.process.torchruns import OURS, environment, free_port

PLACES = {
    "c10d": "--rdzv-backend=c10d --rdzv-endpoint=localhost:{port}",
    "c10d, told": "--rdzv-backend=c10d --rdzv-endpoint=localhost:{port} --rdzv-conf=is_host={first}",
    "static": "--master-addr=localhost --master-port={port} --node-rank={node}",
}
"""How launchers are told where they meet, static ones which node each is, others which is the controller."""
LOST = 71
"""The status of launchers that have lost one of them."""


@contextlib.contextmanager
def launcher(
    directory: Path,
    port: int,
    *words: str,
    node: int = 0,
    nodes: int | str = 2,
    meets: str = "static",
    argv: Sequence[str] = OURS,
    args: Sequence[str] = (),
    secret: str = "",
    **environ: str,
) -> Iterator[Going]:
    """One launcher, which ends with the block; the one of `node` 0 is the controller where they are told."""
    where = PLACES[meets].format(port=port, node=node, first=int(node == 0)).split()
    run = Going(
        directory,
        [*argv, f"--nnodes={nodes}", *where, *words, "worker.py", *args],
        cwd=directory,
        env=environment(directory, DISTLAUNCH_SECRET=secret, **environ),
    )
    try:
        yield run
    finally:
        below = descendants_of(run.process.pid)
        run.kill()
        wait_gone(below, 15.0)


@contextlib.contextmanager
def launchers(directory: Path, *words: str, meets: str = "static", count: int = 2) -> Iterator[list[Going]]:
    """The launchers of all nodes."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(launcher(directory, port, *words, node=node, nodes=count, meets=meets))
            for node in range(count)
        ]


def statuses(runs: Sequence[Going]) -> list[int]:
    return [run.wait() for run in runs]


def told(runs: Sequence[Going]) -> str:
    return "\n".join(run.stderr for run in runs)


def workers(runs: Sequence[Going], attempt: int = 0, each: int = 1) -> list[int]:
    """The PIDs of an attempt's workers, so many of each launcher, once all have said that they are ready."""
    found: list[int] = []
    for run in runs:
        pattern = re.compile(rf"ready \d+ (\d+) {attempt} of \d+$", re.MULTILINE)
        run.wait_until(lambda: len(pattern.findall(run.stdout)) >= each, f"attempt {attempt}")  # noqa: B023
        found += map(int, pattern.findall(run.stdout))
    return found
