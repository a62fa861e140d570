"""How tests are dealt to the processes that run them."""

from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.beside import dealt

TESTS = Path(__file__).parent.parent


class Item:
    """As much of a test as matters here."""

    def __init__(self, folder: str, marker: str) -> None:
        self.path, self.marker = TESTS / folder / "test_x.py", marker

    def get_closest_marker(self, name: str) -> Any:
        return self if name == self.marker else None


ITEMS = st.lists(
    st.builds(Item, st.sampled_from(["unit", "process"]), st.sampled_from(["", "alone", "quiet", "long"]))
)


@given(ITEMS, st.integers(2, 6))
def test_each_is_dealt_once_and_long_ones_do_not_wait(items: list[Item], count: int) -> None:
    hands = cast("list[list[Item]]", dealt(cast("list[pytest.Item]", items), count))
    assert len(hands) == count
    assert sorted(map(id, chain(*hands))) == sorted(map(id, items))
    alone = [item for name in ("quiet", "alone") for item in items if item.marker == name]
    assert hands[0][: len(alone)] == alone
    for hand in hands:
        others = [item.marker for item in hand if item.path.parent.name != "unit" and item not in alone]
        assert others == sorted(others, key=lambda marker: marker != "long")
