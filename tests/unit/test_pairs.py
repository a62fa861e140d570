"""The pairs of nodes that `check-port` tries, and its summary of failures."""

import pytest

from distlaunch.launch.port_check import EVERY, Unreached, folded, partners


def test_few_nodes_all_dial_each_other() -> None:
    for count in range(1, EVERY + 1):
        expected = {node: set(range(count)) - {node} for node in range(count)}
        assert {node: set(others) for node, others in partners(count).items()} == expected


@pytest.mark.parametrize("count", [EVERY + 1, 31, 64, 1000])
def test_of_many_nodes_each_dials_a_few(count: int) -> None:
    found = partners(count)
    for node, others in found.items():
        assert len(set(others)) == len(others) == EVERY - 1
        assert node not in others and (node + 1) % count in others
    dialed = [other for others in found.values() for other in others]
    assert {dialed.count(node) for node in found} == {EVERY - 1}


def unreached(pairs: str, error: str = "refused") -> list[Unreached]:
    """`ab` = a could not reach b."""
    return [Unreached(pair[0], pair[1], f"10.0.0.{pair[1]}", error) for pair in pairs.split()]


@pytest.mark.parametrize(
    ("failed", "lines"),
    [
        ([], []),
        (unreached("bc"), ["c (10.0.0.c) can't be reached from b: refused"]),
        (
            unreached("ad bd cd da db"),
            ["d (10.0.0.d) can't be reached from a, b, c: refused", "d can't reach a, b: refused"],
        ),
        (
            unreached("ac") + unreached("dc", "no answer"),
            [f"c (10.0.0.c) can't be reached from {who}" for who in ("a: refused", "d: no answer")],
        ),
    ],
)
def test_folds_failures_by_node(failed: list[Unreached], lines: list[str]) -> None:
    assert folded(failed) == lines
