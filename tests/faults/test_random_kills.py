"""A few random kills in every run of the tests; `python -m tests.faults.chaos` does hundreds."""

from pathlib import Path

import pytest

from tests.cluster.hosts import Bed
from tests.cluster.slurm import Slurm
from tests.faults import chaos
from tests.faults.conftest import Figures
from tests.faults.grounds import Allocation, Ground

KILLS, SLURM_KILLS, SEEDS = 3, 1, (7, 8, 9)
"""Of each seed; over Slurm fewer, since they are alone meanwhile."""


@pytest.mark.long
# Over Slurm any other run that starts then kills what Slurm has not killed yet, and tells it.
@pytest.mark.everywhere(alone="slurm")
@pytest.mark.fault(0, "random kills over all hosts", promise="1-5")
@pytest.mark.parametrize("seed", SEEDS)
def test_after_each_of_some_random_kills_everything_is_clean(
    seed: int, bed: Bed, tmp_path: Path, figures: Figures
) -> None:
    ground = Allocation(bed) if isinstance(bed, Slurm) else Ground(bed)
    kills = SLURM_KILLS if isinstance(bed, Slurm) else KILLS
    tally = chaos.series(ground, tmp_path, kills, seed, print)
    for kind, outcomes in sorted(tally.rounds.items()):
        worst_s = max(outcome.clean_s for outcome in outcomes)
        figures(f"clean after {kind}", worst_s, at_most=tally.limits_s[kind])
    figures("controller's peak memory", tally.peak_kb / 1024, at_most=64, unit="MiB")
