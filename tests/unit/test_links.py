"""The verdict of `check --links`: which pairs are measured, and whether a node or a link is slow or hangs."""

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.check.findings import Report
from distlaunch.check.link_probe import FEW, ROUNDS, pairings, retests, slow_pairs
from distlaunch.launch.link_check import Peers, rows_in, verdict
from tests.unit.test_check import JUNK

FOUR = Peers(("a", "b", "c", "d"), ((0, 1), (2, 3), (4, 5), (6, 7)), "node")
PAIRS = [*combinations(range(4), 2)]
WHOLE = (0, 1, 2, 3)


def row(test: str, peers: Sequence[int], busbw: float, silent: Sequence[int] = ()) -> dict[str, Any]:
    error = "" if busbw else "timed out"
    return {"test": test, "peers": peers, "busbw": busbw, "error": error, "silent": silent}


def judged(rows: Sequence[object], failures: Mapping[int, str] | None = None) -> Report:
    printed = "".join(f"{json.dumps(each)}\n" for each in ["a warning of torch", *rows])
    return verdict(FOUR, rows_in(printed.encode(), 4), failures or {})


def pairs(changes: Mapping[tuple[int, int], float]) -> list[dict[str, Any]]:
    """Pairs with about 10 GB/s, but for some."""
    found = {pair: 10.0 + pair[0] for pair in PAIRS} | dict(changes)
    return [row("join", WHOLE, 0.0), *(row("pair", pair, busbw) for pair, busbw in found.items())]


CASES: dict[str, tuple[list[dict[str, Any]], list[tuple[str, str, tuple[str, ...]]]]] = {
    "all fine": (pairs({}), []),
    "uneven": (pairs({(0, 1): 6.0, (2, 3): 19.0}), []),
    "slow node": (
        pairs({(0, 1): 1.0, (1, 2): 1.5, (1, 3): 1.0}),
        [("warning", "with every other node is slow: 1.5 GB/s; the median is 10 GB/s", ("b",))],
    ),
    "slow pair": (
        pairs({(1, 2): 2.0}),
        [("warning", "between them is slow: 2 GB/s; the median is 10 GB/s", ("b", "c"))],
    ),
    "slow for a moment": ([*pairs({(1, 2): 2.0}), row("pair", (1, 2), 9.0)], []),
    "pair hangs": (pairs({(0, 3): 0.0}), [("error", "between them doesn't complete", ("a", "d"))]),
    "node hangs": (
        pairs({(0, 3): 0.0, (1, 3): 0.0, (2, 3): 0.0}),
        [("error", "with every other node doesn't complete", ("d",))],
    ),
    "node and pair": (
        pairs({(0, 3): 1.0, (1, 3): 1.0, (2, 3): 1.0, (0, 1): 0.0}),
        [
            ("error", "between them doesn't complete", ("a", "b")),
            ("warning", "with every other node is slow: 1 GB/s; the median is 10 GB/s", ("d",)),
        ],
    ),
    "slow GPUs": (
        [row("alone", [peer], 50.0 if peer == 2 else 300.0) for peer in range(4)] + pairs({}),
        [("warning", "among its own ranks is slow: 50 GB/s; the median is 300 GB/s", ("c",))],
    ),
    "whole hangs": (
        [*pairs({}), row("all-reduce", WHOLE, 0.0)],
        [("error", "all-reduce across all nodes fails, although all measured pairs work: timed out", ())],
    ),
    "not joined": (
        [row("join", WHOLE, 0.0, [4, 5]), row("pair", (0, 1), 9.0)],
        [("error", "did not join the link test within 30 s", ("c",))],
    ),
    "silent": (
        [row("pair", (0, 1), 9.0), row("pair", (2, 3), 0.0, [6])],
        [("error", "stopped answering in the link test", ("d",))],
    ),
    "nothing printed": ([], [("error", "did not join the link test within 30 s", ("a",))]),
}


@pytest.mark.parametrize(("rows", "expected"), CASES.values(), ids=CASES)
def test_names_the_node_or_the_link(
    rows: list[dict[str, Any]], expected: list[tuple[str, str, tuple[str, ...]]]
) -> None:
    report = judged(rows)
    found = sorted((each.level, each.what, each.nodes) for each in report.findings)
    assert [(level, what.removeprefix("an all-reduce "), nodes) for level, what, nodes in found] == expected
    assert bool(report.fine) is not bool(expected)


def test_reports_why_a_rank_failed() -> None:
    failures = {4: "exit status 1: no torch", 5: "exit status 1: no torch"}
    for rows in ([], [row("join", WHOLE, 0.0, [4, 5])]):
        (finding,) = judged(rows, failures).findings
        assert (finding.what, finding.nodes) == ("exit status 1: no torch", ("c",))


def test_shows_only_slow_links_beside_the_median() -> None:
    assert judged(pairs({(1, 2): 2.0, (0, 3): 0.0})).slow == (
        ("a - d", "none", "10 GB/s"),
        ("b - c", "2 GB/s", "10 GB/s"),
    )
    whole = [row("all-reduce", WHOLE, 4.2), row("send/recv", WHOLE, 5.0)]
    assert judged(pairs({}) + whole).fine == (
        "links (4 nodes, 6 pairs, median 11 GB/s, all-reduce 4.2 GB/s, send/recv 5 GB/s)",
    )


@given(st.permutations(range(11)), st.integers(2, 11))
def test_rounds_keep_all_nodes_busy(order: list[int], count: int) -> None:
    rounds = pairings([peer for peer in order if peer < count])
    for each in rounds:
        assert len({peer for pair in each for peer in pair}) == 2 * len(each) == count - count % 2
    measured = [pair for each in rounds for pair in each]
    assert len({*measured}) == len(measured)
    if count <= FEW:
        assert sorted(measured) == [*combinations(range(count), 2)]
    else:
        assert len(rounds) == ROUNDS


def test_measures_suspects_again_with_good_nodes_but_not_what_hangs() -> None:
    best = dict.fromkeys([(0, 1), (2, 3), (4, 5), (0, 2), (1, 3)], 10.0)
    assert retests(best) == []
    best |= {(4, 6): 1.0, (5, 7): 0.0}
    again = [pair for (pair,) in retests(best)]
    assert set(again) == {(4, 6), *((good, end) for good in (0, 1) for end in (4, 5, 6, 7))}
    best |= dict.fromkeys(set(again) - {(4, 6)}, 10.0)
    assert retests(best) == [[(4, 6)]]
    assert slow_pairs(best) == [(4, 6), (5, 7)]


KEYS = ["test", "peers", "busbw", "error", "silent"]


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), JUNK) | JUNK, max_size=3), st.sampled_from(KEYS), JUNK)
def test_survives_any_output(rows: list[object], key: str, value: object) -> None:
    report = judged([*rows, {**row("pair", (0, 1), 1.0, [2]), key: value}])
    json.dumps(report.document())
