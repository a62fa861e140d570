"""Where several processes run tests: which run beside which, and in which order; a plug-in of pytest."""

import contextlib
import fcntl
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

UNIT = Path(__file__).parent / "unit"


def _marked(item: pytest.Item, *names: str) -> bool:
    return any(item.get_closest_marker(name) for name in names)


def _is_unit(item: pytest.Item) -> bool:
    """Those start no process, so that they change nothing for one that is alone."""
    return UNIT in item.path.parents


NEXT = pytest.StashKey["pytest.Item | None"]()
"""The test that this process runs next."""


class Room:
    """Where tests of all processes are, or those that want to be alone, one after the other."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self._door = stack.enter_context(path.with_suffix(".listener").open("w"))
        self._room = stack.enter_context(path.open("w"))
        self._kept = False

    @contextlib.contextmanager
    def entered(self, item: pytest.Item, mark: str) -> Iterator[None]:
        """Be in there, as soon as the others allow; one with the mark is alone.

        Keep the lock for the next exclusive test: a long test could get in between.
        """
        alone, after = _marked(item, mark), item.stash[NEXT]
        if not self._kept:
            self._enter(alone)
        yield
        self._kept = alone and after is not None and _marked(after, mark)
        if not self._kept:
            fcntl.flock(self._room, fcntl.LOCK_UN)

    def _enter(self, alone: bool) -> None:
        fcntl.flock(self._door, fcntl.LOCK_EX)  # who is to be alone keeps it shut until the room is empty
        fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self._door, fcntl.LOCK_UN)


@pytest.fixture(scope="session")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Room, Room]]:
    """One for all tests, one for those that start processes."""
    shared = tmp_path_factory.getbasetemp().parent
    with contextlib.ExitStack() as stack:
        yield Room(shared / "house", stack), Room(shared / "room", stack)


@pytest.fixture(autouse=True)
def side_by_side(request: pytest.FixtureRequest) -> Iterator[None]:
    """Beside one that is marked `alone` only unit tests run, beside one that is marked `quiet` none."""
    with contextlib.ExitStack() as stack:
        if "PYTEST_XDIST_WORKER" in os.environ:
            house, room = request.getfixturevalue("rooms")
            stack.enter_context(house.entered(request.node, "quiet"))
            if not _is_unit(request.node):
                stack.enter_context(room.entered(request.node, "alone"))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Remember what comes next."""
    item.stash[NEXT] = nextitem


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each process begins with its part of the list; who is done takes from the ends of others' parts."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count > 1:
        before = sorted(map(id, items))
        items[:] = itertools.chain(*dealt(items, count))
        assert sorted(map(id, items)) == before, "each test is dealt once"


def dealt(items: Sequence[pytest.Item], count: int) -> list[list[pytest.Item]]:
    """So many hands, as large as xdist cuts them: unit tests beside those alone, groups, long, others."""
    groups: dict[str, list[pytest.Item]] = {}
    unit, long, others = list[pytest.Item](), list[pytest.Item](), list[pytest.Item]()
    for item in items:
        if _marked(item, "quiet", "alone"):
            continue
        if _is_unit(item):
            unit.append(item)
        elif mark := item.get_closest_marker("together"):
            groups.setdefault(mark.args[0], []).append(item)
        else:  # long ones early, or the end would wait for one of them
            (long if _marked(item, "long") else others).append(item)
    random.Random(0).shuffle(others)  # neighbours are alike: all would compute, and then all wait
    share = -(-len(unit) // count)
    whole = sorted(groups.values(), key=len, reverse=True)
    hands = [
        [*unit[i * share : (i + 1) * share], *itertools.chain(*whole[i::count]), *long[i::count]]
        for i in range(count)
    ]
    hands[0][:0] = [item for name in ("quiet", "alone") for item in items if _marked(item, name)]
    left = iter(others)
    for i, hand in enumerate(hands):
        size = (len(items) - sum(map(len, hands[:i]))) // (count - i)
        hand.extend(itertools.islice(left, max(0, size - len(hand))))
    hands[-1].extend(left)
    return hands
