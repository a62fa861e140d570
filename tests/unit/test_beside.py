"""The distribution of tests over the processes that run them."""

from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.beside import dealt
from tests.unit.samples import bounded

TESTS = Path(__file__).parent.parent


class Item:
    """As much of a test as matters here."""

    def __init__(self, folder: str, marker: str) -> None:
        self.path = TESTS / folder / "test_x.py"
        self.marker, _, group = marker.partition(" ")
        self.args = (group,)

    def get_closest_marker(self, name: str) -> Any:
        return self if name == self.marker else None


MARKERS = ["", "alone", "quiet", "long", "together a", "together b"]
ITEMS = st.lists(st.builds(Item, st.sampled_from(["unit", "process"]), st.sampled_from(MARKERS)))


@bounded()
@given(ITEMS, st.integers(2, 6))
def test_each_is_dealt_once_a_group_as_one_and_long_ones_do_not_wait(items: list[Item], count: int) -> None:
    hands = cast("list[list[Item]]", dealt(cast("list[pytest.Item]", items), count))
    assert len(hands) == count
    assert sorted(map(id, chain(*hands))) == sorted(map(id, items))
    alone = [item for name in ("quiet", "alone") for item in items if item.marker == name]
    assert hands[0][: len(alone)] == alone
    for hand in hands:
        others = [item for item in hand if item.path.parent.name != "unit" and item not in alone]
        order = ["together", "long", ""]
        assert [item.marker for item in others] == sorted((item.marker for item in others), key=order.index)
    for name in ("a", "b"):
        at = [
            (number, index)
            for number, hand in enumerate(hands)
            for index, item in enumerate(hand)
            if item.args == (name,) and item.path.parent.name != "unit"
        ]
        assert at == [(at[0][0], at[0][1] + more) for more in range(len(at))], "a group is dealt as one"
