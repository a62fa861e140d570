"""Random kills over a testbed; after each, everything must be clean, the cause told, and the next job run.

    python -m tests.faults.chaos --kills 200 --seed 7
    python -m tests.faults.chaos --on slurm --kills 100

The seed is printed, and replays the run: the same victims at the same moments, counted in events.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.faults.figures import DIRECTORY, markdown
from tests.faults.strikes import GROUNDS, LIMIT_S, PROCS, Ground, Hit, Kind, Outcome, Plan, strike
from tests.harness import on_time

TWO, EARLY = 0.15, 0.3
"""So many are two kills at once, and of the others so many come before all workers are ready."""
MEMORY_MIB = 64.0
"""What the controller may have over a bare interpreter."""


def plan_of(chance: random.Random, ground: Ground) -> Plan:
    """The next kill, or two."""
    first = _hit_of(chance, ground.kinds, chance.randrange(ground.ranks))
    beside = _beside(ground.kinds, ground.kinds[first.kind])
    restarts = chance.choice([0, 0, 0, 1])
    if beside and chance.random() < TWO:
        hosts_on = chance.randrange(0 if ground.together else 1, ground.hosts)
        second = _hit_of(chance, beside, (first.rank + hosts_on * PROCS) % ground.ranks)
        return Plan((first, second), ground.ranks, restarts)
    earliest = 0 if ground.kinds[first.kind].early else 1
    moment = chance.randrange(earliest, ground.ranks) if chance.random() < EARLY else ground.ranks
    return Plan((first,), moment, restarts)


def _hit_of(chance: random.Random, kinds: Mapping[str, Kind], rank: int) -> Hit:
    return Hit(chance.choices(list(kinds), [kind.weight for kind in kinds.values()])[0], rank)


def _beside(kinds: Mapping[str, Kind], first: Kind) -> dict[str, Kind]:
    """Who may be hit with the first: there is one controller, and none ends anything while it is stopped."""
    if first.must_be_woken:
        return {}
    others = {name: kind for name, kind in kinds.items() if not kind.must_be_woken}
    return {n: kind for n, kind in others.items() if not (first.is_controller and kind.is_controller)}


def limit_s(ground: Ground, plan: Plan) -> float:
    """Seconds until everything must be clean; one is noticed only after the other, if both take long."""
    return LIMIT_S + sum(ground.kinds[hit.kind].limit_s - LIMIT_S for hit in plan.hits)


class Kill(NamedTuple):
    """What was killed, what came of it, and the seconds until everything had to be clean."""

    plan: Plan
    outcome: Outcome
    limit_s: float


def table(kills: Sequence[Kill]) -> str:
    """For people: of each kind, and of two at once, the number, median and longest seconds until clean."""
    times: dict[str, list[float]] = {}
    for plan, outcome, _ in kills:
        times.setdefault(plan.name if len(plan.hits) == 1 else "two at once", []).append(outcome.clean_s)
    rows = [
        (kind, str(len(clean_s)), f"{statistics.median(clean_s):.2f} s", f"{max(clean_s):.2f} s")
        for kind, clean_s in sorted(times.items())
    ]
    peak_mib = max(kill.outcome.peak_mib for kill in kills)
    told = f"clean after each of {len(kills)}; controller's peak memory: {peak_mib:.0f} MiB"
    return f"{markdown(('killed', 'times', 'clean after, median', 'at most'), rows)}\n{told}"


def series(ground: Ground, directory: Path, kills: int, seed: int) -> Iterator[Kill]:
    """So many random kills, with a line for each. AssertionError when something is left."""
    chance = random.Random(seed)
    for number in range(kills):
        plan = plan_of(chance, ground)
        this = f"kill {number} of seed {seed}: {plan}"
        place = directory / f"{number}"
        place.mkdir()
        try:
            outcome = strike(ground, place, plan)
        except AssertionError as error:
            raise type(error)(f"{error}\n{this}") from error
        on_time(this, outcome.clean_s, limit_s(ground, plan))
        assert outcome.peak_mib <= MEMORY_MIB, f"{this}: {outcome.peak_mib} MiB"
        ready = f"{plan.moment}/{ground.ranks} ready"
        print(f"{number:>4} {plan.name}, {ready}: clean after {outcome.clean_s:.2f} s", flush=True)
        yield Kill(plan, outcome, limit_s(ground, plan))


def main() -> int:
    """Run a series from the command line; the table goes to stdout and is kept with the reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--on", choices=GROUNDS, default="ssh")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory, GROUNDS[given.on](Path(directory) / "bed") as ground:
        kills = list(series(ground, Path(directory), given.kills, given.seed))
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    (DIRECTORY / f"chaos-{given.on}.md").write_text(f"seed {given.seed}\n\n{table(kills)}\n")
    print(table(kills))
    return 0


if __name__ == "__main__":
    sys.exit(main())
