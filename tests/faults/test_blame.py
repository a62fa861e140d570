"""Scripts that fail in twenty ways: the rank that really failed first is named, and its own error shown."""

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Bed
from tests.faults.blame.cases import CASES
from tests.faults.blame.launchers import Outcome, by_distlaunch, by_torchrun
from tests.faults.blame.verdicts import of_distlaunch, of_torchrun
from tests.faults.conftest import Figures
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
ROOT_CAUSE = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-01-02_03:04:{second:02}
  host      : host{rank}
  rank      : {rank} (local_rank: 0)
  exitcode  : 1 (pid: 4321)
"""


def assert_right(name: str, outcome: Outcome, figures: Figures) -> None:
    """Nothing that was said is wrong, and it took no longer than it may; nothing had to be killed."""
    assert outcome.opinion.wrong == [], f"{outcome.opinion.said}: {outcome.ended.texts[0]}"
    assert (outcome.ended.hung, outcome.ended.left) == (0, 0)
    assert outcome.first_s is not None
    figures(name, outcome.first_s, at_most=DOWN_S)


@pytest.mark.fault(0, "the first of the ranks that fail is named, here", promise="9")
@pytest.mark.parametrize("name", sorted(set(CASES) - set(OVER_HOSTS)))
def test_the_rank_that_failed_first_is_named(name: str, tmp_path: Path, figures: Figures) -> None:
    assert_right(name, by_distlaunch(CASES[name], tmp_path, None), figures)


@pytest.mark.fault(0, "the first of the ranks that fail is named, over hosts", promise="9")
@pytest.mark.parametrize("name", OVER_HOSTS)
def test_the_rank_that_failed_first_is_named_over_hosts(
    name: str, bed: Bed, tmp_path: Path, figures: Figures
) -> None:
    assert_right(name, by_distlaunch(CASES[name], tmp_path, bed), figures)


# The judge itself


def test_torchruns_word_is_understood(tmp_path: Path) -> None:
    outcome = by_torchrun(CASES["import_before_init"], tmp_path, None)
    assert outcome.opinion.right == 1.0, outcome.ended.texts
    assert (outcome.ended.hung, outcome.ended.left) == (0, 0)


@pytest.mark.parametrize(
    ("causes", "right"),
    [
        ([(7, 1)], 1.0),
        ([(7, 0)], 0.0),
        ([(7, 1), (8, 0)], 1.0),
        ([(8, 1), (7, 0)], 0.0),
        ([(7, 0), (7, 1)], 0.5),
        ([(7, 1), (7, 1)], 1.0),
        ([], 0.0),
    ],
)
def test_of_torchruns_on_several_nodes_the_earliest_counts(
    causes: list[tuple[int, int]], right: float
) -> None:
    outputs = [ROOT_CAUSE.format(second=second, rank=rank) for second, rank in causes]
    assert of_torchrun(CASES["value_error"], outputs).right == right


SUMMARY = """\
[host2:1] [rank1]: ValueError: label 1007 is out of range
distlaunch: rank 1 (host2) failed first: exit status 1
distlaunch:   | ValueError: label 1007 is out of range
"""


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("", "", []),
        ("rank 1 (host2)", "rank 0 (host1)", ["the summary names ranks [0]"]),
        ("distlaunch:   | ", "", ["not shown: ['label 1007 is out of range']"]),
    ],
)
def test_what_people_read_is_judged(old: str, new: str, wrong: list[str]) -> None:
    document: dict[str, Any] = {"exit_status": 1, "cause": {"rank": 1}}
    assert of_distlaunch(CASES["value_error"], document, SUMMARY.replace(old, new)).wrong == wrong


def test_a_culprit_that_torch_aborts_at_its_end_is_still_right() -> None:
    document: dict[str, Any] = {"exit_status": 134, "cause": {"rank": 1}}
    aborted = f"{SUMMARY}distlaunch:   | {TORCHS_ABORT}\n"
    assert of_distlaunch(CASES["value_error"], document, aborted).right == 1.0
    assert of_distlaunch(CASES["value_error"], document, SUMMARY).wrong == ["exit status 134"]


@pytest.mark.parametrize("name", ["before_init", "thread_exits"])
def test_an_abort_where_torch_has_no_part_in_it_is_wrong(name: str) -> None:
    case = CASES[name]
    document: dict[str, Any] = {"exit_status": 134, "cause": {"rank": case.rank}}
    said = f"distlaunch: rank {case.rank} failed first\ndistlaunch:   | {case.words[0]}\n"
    aborted = f"{said}distlaunch:   | {TORCHS_ABORT}\n"
    assert of_distlaunch(case, document, aborted).wrong == ["exit status 134"]


def test_an_abort_before_the_culprits_own_words_is_wrong() -> None:
    document: dict[str, Any] = {"exit_status": 134, "cause": {"rank": 1}}
    head, _, words = SUMMARY.partition("distlaunch:   | ")
    early = f"{head}distlaunch:   | {TORCHS_ABORT}\ndistlaunch:   | {words}"
    assert of_distlaunch(CASES["value_error"], document, early).wrong == ["exit status 134"]


def test_what_machines_read_is_judged() -> None:
    document: dict[str, Any] = {"exit_status": 143, "cause": {"rank": 0}}
    wrong = of_distlaunch(CASES["value_error"], document, SUMMARY).wrong
    assert wrong == ["--json names rank 0", "exit status 143"]


@pytest.mark.parametrize(("status", "said", "right"), [(0, "finished", 1.0), (1, "failed too", 0.0)])
def test_a_rank_that_left_early_must_be_told(status: int, said: str, right: float) -> None:
    workers = [{"rank": 0, "status": 1}, {"rank": 1, "status": status}]
    document: dict[str, Any] = {"exit_status": 1, "cause": {"rank": 0}, "workers": workers}
    opinion = of_distlaunch(CASES["early_return"], document, f"distlaunch: rank 1: {said}\n")
    assert opinion.right == right
