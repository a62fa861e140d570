"""Random kills over a testbed; after each, everything must be clean, the cause told, and the next job run.

    python -m tests.faults.chaos --kills 200 --seed 7
    python -m tests.faults.chaos --on slurm --kills 100

The seed is printed, and replays the run: the same victims at the same moments, counted in events.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.faults.grounds import GROUNDS, Ground
from tests.faults.report import FOLDER
from tests.faults.strikes import Hit, Outcome, Plan, strike
from tests.faults.victims import LIMIT_S, PROCS, Kind
from tests.harness import on_time

TWO, EARLY = 0.15, 0.3
"""So many are two kills at once, and of the others so many come before all workers are ready."""
MEMORY_KB = 64 << 10
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


class Tally:
    """What a series of kills came to, by kind; two at once are one of their own."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[Outcome]] = {}
        self.limits_s: dict[str, float] = {}

    def add(self, plan: Plan, outcome: Outcome, at_most_s: float) -> None:
        """Note one, which had so many seconds."""
        name = plan.name if len(plan.hits) == 1 else "two at once"
        self.rounds.setdefault(name, []).append(outcome)
        self.limits_s[name] = max(at_most_s, self.limits_s.get(name, 0.0))

    @property
    def peak_kb(self) -> int:
        """The most memory that any controller had."""
        return max(outcome.peak_kb for outcomes in self.rounds.values() for outcome in outcomes)

    def table(self) -> str:
        """For people: kind, number, median and longest seconds until clean."""
        lines = ["| killed | times | clean after, median | at most |", "|---|---|---|---|"]
        for kind, outcomes in sorted(self.rounds.items()):
            times = sorted(outcome.clean_s for outcome in outcomes)
            middle, most = times[len(times) // 2], times[-1]
            lines.append(f"| {kind} | {len(times)} | {middle:.2f} s | {most:.2f} s |")
        return "\n".join([*lines, f"\n{self.summary()}"])

    def summary(self) -> str:
        """All in a line."""
        times = [outcome.clean_s for outcomes in self.rounds.values() for outcome in outcomes]
        clean = f"clean after each of {len(times)} kills, within {max(times):.2f} s"
        return f"{clean}; controller's peak memory: {self.peak_kb >> 10} MiB"


def series(ground: Ground, folder: Path, kills: int, seed: int, tell: Callable[[str], object]) -> Tally:
    """So many random kills; `tell` gets a line for each. AssertionError when something is left."""
    chance, tally = random.Random(seed), Tally()
    for number in range(kills):
        plan = plan_of(chance, ground)
        this = f"kill {number} of seed {seed}: {plan}"
        place = folder / f"{number}"
        place.mkdir()
        try:
            outcome = strike(ground, place, plan)
        except AssertionError as error:
            raise type(error)(f"{error}\n{this}") from error
        on_time(this, outcome.clean_s, limit_s(ground, plan))
        assert outcome.peak_kb <= MEMORY_KB, f"{this}: {outcome.peak_kb} KiB"
        tally.add(plan, outcome, limit_s(ground, plan))
        ready = f"{plan.moment}/{ground.ranks} ready"
        tell(f"{number:>4} {plan.name}, {ready}: clean after {outcome.clean_s:.2f} s")
    return tally


def main() -> int:
    """Run a series from the command line; the table goes to stdout and is kept with the reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--on", choices=GROUNDS, default="ssh")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder, GROUNDS[given.on](Path(folder) / "bed") as ground:
        tally = series(ground, Path(folder), given.kills, given.seed, lambda line: print(line, flush=True))
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"chaos-{given.on}.md").write_text(f"seed {given.seed}\n\n{tally.table()}\n")
    print(tally.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
