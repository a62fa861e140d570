"""A few random kills, of which `python -m tests.faults.chaos` does hundreds."""

from pathlib import Path

import pytest

from tests.cluster.hosts import Bed
from tests.cluster.slurm import Slurm
from tests.faults import chaos, launcher_kills
from tests.faults.figures import Figures
from tests.faults.strikes import Allocation, Ground

KILLS, SEEDS = 2, (7, 8, 9)


@pytest.mark.long
@pytest.mark.fault(0, "random kills over all hosts", promise="1-5")
@pytest.mark.parametrize("seed", SEEDS)
def test_is_clean_after_random_kills(seed: int, bed: Bed, tmp_path: Path, figures: Figures) -> None:
    kills(Ground(bed), tmp_path, seed, figures)


@pytest.mark.alone  # any other run that starts then kills what Slurm has not killed yet, and tells it
@pytest.mark.fault(0, "random kills in an allocation", promise="1-5")
def test_is_clean_after_random_kills_in_an_allocation(
    slurm: Slurm, allocation: str, tmp_path: Path, figures: Figures
) -> None:
    kills(Allocation(slurm), tmp_path, SEEDS[0], figures)


@pytest.mark.long
@pytest.mark.fault(0, "kills of what launchers that joined have", promise="1-5")
@pytest.mark.parametrize("name", launcher_kills.KINDS)
def test_is_clean_after_a_launchers_kill(name: str, bed: Bed, tmp_path: Path, figures: Figures) -> None:
    number = [*launcher_kills.KINDS].index(name) % launcher_kills.HOSTS
    limit_s = launcher_kills.CUT_LIMIT_S if name == "network" else launcher_kills.LIMIT_S
    figures(f"clean after {name}", launcher_kills.strike(bed, tmp_path, name, number), at_most=limit_s)


def kills(ground: Ground, directory: Path, seed: int, figures: Figures) -> None:
    for plan, outcome, limit_s in chaos.series(ground, directory, KILLS, seed):
        figures(f"clean after {plan.name}", outcome.clean_s, at_most=limit_s)
        figures("controller's peak memory", outcome.peak_mib, at_most=64, unit="MiB")
