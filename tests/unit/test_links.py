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
from tests.unit.samples import anything, bounded

FOUR = Peers(("a", "b", "c", "d"), ((0, 1), (2, 3), (4, 5), (6, 7)), "node")
WHOLE = (0, 1, 2, 3)


def row(test: str, peers: Sequence[int], busbw: float, silent: Sequence[int] = ()) -> dict[str, Any]:
    error = "" if busbw else "timed out"
    return {"test": test, "peers": peers, "busbw": busbw, "error": error, "silent": silent}


def judged(rows: Sequence[object], failures: Mapping[int, str] | None = None) -> Report:
    printed = "".join(f"{json.dumps(each)}\n" for each in ["a warning of torch", *rows])
    return verdict(FOUR, rows_in(printed.encode(), 4), failures or {})


def pairs(**changes: float) -> list[dict[str, Any]]:
    """Pairs with about 10 GB/s, but for some: `ab` is the pair of a and b."""
    rates = {a + b: 10.0 + "abcd".index(a) for a, b in combinations("abcd", 2)} | changes
    between = [row("pair", [*map("abcd".index, pair)], rate) for pair, rate in rates.items()]
    return [row("join", WHOLE, 0.0), *between]


CASES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "all fine": (pairs(), []),
    "uneven": (pairs(ab=6.0, cd=19.0), []),
    "slow node": (pairs(ab=1.0, bc=1.5, bd=1.0), ["warning b: with every other node is slow: 1.5 GB/s"]),
    "slow pair": (pairs(bc=2.0), ["warning b, c: between them is slow: 2 GB/s"]),
    "slow for a moment": ([*pairs(bc=2.0), row("pair", (1, 2), 9.0)], []),
    "pair hangs": (pairs(ad=0.0), ["error a, d: between them doesn't complete: timed out"]),
    "node hangs": (
        pairs(ad=0.0, bd=0.0, cd=0.0),
        ["error d: with every other node doesn't complete: timed out"],
    ),
    "node and pair": (
        pairs(ad=1.0, bd=1.0, cd=1.0, ab=0.0),
        [
            "error a, b: between them doesn't complete: timed out",
            "warning d: with every other node is slow: 1 GB/s",
        ],
    ),
    "slow GPUs": (
        [row("alone", [peer], 50.0 if peer == 2 else 300.0) for peer in range(4)] + pairs(),
        ["warning c: among its own ranks is slow: 50 GB/s; the median is 300 GB/s"],
    ),
    "whole hangs": (
        [*pairs(), row("all-reduce", WHOLE, 0.0)],
        ["error : all-reduce across all nodes fails, although all measured pairs work: timed out"],
    ),
    "whole hangs beside a slow pair": (
        [*pairs(bc=2.0), row("all-reduce", WHOLE, 0.0), row("send/recv", WHOLE, 0.0)],
        [
            "error : all-reduce across all nodes fails, although all measured pairs work: timed out",
            "warning b, c: between them is slow: 2 GB/s",
        ],
    ),
    "a rank's own fault": (
        [{**each, "error": each["error"] and "CUDA out of memory"} for each in pairs(ad=0.0)],
        ["error a, d: between them fails: CUDA out of memory"],
    ),
    "not joined": (
        [row("join", WHOLE, 0.0, [4, 5]), row("pair", (0, 1), 9.0)],
        ["error c: did not join the link test within 30 s"],
    ),
    "silent": (
        [row("pair", (0, 1), 9.0), row("pair", (2, 3), 0.0, [6])],
        ["error d: stopped answering in the link test"],
    ),
    "nothing printed": ([], ["error a: did not join the link test within 30 s"]),
}


@pytest.mark.parametrize(("rows", "expected"), CASES.values(), ids=CASES)
def test_names_the_node_or_the_link(rows: list[dict[str, Any]], expected: list[str]) -> None:
    report = judged(rows)
    found = [f"{each.level} {', '.join(each.nodes)}: {each.what}" for each in report.findings]
    median = "; the median is 10 GB/s"
    assert sorted(each.replace("an all-reduce ", "").replace(median, "") for each in found) == expected
    assert bool(report.fine) is not bool(expected)


def test_reports_why_a_rank_failed() -> None:
    failures = {4: "exit status 1: no torch", 5: "exit status 1: no torch"}
    for rows in ([], [row("join", WHOLE, 0.0, [4, 5])]):
        (finding,) = judged(rows, failures).findings
        assert (finding.what, finding.nodes) == ("exit status 1: no torch", ("c",))


def test_shows_only_slow_links_beside_the_median() -> None:
    slow = judged(pairs(bc=2.0, ad=0.0)).slow
    assert slow == (("a - d", "none", "10 GB/s"), ("b - c", "2 GB/s", "10 GB/s"))
    (fine,) = judged([*pairs(), row("all-reduce", WHOLE, 4.2), row("send/recv", WHOLE, 5.0)]).fine
    assert fine == "links (4 nodes, 6 pairs, median 11 GB/s, all-reduce 4.2 GB/s, send/recv 5 GB/s)"


def test_counts_the_pairs_that_were_not_measured() -> None:
    whole = row("all-reduce", WHOLE, 4.2)
    assert judged([*pairs(), whole]).unchecked == ()
    assert judged([*pairs()[:-2], whole]).unchecked == (
        "links: 2 of 6 pairs, because time ran out after 45 s",
    )
    _, words = judged([row("join", WHOLE, 0.0, [4, 5]), row("pair", (0, 1), 9.0)]).unchecked
    assert words == "links: 5 of 6 pairs, because some ranks hang or don't answer"


@bounded()
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


_key = st.sampled_from(["test", "peers", "busbw", "error", "silent"])


@given(st.lists(st.dictionaries(_key, anything) | anything, max_size=3), _key, anything)
@bounded()
def test_survives_any_output(rows: list[object], key: str, value: object) -> None:
    report = judged([*rows, {**row("pair", (0, 1), 1.0, [2]), key: value}])
    json.dumps(report.document())
