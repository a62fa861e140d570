"""A few random kills in every run of the tests; `python -m tests.faults.chaos` does hundreds."""

from pathlib import Path

import pytest

from tests.cluster.hosts import Bed
from tests.faults import chaos
from tests.faults.conftest import Figures

KILLS, SEEDS = 4, (7, 8, 9)


@pytest.mark.long
@pytest.mark.fault(0, "random kills over four hosts", promise="1-5")
@pytest.mark.parametrize("seed", SEEDS)
def test_after_each_of_some_random_kills_everything_is_clean(
    seed: int, bed: Bed, tmp_path: Path, figures: Figures
) -> None:
    tally = chaos.series(bed, tmp_path, KILLS, seed, print)
    for kind, outcomes in sorted(tally.rounds.items()):
        limit_s = chaos.CUT_LIMIT_S if kind == "network" else chaos.LIMIT_S
        figures(f"clean after {kind}", max(outcome.clean_s for outcome in outcomes), at_most=limit_s)
    figures("controller's peak memory", tally.peak_kb / 1024, at_most=64, unit="MiB")
