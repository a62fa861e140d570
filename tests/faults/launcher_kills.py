"""Random kills of runs whose launchers somebody else started: all must be clean, and the cause told.

python -m tests.faults.launcher_kills --kills 100 --seed 7
"""

import argparse
import random
import re
import signal
import tempfile
import time
from pathlib import Path

from tests.cluster.hosts import Bed, bed_of
from tests.cluster.test_launchers import launchers
from tests.faults.chaos import KILLED, PROCS, WORKER, Kind, Scene, agent, controller, heal, hit, worker
from tests.harness import wait_gone

HOSTS, GRACE_S = 3, 2
LIMIT_S, CUT_LIMIT_S = GRACE_S + 4.0, 30.0
"""Until all is clean: at once, or after 15 s without an answer, the grace, and the guardian's look."""
LOST = "{host} was lost|lost the controller"
KINDS = {
    "worker": Kind(worker, 1, (137,), f"failed first: {KILLED}"),
    "agent": Kind(agent, 1, (71,), LOST),
    "launcher": Kind(controller, 1, (71,), LOST),
    "launcher SIGTERM": Kind(controller, 1, (143,), "stopped by SIGTERM", signal.SIGTERM),
    "launcher SIGINT": Kind(controller, 1, (130,), "stopped by SIGINT", signal.SIGINT),
    "network": Kind(None, 1, (71,), LOST, limit_s=CUT_LIMIT_S),
}
"""`statuses` are those that the other launchers may end with, `tells` is what one of them must say."""


def strike(bed: Bed, directory: Path, name: str, number: int) -> float:
    """Start a run, hit launcher `number` or what is below it; seconds until all is clean."""
    kind, before = KINDS[name], bed.processes()
    words = (f"--shutdown-timeout={GRACE_S}",)
    with launchers(bed, directory, WORKER, *[PROCS] * HOSTS, words=words) as runs:
        ranks = [min(run.wait_ready(PROCS)) for run in runs]
        scene = Scene(runs[number], ranks[number])
        began = time.monotonic()
        try:
            hit(bed, [(kind, scene)])
            wait_gone(sorted(bed.processes() - before), CUT_LIMIT_S if kind.victim is None else LIMIT_S)
        finally:
            heal(bed, [(kind, scene)])
        clean_s = time.monotonic() - began
        others = [run for run in runs if run is not scene.run or not kind.is_controller]
        statuses = {run.wait() for run in others}
        said = "\n".join(run.stderr for run in others)
        assert statuses <= set(kind.statuses), (statuses, said)
        assert re.search(kind.told(scene), said), said
        assert not re.search(r'File "\S+/distlaunch/', said), said
    return clean_s


def main() -> None:
    """Kill as often as asked, and print what it came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int.from_bytes(random.randbytes(2), "big"))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place, bed_of(HOSTS, Path(place)) as bed:
        for i in range(options.kills):
            name, number = chance.choice([*KINDS]), chance.randrange(HOSTS)
            directory = Path(place, f"kill{i}")
            directory.mkdir()
            clean_s = strike(bed, directory, name, number)
            print(f"{i + 1}: {name} of host{number + 1}: clean after {clean_s:.2f} s", flush=True)


if __name__ == "__main__":
    main()
