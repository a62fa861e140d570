"""The console's writer: slow and vanished readers, and a count of dropped lines."""

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import NoReturn
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.observers import outlet as module
from distlaunch.observers.outlet import Outlet
from tests.unit.samples import PAGE, Pipe, bounded, no_room

pytestmark = pytest.mark.timeout(60)
"""A pipe that nothing comes out of would be waited for."""

LONG_S = 30.0
"""What never takes so long has failed."""


@pytest.fixture
def reader() -> Iterator[Pipe]:
    with contextlib.closing(Pipe()) as reader:
        yield reader


@pytest.fixture
def full(reader: Pipe, monkeypatch: pytest.MonkeyPatch) -> Pipe:
    """A reader that takes nothing yet, of a full pipe; who is asked for patience is asked soon."""
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    reader.fill()
    return reader


def never(_: object) -> NoReturn:
    raise AssertionError("the outlet has not broken, and nothing is to be waited for")


def always(quiet_s: float) -> bool:
    return True


def outlet_with(reader: Pipe, *pieces: bytes) -> Outlet:
    """An outlet that was given these pieces."""
    outlet = Outlet(reader.write_end, never)
    for piece in pieces:
        outlet.write(piece)
    return outlet


# Order, and who waits for whom


def test_writes_without_a_thread(reader: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    outlet = Outlet(reader.write_end, never)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_room)
        outlet.write(b"one\n")
        assert reader.read(4) == b"one\n"
    outlet.write(b"two\n")  # there is room again
    outlet.close(always)
    assert reader.read_rest() == b"two\n"
    assert (outlet.dropped_lines, outlet.broken) == (0, False)


def test_close_waits_for_a_patient_reader(full: Pipe) -> None:
    data = b"x" * (5 << 16) + b"\n"  # several writes
    outlet = outlet_with(full, data)
    closing = threading.Thread(target=outlet.close, args=(always,))
    closing.start()
    got = full.read(PAGE + len(data))
    closing.join(LONG_S)
    assert got[PAGE:] == data and not closing.is_alive()
    assert outlet.dropped_lines == 0


# What is too much


@pytest.mark.parametrize(("capacity", "kept"), [(0, 0), (5, 1), (6, 2), (7, 2), (9, 3)])
def test_drops_and_counts_lines_beyond_the_capacity(full: Pipe, capacity: int, kept: int) -> None:
    lines = [b"aa\n", b"bb\n", b"cc\n"]
    with mock.patch.object(module, "CAPACITY", capacity):
        outlet = outlet_with(full, *lines)
    data = b"".join(lines[:kept])
    assert full.read(PAGE + len(data))[PAGE:] == data
    outlet.close(always)
    assert outlet.dropped_lines == 3 - kept


@mock.patch.object(module, "CAPACITY", 8)
def test_loses_nothing_where_it_waits_for_the_reader(full: Pipe) -> None:
    asked = threading.Event()
    lines = [b"first\n", b"second\n", b"longer than may wait\n"]

    def waits() -> bool:
        asked.set()
        return True

    outlet = Outlet(full.write_end, never, waits)
    writing = threading.Thread(target=lambda: deque(map(outlet.write, lines)))
    writing.start()
    assert asked.wait(LONG_S)
    assert full.read(PAGE + len(b"".join(lines)))[PAGE:] == b"".join(lines)
    writing.join()
    outlet.close(always)
    assert outlet.dropped_lines == 0


@mock.patch.object(module, "CAPACITY", 3)
def test_never_drops_own_lines_and_has_room_after_reading(full: Pipe) -> None:
    outlet = outlet_with(full, b"aa\n", b"bb\n")
    outlet.write(b"ours\n", ours=True)
    outlet.write(b"cc\n")
    assert full.read(PAGE + 8)[PAGE:] == b"aa\nours\n"
    with outlet._backlog.changed:
        assert outlet._backlog.changed.wait_for(lambda: not outlet._backlog.waiting, LONG_S)
    outlet.write(b"dd\n")
    outlet.close(always)
    assert full.read_rest() == b"dd\n"
    assert outlet.dropped_lines == 2


# Patience at the end


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [([b"a\n"], 1), ([b"a\n", b"b\nc\n"], 3), ([b"a\n", b"b"], 2), ([b"a"], 1)],
)
def test_counts_lines_left_by_an_impatient_close(full: Pipe, pieces: list[bytes], lines: int) -> None:
    outlet = outlet_with(full, *pieces)
    outlet.close(lambda quiet_s: False)
    assert outlet.dropped_lines == lines
    full.read(PAGE + sum(map(len, pieces)))
    outlet._backlog._thread.join(LONG_S)


def test_close_says_how_long_the_reader_has_been_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    backlog = module.Backlog[bytes]("outlet", lambda: None)
    backlog.waiting = 1
    taken = iter([False, False, True, False])
    monkeypatch.setattr(backlog, "moves", lambda within_s: next(taken))
    quiet: list[float] = []
    assert not backlog.drain(0.5, lambda quiet_s: quiet.append(quiet_s) or len(quiet) < 4)  # type: ignore[func-returns-value]
    assert quiet == [0.5, 1.0, 0.0, 0.5], "from anew when the reader takes something"


# Readers that leave, disks that are full


def test_a_reader_that_leaves_during_close_ends_it(full: Pipe) -> None:
    told = SimpleQueue[OSError]()
    outlet = Outlet(full.write_end, told.put)
    outlet.write(b"a\n")

    def patient(quiet_s: float) -> bool:
        if full.read_end >= 0:
            full.leave()
        return True

    outlet.close(patient)
    assert full.read_end < 0 and outlet.broken and told.get_nowait().errno == errno.EPIPE


@pytest.mark.parametrize("ours", [False, True], ids=["a worker's", "ours"])
def test_reports_a_gone_reader_once_and_counts_later_lines(reader: Pipe, ours: bool) -> None:
    told = SimpleQueue[OSError]()
    outlet = Outlet(reader.write_end, told.put)
    reader.leave()
    outlet.write(b"a\n")
    assert told.get(timeout=LONG_S).errno == errno.EPIPE and outlet.broken
    outlet.write(b"b\nc\n", ours)
    assert outlet.dropped_lines == 2
    outlet.close(never)
    assert told.empty()


@given(st.lists(st.binary(max_size=3 * PAGE), max_size=12), st.booleans())
@bounded(60)
def test_all_data_is_read_once_and_in_order(pieces: list[bytes], blocking: bool) -> None:
    with contextlib.closing(Pipe()) as reader:
        os.set_blocking(reader.write_end, blocking)
        outlet = outlet_with(reader, *pieces)
        data = b"".join(pieces)
        assert reader.read(len(data)) == data
        outlet.close(always)
        assert reader.read_rest() == b"" and (outlet.dropped_lines, outlet.broken) == (0, False)
