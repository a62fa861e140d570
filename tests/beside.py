"""Where several processes run tests: which run beside which, and in which order; a plug-in of pytest."""

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

UNIT = Path(__file__).parent / "unit"


def _marked(item: pytest.Item, *names: str) -> bool:
    return any(item.get_closest_marker(name) for name in names)


def _is_unit(item: pytest.Item) -> bool:
    """Those start no process, so that they change nothing for one that is alone."""
    return UNIT in item.path.parents


@pytest.fixture(autouse=True)
def side_by_side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Beside one that is marked `alone` only unit tests run, beside one that is marked `quiet` none."""
    with contextlib.ExitStack() as rooms:
        if "PYTEST_XDIST_WORKER" in os.environ:
            shared = tmp_path_factory.getbasetemp().parent
            rooms.enter_context(_room(shared / "house", alone=_marked(request.node, "quiet")))
            if not _is_unit(request.node):
                rooms.enter_context(_room(shared / "room", alone=_marked(request.node, "alone")))
        yield


@contextlib.contextmanager
def _room(path: Path, alone: bool) -> Iterator[None]:
    with path.with_suffix(".door").open("w") as door, path.open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)  # who is to be alone keeps it shut until the room is empty
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each process begins with its part of the list, and has at the end what takes others no time."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count > 1:
        items[:] = [item for hand in dealt(items, count) for item in hand]


def dealt(items: Sequence[pytest.Item], count: int) -> list[list[pytest.Item]]:
    """So many hands, alike but for the first: what is to be alone is there, beside the others' unit tests."""
    alone = [item for item in items if _marked(item, "alone", "quiet")]
    others = [item for item in items if item not in alone]
    unit, rest = list(filter(_is_unit, others)), list(itertools.filterfalse(_is_unit, others))
    rest.sort(key=lambda item: not _marked(item, "long"))  # or the end would wait for one of them
    share = -(-len(unit) // count)  # of a file's tests, neighbours share what is set up for them
    hands = [[*unit[i * share : (i + 1) * share], *rest[i::count]] for i in range(count)]
    return [[*alone, *hands[0]], *hands[1:]]
