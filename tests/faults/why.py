"""Jobs that fail in twelve ways, at random ranks and steps, and whether `why` explains them.

python -m tests.faults.why --runs 5

A line tells of each run as it ends, and a table of all. Right: `why` names the culprit, as a fact or as
likely, with its error. A wrong rank or node as a fact is counted apart, since no such answer is allowed.
"""

import argparse
import contextlib
import json
import random
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.figures import markdown
from tests.faults.memory import memory_group
from tests.harness import distlaunch, write_job

LIMIT_S = 120.0
HEAD = """
import datetime, os, sys, time
RANK, BAD, STEP = int(os.environ["RANK"]), int(sys.argv[1]), int(sys.argv[2])
def init(seconds=600, **more):
    global dist, torch
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds), **more)
def train(does, steps=9):
    for step in range(steps):
        if RANK == BAD and step == STEP:
            does()
        dist.all_reduce(torch.ones(1))
def stuck():
    time.sleep(1000)
def computes():
    while True: pass
def raises():
    raise ValueError(f"loss is nan at step {STEP}")
"""
STALL = "on_stall: stop\ntimeouts: {stall: 4s}\n"


class Verdict(NamedTuple):
    """What `why` said of a run, and what was to be said."""

    right: bool
    wrong_fact: bool
    said: str


class Pattern(NamedTuple):
    """A way to fail: a script after HEAD, more of the job file, and what the explanation has to contain.

    `culprit` is whether the failing rank has to be named; `words` are in the cause, the error or the advice.
    """

    script: str
    keys: str = ""
    words: str = ""
    culprit: bool = True
    least: int = 2
    around: Callable[[], contextlib.AbstractContextManager[Mapping[str, Any] | None]] = contextlib.nullcontext

    def judge(self, found: Mapping[str, Any], bad: int) -> Verdict:
        """Compare an explanation, as a JSON object, with what has happened."""
        words = " ".join([found["cause"], *found["error"], *found["waiting"], found["advice"]])
        named = found["rank"] == bad or (found["rank"] is None and f"rank {bad} " in found["cause"])
        right = self.words in words and (named or not self.culprit)
        other = found["rank"] not in (None, bad) and self.culprit
        return Verdict(right, other and found["certainty"] == "fact", f"{found['certainty']}: {words}")


@contextlib.contextmanager
def little_memory() -> Iterator[Mapping[str, Any]]:
    with memory_group(256 << 20) as join:
        yield {"preexec_fn": join}


@contextlib.contextmanager
def taken_port() -> Iterator[Mapping[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {"port": server.getsockname()[1]}


LOSES_ITS_NODE = """
def parent(pid): return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
init()
def lost():
    agent = os.getppid()
    for pid in (parent(agent), agent): os.kill(pid, 9)
    stuck()
train(lost)
"""
PATTERNS = {
    "crash": Pattern("init(); train(raises)", words="ValueError: loss is nan at step"),
    "hang": Pattern("init(); train(stuck)", STALL, "in stuck (worker.py:"),
    "missed collective": Pattern("init(8); train(lambda: dist.barrier())", least=3),
    "straggler": Pattern("init(8); train(computes)", words="computes (worker.py:"),
    "out of memory": Pattern("if RANK == BAD: b'x' * (1 << 30)\nstuck()", words="OOM", around=little_memory),
    "lost node": Pattern(LOSES_ITS_NODE, "nodes: 2\n", "node1 was lost", culprit=False),
    "port taken": Pattern(
        "init()", "rendezvous: {endpoint: '127.0.0.1:PORT'}\n", "in use", culprit=False, around=taken_port
    ),
    "disk full": Pattern(
        "init()\ndef saves():\n  with open('/dev/full', 'w') as file: file.write('x')\ntrain(saves)",
        words="disk is full",
    ),
    "import error": Pattern(
        "if RANK == BAD: import fused_attention\ninit(); train(lambda: 0)", words="No module named"
    ),
    "rank 0 missing": Pattern(
        "if RANK == 0: stuck()\ninit()", "timeouts: {join: 12s}\n", "rank 0", culprit=False
    ),
    "wrong world size": Pattern(
        "init(8, world_size=int(os.environ['WORLD_SIZE']) + 1, rank=RANK)",
        words="its world_size is too large",
        culprit=False,
    ),
    "crash loop": Pattern(
        "init(); train(raises)", "restarts: {max: 2, backoff: 0s}\n", "ValueError: loss is nan"
    ),
}


def failed(name: str, seed: int, directory: Path, most: int = 4) -> Verdict:
    """Run a job of at most so many ranks that fails so, and judge the explanation."""
    chance, pattern = random.Random(f"{name} {seed}"), PATTERNS[name]
    ranks = chance.randint(pattern.least, max(pattern.least, most))
    step = chance.randint(1, 6)
    bad = chance.randrange(ranks)
    keys = f"gpus_per_node: 0\nprocs_per_node: {ranks}\nargs: ['{bad}', '{step}']\n{pattern.keys}"
    if name == "lost node":
        keys, bad = (
            keys.replace(f"procs_per_node: {ranks}", "procs_per_node: 1").replace(f"'{bad}'", "'1'"),
            1,
        )
    with pattern.around() as given:
        options = dict(given or {})
        keys = keys.replace("PORT", str(options.pop("port", "")))
        distlaunch(
            "run", str(write_job(directory, HEAD + pattern.script + "\n", keys)), timeout=LIMIT_S, **options
        )
    (run,) = (directory / "runs").iterdir()
    return pattern.judge(json.loads(distlaunch("why", "--json", str(run), status=0).stdout), bad)


def main() -> int:
    """Run a series from the command line; the table goes to stdout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PATTERNS, default=list(PATTERNS), metavar="PATTERN")
    given = parser.parse_args()
    right, wrong = Counter[str](), Counter[str]()
    for name in given.only:
        for seed in range(given.runs):
            with tempfile.TemporaryDirectory() as directory:
                verdict = failed(name, seed, Path(directory))
            right[name] += verdict.right
            wrong[name] += verdict.wrong_fact
            print(
                f"{name} {seed}: {'right' if verdict.right else 'not right'}: {verdict.said[:300]}",
                file=sys.stderr,
            )
    rows = [[name, f"{right[name]}/{given.runs}", str(wrong[name])] for name in given.only]
    print(
        markdown(
            ["failure", "right", "wrong as a fact"], [*rows, ["all", str(right.total()), str(wrong.total())]]
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
