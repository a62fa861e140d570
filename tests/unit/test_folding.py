"""Folding of identical lines that several ranks print at about the same time."""

import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from distlaunch.observers.console import FOLD_S, MAX_FOLDED, Folding
from distlaunch.wording import expand_ranges
from tests.unit.samples import bounded

LINES = st.sampled_from([b"epoch 1\n", b"epoch 2\n", b"\n", b"loss 3", b".5\n", b"a\nb\n", b"unfinished"])
PRINTED = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), LINES, st.floats(0, 0.3)), max_size=40)


class Shown:
    """What was shown: (ranks, stream, line)."""

    def __init__(self) -> None:
        self.lines: list[tuple[list[int], int, bytes]] = []
        self.fold = Folding(self._take)

    def add(self, rank: int, stream: int, data: bytes, now: float) -> None:
        self.fold.add(rank, stream, data, f"[{rank}] ", now)

    def _take(self, first: int, stream: int, line: bytes, tag: str) -> None:
        ranks = [int(rank) for rank in expand_ranges(tag.strip())]
        assert first == ranks[0]
        self.lines.append((ranks, stream, line))


@bounded()
@given(PRINTED)
def test_shows_every_line_of_every_rank_once(printed: list[tuple[int, int, bytes, float]]) -> None:
    shown, now, whole = Shown(), 0.0, dict[tuple[int, int], bytes]()
    for rank, stream, data, later in printed:
        now += later
        shown.add(rank, stream, data, now)
        whole[rank, stream] = whole.get((rank, stream), b"") + data
        assert shown.fold.due is None or shown.fold.due <= now + FOLD_S
    shown.fold.finish()
    told = Counter((rank, stream, line) for ranks, stream, line in shown.lines for rank in ranks)
    lines = {key: text.removesuffix(b"\n").split(b"\n") for key, text in whole.items()}
    assert told == Counter((*key, line + b"\n") for key in lines for line in lines[key])
    assert all(ranks == sorted(set(ranks)) for ranks, _, _ in shown.lines)


def test_folds_identical_lines_of_a_thousand_ranks() -> None:
    shown = Shown()
    for rank in range(1000):
        shown.add(rank, 0, b"epoch 3\n" if rank != 500 else b"epoch 2\n", rank / 10000)
    assert shown.lines == []
    shown.add(0, 0, b"epoch 4\n", FOLD_S)
    everyone = [rank for rank in range(1000) if rank != 500]
    assert shown.lines == [(everyone, 0, b"epoch 3\n"), ([500], 0, b"epoch 2\n")]


def test_keeps_the_order_of_first_lines() -> None:
    shown = Shown()
    for rank in range(3):
        shown.add(rank, 0, b"one\ntwo\none\n", 0.0)
    shown.fold.flush()
    assert [line for _, _, line in shown.lines] == [b"one\n", b"two\n", b"one\n"]
    assert shown.fold.due is None


def test_takes_linear_time_for_a_repeated_line() -> None:
    shown, began = Shown(), time.process_time()
    shown.add(0, 0, b"\n" * 20_000, 0.0)
    shown.fold.flush()
    assert shown.lines == [([0], 0, b"\n")] * 20_000
    assert time.process_time() - began < 8


def test_bounds_what_folding_holds_back() -> None:
    shown = Shown()
    for number in range(40):
        shown.add(0, 0, b"%d" % number + b"x" * (MAX_FOLDED // 32) + b"\n", 0.0)
    assert len(shown.lines) >= 31
