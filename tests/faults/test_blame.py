"""The rank that is named as the first to fail, and its error, of scripts that fail in many ways."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.blame.cases import CASES
from tests.faults.blame.launchers import by_distlaunch, by_torchrun
from tests.faults.blame.verdicts import of_distlaunch
from tests.faults.figures import Figures, fault
from tests.harness import TORCHS_ABORT

# In these it matters who is told when; over hosts ranks are both beside each other and apart.
OVER_HOSTS = (
    "early_return",
    "finally_rank0",
    "finally_rank1",
    "loader_killed",
    "nan_loss",
    "words_of_a_peer",
)
DOWN_S = 3.0
"""From the first failure to the end of all: a second for the others to say their own, and the tear-down."""


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        fault(0, f"the first of the ranks that fail is named: {name}", "9", name, name in OVER_HOSTS)
        for name in sorted(CASES)
    ],
)
def test_names_the_rank_that_failed_first(
    name: str, hosts: bool, tmp_path: Path, figures: Figures, request: pytest.FixtureRequest
) -> None:
    """Nothing that was said is wrong, and it took no longer than it may; nothing had to be killed."""
    outcome = by_distlaunch(CASES[name], tmp_path, request.getfixturevalue("bed") if hosts else None)
    assert outcome.opinion.wrong == [], f"{outcome.opinion.said}: {outcome.ended.texts[0]}"
    assert (outcome.ended.hung, outcome.ended.left) == (0, 0)
    assert outcome.down_s is not None
    figures(name, outcome.down_s, at_most=DOWN_S)


# The judge itself


def test_reads_the_root_cause_of_torchrun(tmp_path: Path) -> None:
    outcome = by_torchrun(CASES["import_before_init"], tmp_path, None)
    assert outcome.opinion.right == 1.0, outcome.ended.texts
    assert (outcome.ended.hung, outcome.ended.left) == (0, 0)


def summary(rank: int, *shown: str) -> str:
    """The end of what people read: who failed first, and its last output."""
    lines = [f"rank {rank} (host2) failed first: exit status 1", *(f"  | {words}" for words in shown)]
    return "".join(f"distlaunch: {line}\n" for line in lines)


LABEL, EMPTY = (CASES[name].words[0] for name in ("value_error", "before_init"))


@pytest.mark.parametrize(
    ("name", "status", "cause", "told", "wrong"),
    [
        ("value_error", 1, 1, summary(1, LABEL), []),
        ("value_error", 1, 1, summary(0, LABEL), ["the summary names ranks [0]"]),
        ("value_error", 1, 1, summary(1), [f"not shown: ['{LABEL}']"]),
        ("value_error", 143, 0, summary(1, LABEL), ["--json names rank 0", "exit status 143"]),
        # torch may abort a rank at its end, after its own words, where it has a group.
        ("value_error", 134, 1, summary(1, LABEL, TORCHS_ABORT), []),
        ("value_error", 134, 1, summary(1, TORCHS_ABORT, LABEL), ["exit status 134"]),
        ("before_init", 134, 0, summary(0, EMPTY, TORCHS_ABORT), ["exit status 134"]),
    ],
)
def test_judges_what_people_and_machines_read(
    name: str, status: int, cause: int, told: str, wrong: list[str]
) -> None:
    document: dict[str, Any] = {"exit_status": status, "cause": {"rank": cause}}
    assert of_distlaunch(CASES[name], document, told).wrong == wrong
