"""Commands that run to their end, and the keys and workers of jobs that many tests start."""

import textwrap
from pathlib import Path
from typing import Any

from tests.harness import Done, distlaunch, write_job

ONE = "gpus_per_node: 0\n"
TWO = f"{ONE}procs_per_node: 2\n"
FOUR = f"{TWO}nodes: 2\n"
"""Keys of jobs on the CPU, by their number of ranks."""
SLEEPER = """
    import os, signal
    count, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    os.write(1, f"ready {rank} {os.getpid()} {count} of {os.environ['WORLD_SIZE']}\\n".encode())
    while True:
        signal.pause()
"""
"""A worker that says its place and its attempt, and waits."""


def run_one(directory: Path, worker: str, keys: str = "", *words: str, **options: Any) -> Done:
    """`distlaunch run` of the Python text `worker` on the CPU, by one rank unless `keys` say otherwise."""
    return distlaunch("run", str(write_job(directory, worker, ONE + keys)), *words, **options)


def sleeper(first: str) -> str:
    """A worker that does this, then says its place and waits."""
    return textwrap.dedent(first) + textwrap.dedent(SLEEPER)


STUBBORN = sleeper("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")


def adds(before: str = "pass", after: str = "pass") -> str:
    """A worker that adds up with all others by gloo, and what it does before and after that."""
    return f"""
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        {before}
        total = torch.ones(1)
        dist.all_reduce(total)
        os.write(1, f"sum {{int(total)}}\\n".encode())
        {after}
        dist.barrier()
        dist.destroy_process_group()
    """
