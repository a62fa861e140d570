"""The console's writer: slow and vanished readers, and a count of dropped lines."""

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.observers import outlet as module
from distlaunch.observers.outlet import Outlet
from tests.unit.samples import PAGE, Pipe, bounded, no_room

pytestmark = pytest.mark.timeout(60)
"""A pipe that nothing comes out of would be waited for."""

CHUNK = 1 << 16
"""Bytes that are written at once."""
LONG_S = 30.0
"""What never takes so long has failed."""


class Broken:
    """What an outlet has told of its end, and from which threads."""

    def __init__(self) -> None:
        self.errors: list[int | None] = []
        self.threads: list[threading.Thread] = []
        self._told = threading.Event()

    def __call__(self, error: OSError) -> None:
        self.errors.append(error.errno)
        self.threads.append(threading.current_thread())
        self._told.set()

    def wait(self) -> None:
        assert self._told.wait(LONG_S)


@pytest.fixture
def reader() -> Iterator[Pipe]:
    with contextlib.closing(Pipe()) as reader:
        yield reader


@pytest.fixture
def full(reader: Pipe) -> Pipe:
    """A reader that takes nothing yet, of a pipe that is full."""
    reader.fill()
    return reader


def never(error: OSError) -> None:
    raise AssertionError(error)


def always(quiet_s: float) -> bool:
    return True


def not_at_all(quiet_s: float) -> bool:
    return False


def unasked(quiet_s: float) -> bool:
    raise AssertionError("nothing is to be waited for")


def outlet_with(reader: Pipe, *pieces: bytes) -> Outlet:
    """An outlet that was given these pieces."""
    outlet = Outlet(reader.write_end, never)
    for piece in pieces:
        outlet.write(piece)
    return outlet


def wait_until(outlet: Outlet, waiting: int) -> None:
    """Until so many bytes wait for the reader."""
    backlog = outlet._backlog
    with backlog.changed:
        assert backlog.changed.wait_for(lambda: backlog.waiting == waiting, LONG_S)


def end(outlet: Outlet) -> None:
    """The end of a thread that was not waited for."""
    outlet._backlog._thread.join(LONG_S)
    assert not outlet._backlog._thread.is_alive()


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
    data = b"x" * 5 * CHUNK + b"\n"
    outlet = outlet_with(full, data)
    closing = threading.Thread(target=outlet.close, args=(always,))
    closing.start()
    got = full.read(PAGE + len(data))
    closing.join(LONG_S)
    assert got[PAGE:] == data and not closing.is_alive()
    assert outlet.dropped_lines == 0


def test_an_outlet_that_wrote_nothing_closes_at_once(full: Pipe) -> None:
    Outlet(full.write_end, never).close(unasked)


# What is too much


@pytest.mark.parametrize(
    ("capacity", "pieces", "kept"),
    [
        pytest.param(0, [b"aa\n", b"bb\n", b"cc\n"], 0, id="nothing fits"),
        pytest.param(5, [b"aa\n", b"bb\n", b"cc\n"], 1, id="one line"),
        pytest.param(6, [b"aa\n", b"bb\n", b"cc\n"], 2, id="two lines"),
        pytest.param(7, [b"aa\n", b"bb\n", b"cc\n"], 2, id="a byte to spare"),
        pytest.param(9, [b"aa\n", b"bb\n", b"cc\n"], 3, id="all"),
        pytest.param(3, [b"a\nb\nc\n", b"d\ne\n"], 0, id="pieces of several lines"),
    ],
)
def test_drops_and_counts_lines_beyond_the_capacity(
    full: Pipe, monkeypatch: pytest.MonkeyPatch, capacity: int, pieces: list[bytes], kept: int
) -> None:
    monkeypatch.setattr(module, "CAPACITY", capacity)
    outlet = outlet_with(full, *pieces)
    dropped = b"".join(pieces[kept:]).count(b"\n")
    assert outlet.dropped_lines == dropped
    data = b"".join(pieces[:kept])
    assert full.read(PAGE + len(data))[PAGE:] == data
    outlet.close(always)
    assert outlet.dropped_lines == dropped


def test_loses_nothing_where_it_waits_for_the_reader(full: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CAPACITY", 8)
    asked = threading.Event()
    lines = [b"first\n", b"second\n", b"longer than may wait\n"]

    def waits() -> bool:
        asked.set()
        return True

    def write() -> None:
        for line in lines:
            outlet.write(line)

    outlet = Outlet(full.write_end, never, waits)
    writing = threading.Thread(target=write)
    writing.start()
    assert asked.wait(LONG_S)
    assert full.read(PAGE + len(b"".join(lines)))[PAGE:] == b"".join(lines)
    writing.join()
    outlet.close(always)
    assert outlet.dropped_lines == 0


def test_never_drops_own_lines_and_has_room_after_reading(
    full: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CAPACITY", 3)
    outlet = outlet_with(full, b"aa\n", b"bb\n")
    outlet.write(b"ours\n", ours=True)
    outlet.write(b"cc\n")
    assert full.read(PAGE + 8)[PAGE:] == b"aa\nours\n"
    wait_until(outlet, 0)
    outlet.write(b"dd\n")
    outlet.close(always)
    assert full.read_rest() == b"dd\n"
    assert outlet.dropped_lines == 2


# Patience at the end


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [([b"a\n"], 1), ([b"a\n", b"b\nc\n"], 3), ([b"a\n", b"b"], 2), ([b"a"], 1)],
    ids=["a line", "three lines", "a line without an end", "that alone"],
)
def test_counts_lines_left_by_an_impatient_close(
    full: Pipe, monkeypatch: pytest.MonkeyPatch, pieces: list[bytes], lines: int
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    outlet = outlet_with(full, *pieces)
    outlet.close(not_at_all)
    assert outlet.dropped_lines == lines
    full.read(PAGE + sum(map(len, pieces)))
    end(outlet)


def ticking() -> Callable[[], float]:
    """A clock that goes on by a second whenever it is looked at."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def test_close_says_how_long_the_reader_has_been_quiet(full: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=ticking()))
    outlet = outlet_with(full, b"a" * CHUNK + b"b\n")
    quiet: list[float] = []
    # That is all of the chunk but a page, which then goes into the pipe.
    reading = threading.Thread(target=full.read, args=(CHUNK,))
    wait = outlet._backlog.changed.wait

    def waits_for_the_reader(timeout: float | None = None) -> bool:
        return wait(LONG_S if timeout and reading.ident else timeout)

    monkeypatch.setattr(outlet._backlog.changed, "wait", waits_for_the_reader)

    def patient(quiet_s: float) -> bool:
        quiet.append(quiet_s)
        if len(quiet) == 3:
            reading.start()
        return len(quiet) < 4

    outlet.close(patient)
    reading.join(LONG_S)
    assert quiet == [1.0, 2.0, 3.0, 1.0], "from anew when the reader takes something"
    assert outlet.dropped_lines == 1
    full.read(PAGE + 2)
    end(outlet)


# Readers that leave, disks that are full


def test_a_reader_that_leaves_during_close_ends_it(full: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    broken = Broken()
    outlet = Outlet(full.write_end, broken)
    outlet.write(b"a\n")
    asked: list[float] = []

    def patient(quiet_s: float) -> bool:
        if not asked:
            full.leave()
        asked.append(quiet_s)
        return True

    outlet.close(patient)
    assert asked and outlet.broken and broken.errors == [errno.EPIPE]


def test_reports_a_full_disk() -> None:
    broken = Broken()
    with open("/dev/full", "wb") as full:
        outlet = Outlet(full.fileno(), broken)
        outlet.write(b"a\n")
        broken.wait()
        outlet.close(unasked)
    assert broken.errors == [errno.ENOSPC]


@pytest.mark.parametrize("ours", [False, True], ids=["a worker's", "ours"])
def test_reports_a_gone_reader_once_and_counts_later_lines(reader: Pipe, ours: bool) -> None:
    broken = Broken()
    outlet = Outlet(reader.write_end, broken)
    reader.leave()
    outlet.write(b"a\n")
    broken.wait()
    assert outlet.broken and broken.threads != [threading.main_thread()]
    outlet.write(b"b\nc\n", ours)
    assert outlet.dropped_lines == 2
    outlet.close(unasked)
    assert broken.errors == [errno.EPIPE]


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
