"""Random kills of runs whose launchers somebody else started: all must be clean, and the cause told.

python -m tests.faults.launcher_kills --kills 100 --seed 7
"""

import argparse
import contextlib
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.cluster.hosts import Bed, bed_of, parent_of
from tests.cluster.test_launchers import Launcher, launchers
from tests.faults.strikes import WORKER
from tests.harness import kill, wait_gone

HOSTS, PROCS, GRACE_S = 3, 2, 2
LIMIT_S, CUT_LIMIT_S = GRACE_S + 4.0, 30.0
"""Until all is clean: at once, or after 15 s without an answer, the grace, and the guardian's look."""


class Kind(NamedTuple):
    """Who is hit: of a launcher and one of its workers, by their PIDs; 0 = the host's network is cut.

    `statuses` are those that the other launchers may end with, `tells` is what one of them must say.
    """

    victim: Callable[[int, int], int]
    signum: signal.Signals
    statuses: tuple[int, ...]
    tells: str


KILLED = r"killed by signal 9 \(SIGKILL\)"
LOST = r"{host} was lost|lost the controller"
KINDS = {
    "worker": Kind(lambda launcher, worker: worker, signal.SIGKILL, (137,), rf"failed first: {KILLED}"),
    "agent": Kind(lambda launcher, worker: parent_of(worker), signal.SIGKILL, (71,), LOST),
    "launcher": Kind(lambda launcher, worker: launcher, signal.SIGKILL, (71,), LOST),
    "launcher SIGTERM": Kind(lambda launcher, worker: launcher, signal.SIGTERM, (143,), "stopped by SIGTERM"),
    "launcher SIGINT": Kind(lambda launcher, worker: launcher, signal.SIGINT, (130,), "stopped by SIGINT"),
    "network": Kind(lambda launcher, worker: 0, signal.SIGKILL, (71,), LOST),
}


def strike(bed: Bed, folder: Path, name: str, number: int) -> float:
    """Start a run, hit launcher `number` or what is below it; seconds until all is clean."""
    kind, before = KINDS[name], bed.processes()
    words = (f"--shutdown-timeout={GRACE_S}",)
    with launchers(bed, folder, WORKER, *[PROCS] * HOSTS, words=words) as runs:
        workers = [sorted(run.wait_ready(PROCS).values()) for run in runs]
        target = runs[number].process.pid
        victim = kind.victim(target, workers[number][0])
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            if victim:
                kill(victim, kind.signum)
            else:
                bed.call("cut", f"host{number + 1}")
                stack.callback(bed.call, "heal", f"host{number + 1}")
            wait_gone(sorted(bed.processes() - before), LIMIT_S if victim else CUT_LIMIT_S)
        clean_s = time.monotonic() - began
        others = [run for i, run in enumerate(runs) if i != number or victim != target]
        _check_told(others, kind, f"host{number + 1}")
    return clean_s


def _check_told(runs: list[Launcher], kind: Kind, host: str) -> None:
    statuses = {run.wait() for run in runs}
    said = "\n".join(run.stderr for run in runs)
    assert statuses <= set(kind.statuses), (statuses, said)
    assert re.search(kind.tells.format(host=host), said), said
    assert not re.search(r'File "\S+/distlaunch/', said), said


def main() -> None:
    """Kill as often as asked, and print what it came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int.from_bytes(random.randbytes(2), "big"))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    chance, longest = random.Random(options.seed), dict.fromkeys(KINDS, 0.0)
    with tempfile.TemporaryDirectory() as place, bed_of(HOSTS, Path(place)) as bed:
        for i in range(options.kills):
            name, number = chance.choice([*KINDS]), chance.randrange(HOSTS)
            folder = Path(place, f"kill{i}")
            folder.mkdir()
            longest[name] = max(longest[name], clean_s := strike(bed, folder, name, number))
            print(f"{i + 1}: {name} of host{number + 1}: clean after {clean_s:.2f} s", flush=True)
    print("clean after each; longest:", {name: round(value, 2) for name, value in longest.items()})


if __name__ == "__main__":
    main()
