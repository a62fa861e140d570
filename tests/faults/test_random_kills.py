"""A few random kills in every run of the tests; `python -m tests.faults.chaos` does hundreds."""

from pathlib import Path

import pytest

from tests.cluster.hosts import Bed
from tests.cluster.slurm import Slurm
from tests.faults import chaos, launcher_kills
from tests.faults.conftest import Figures
from tests.faults.grounds import Allocation, Ground

KILLS, SEEDS = 2, (7, 8, 9)


@pytest.mark.long
@pytest.mark.fault(0, "random kills over all hosts", promise="1-5")
@pytest.mark.parametrize("seed", SEEDS)
def test_after_each_of_some_random_kills_everything_is_clean(
    seed: int, bed: Bed, tmp_path: Path, figures: Figures
) -> None:
    kills(Ground(bed), tmp_path, seed, figures)


@pytest.mark.alone  # any other run that starts then kills what Slurm has not killed yet, and tells it
@pytest.mark.fault(0, "random kills in an allocation", promise="1-5")
def test_after_a_random_kill_in_an_allocation_everything_is_clean(
    slurm: Slurm, allocation: str, tmp_path: Path, figures: Figures
) -> None:
    kills(Allocation(slurm), tmp_path, SEEDS[0], figures)


@pytest.mark.long
@pytest.mark.fault(0, "kills of what launchers that joined have", promise="1-5")
@pytest.mark.parametrize("name", launcher_kills.KINDS)
def test_after_a_kill_of_what_a_launcher_has_everything_is_clean(
    name: str, bed: Bed, tmp_path: Path, figures: Figures
) -> None:
    number = [*launcher_kills.KINDS].index(name) % launcher_kills.HOSTS
    limit_s = launcher_kills.CUT_LIMIT_S if name == "network" else launcher_kills.LIMIT_S
    figures(f"clean after {name}", launcher_kills.strike(bed, tmp_path, name, number), at_most=limit_s)


def kills(ground: Ground, folder: Path, seed: int, figures: Figures) -> None:
    tally = chaos.series(ground, folder, KILLS, seed, print)
    for kind, outcomes in sorted(tally.rounds.items()):
        worst_s = max(outcome.clean_s for outcome in outcomes)
        figures(f"clean after {kind}", worst_s, at_most=tally.limits_s[kind])
    figures("controller's peak memory", tally.peak_kb / 1024, at_most=64, unit="MiB")
