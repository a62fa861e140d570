"""The agent's outbox: order and limits of its spool, priority of reports, and a count of what is lost."""

import contextlib
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent import messages, outbox, scratch, wire
from distlaunch.agent.messages import OutputLost
from distlaunch.agent.outbox import Outbox, Spool
from tests.unit.samples import PAGE, Pipe, bounded, longest_file, open_files

FRAME = wire.HEADER.size + 1
"""Bytes of one `frame`."""


def frame(mark: str, size: int = 1) -> bytes:
    return wire.encode(0, 0, 0, mark.encode() * size)


@contextlib.contextmanager
def directory_in(*places: "Path | str") -> Iterator[scratch.Directory]:
    """A directory with only these places."""
    directory = scratch.Directory()
    directory.places = [str(place) for place in places]
    try:
        yield directory
    finally:
        os.close(directory._paths_read)
        os.close(directory._paths_write)


@contextlib.contextmanager
def spool_in(
    *places: "Path | str", memory: int = 2 * FRAME, disk: int = 100 * FRAME, segment: int = 100 * FRAME
) -> Iterator[Spool]:
    sizes = mock.patch.multiple(outbox, MEMORY=memory, DISK=disk, SEGMENT=segment)
    with directory_in(*places) as directory, sizes:
        spool = Spool(directory)
        try:
            yield spool
        finally:
            spool.close()


def taken(spool: Spool, marks: str) -> str:
    """Those of the marks that the spool took."""
    return "".join(mark for mark in marks if spool.append(frame(mark)))


def popped(spool: Spool, count: int = 1000) -> str:
    """The marks of the next frames, at most so many."""
    marks = ""
    while spool and len(marks) < count:
        marks += spool.pop()[wire.HEADER.size :].decode()
    return marks


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place where files can be made, but nothing can be written."""
    unlinked_file = scratch.unlinked_file
    full = str(tmp_path / "full")
    monkeypatch.setattr(
        scratch,
        "unlinked_file",
        lambda place: os.open("/dev/full", os.O_RDWR) if place == full else unlinked_file(place),
    )
    return full


# The spool's order


def test_frames_come_out_in_order_from_memory_and_disk(tmp_path: Path) -> None:
    """Memory is used again once the disk is read."""
    with spool_in(tmp_path) as spool:
        for _ in range(3):
            taken(spool, "abc")
            assert open_files(tmp_path) == 1
            assert popped(spool) == "abc"
            taken(spool, "de")
            assert open_files(tmp_path) == 0
            assert popped(spool) == "de"


# The spool's disk


def test_reading_makes_room_on_disk(tmp_path: Path) -> None:
    with spool_in(tmp_path, disk=2 * FRAME) as spool:
        assert taken(spool, "abcde") == "abcd"
        assert popped(spool, 2) == "ab"
        assert taken(spool, "f") == "", "the disk is full still"
        assert popped(spool, 1) == "c"
        assert taken(spool, "gh") == "g"
        assert popped(spool) == "dg"


def test_smaller_frames_fit_where_a_large_one_does_not(tmp_path: Path) -> None:
    with spool_in(tmp_path, memory=0, disk=2 * FRAME) as spool:
        assert [spool.append(frame(*each)) for each in (("a",), ("x", 2), ("b",))] == [True, False, True]
        assert popped(spool) == "ab"


def test_segments_have_no_name_and_are_given_back_as_they_are_read(tmp_path: Path) -> None:
    with spool_in(tmp_path, memory=0, segment=2 * FRAME) as spool:
        taken(spool, "abcde")
        assert list(tmp_path.iterdir()) == []
        files = [open_files(tmp_path)]
        for mark in "abcde":
            assert popped(spool, 1) == mark
            files.append(open_files(tmp_path))
        assert files == [3, 3, 2, 2, 1, 0]


def test_a_segment_that_is_read_but_not_full_takes_no_more(tmp_path: Path) -> None:
    with spool_in(tmp_path, memory=0, segment=2 * FRAME) as spool:
        for mark in "abcdef":
            assert taken(spool, mark) == mark
            assert popped(spool) == mark
            assert open_files(tmp_path) == 0


def test_a_closed_spool_is_empty_and_has_all_its_room_again(tmp_path: Path) -> None:
    with spool_in(tmp_path, memory=FRAME, disk=2 * FRAME, segment=FRAME) as spool:
        for _ in range(2):
            assert [spool.append(frame(mark)) for mark in "abcd"] == [True, True, True, False]
            spool.close()
            assert not spool and open_files(tmp_path) == 0


# The spool's places


@pytest.mark.parametrize("missing", [False, True], ids=["full", "missing"])
def test_skips_and_closes_a_place_without_room(tmp_path: Path, full_disk: str, missing: bool) -> None:
    before = open_files(Path("/dev"))
    with spool_in(tmp_path / "missing" if missing else full_disk, tmp_path, memory=0) as spool:
        assert taken(spool, "abc") == "abc"
        assert (open_files(Path("/dev")), open_files(tmp_path)) == (before, 1)
        assert popped(spool) == "abc"


def test_uses_the_first_place_with_room(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with spool_in(first, second, memory=0, segment=FRAME) as spool:
        taken(spool, "abc")
        assert (open_files(first), open_files(second)) == (3, 0)


@pytest.mark.parametrize("missing", [False, True], ids=["full", "missing"])
def test_uses_only_memory_where_no_place_has_room(tmp_path: Path, full_disk: str, missing: bool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with spool_in(tmp_path / "missing" if missing else full_disk) as spool:
        assert taken(spool, "abcd") == "ab"
        assert popped(spool, 1) == "a"
        assert taken(spool, "ef") == "e"
        assert popped(spool) == "be"
    assert len(os.listdir("/proc/self/fd")) == before


def test_writes_a_partly_written_frame_again_elsewhere(tmp_path: Path) -> None:
    with longest_file(2 * FRAME + FRAME // 2), spool_in(tmp_path, memory=0) as spool:
        assert taken(spool, "abcde") == "abcde"
        assert open_files(tmp_path) == 3
        assert popped(spool) == "abcde"


def test_a_refused_place_takes_no_room_and_is_asked_again(tmp_path: Path) -> None:
    place = tmp_path / "later"
    with spool_in(place, memory=0, disk=FRAME) as spool:
        assert taken(spool, "abc") == ""
        place.mkdir()
        assert taken(spool, "d") == "d"
        assert popped(spool) == "d"


class Limits(NamedTuple):
    memory: int
    disk: int
    segment: int


_limits = st.builds(Limits, st.integers(0, 120), st.integers(0, 200), st.integers(1, 100))
_steps = st.lists(st.binary(max_size=40) | st.none(), max_size=40)
"""Frames with that content to append, or None to pop one."""


@given(_limits, _steps)
@bounded(300)
def test_all_spooled_frames_come_out_once_and_in_order(limits: Limits, steps: list[bytes | None]) -> None:
    accepted: deque[bytes] = deque()
    with tempfile.TemporaryDirectory() as place, spool_in(place, **limits._asdict()) as spool:
        for step in steps:
            if step is None:
                if accepted:
                    assert spool.pop() == accepted.popleft()
            else:
                entry = wire.encode(1, 2, 3, step)
                took = spool.append(entry)
                held = sum(map(len, accepted))
                assert took or held + len(entry) > min(limits.memory, limits.disk), "it had room"
                assert not took or held + len(entry) <= limits.memory + limits.disk, "it had none"
                accepted.extend([entry] * took)
            assert bool(spool) == bool(accepted)
        assert [spool.pop() for _ in range(len(accepted))] == list(accepted)
        assert not spool and open_files(Path(place)) == 0


# The outbox


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """As small as the system has one; what is written never waits."""
    with contextlib.closing(Pipe()) as pipe:
        os.set_blocking(pipe.write_end, False)
        yield pipe


@contextlib.contextmanager
def outbox_in(*places: "Path | str") -> Iterator[Outbox]:
    with directory_in(*places) as directory:
        box = Outbox(5, directory)
        try:
            yield box
        finally:
            box.discard()


def drained(box: Outbox, pipe: Pipe) -> bytes:
    """All that comes through the pipe, a piece at a time, until nothing is left to send."""
    data = b""
    while box:
        box.write(pipe.write_end)
        piece = pipe.read_rest()
        assert piece, "nothing moves"
        data += piece
    return data + pipe.read_rest()


def frames(data: bytes) -> list[wire.Frame]:
    return wire.FrameDecoder(wire.REPORTS).feed(data)


def shown(data: bytes) -> list[str]:
    """The frames in it: the content of output, the op of a report."""
    return [
        each.message()["op"] if each.kind == wire.CONTROL else each.payload[:1].decode()
        for each in frames(data)
    ]


def test_frames_name_their_node_attempt_and_channel(tmp_path: Path, pipe: Pipe) -> None:
    with outbox_in(tmp_path) as box:
        box.output(65537, 3, b"text")
        box.flight(2, 9, b"dump")
        box.report(messages.Pong(5, 1.5))
        box.post({"op": "own"})
        sent = [
            (each.kind, each.node, each.attempt, each.channel, each.payload)
            for each in frames(drained(box, pipe))
        ]
    assert sent == [
        (wire.CONTROL, 5, 0, 0, b'{"op":"Pong","node":5,"at":1.5}'),
        (wire.CONTROL, 5, 0, 0, b'{"op":"own"}'),
        (wire.OUTPUT, 5, 1, 3, b"text"),
        (wire.FLIGHT, 5, 2, 9, b"dump"),
    ]


def test_write_says_how_many_bytes_it_wrote(tmp_path: Path, pipe: Pipe) -> None:
    with outbox_in(tmp_path) as box:
        assert not box and box.write(pipe.write_end) == 0
        box.output(0, 0, b"text")
        assert box and box.write(pipe.write_end) == wire.HEADER.size + 4
        assert not box and box.write(pipe.write_end) == 0


def test_a_report_waits_for_the_frame_that_is_half_sent(tmp_path: Path, pipe: Pipe) -> None:
    with outbox_in(tmp_path) as box:
        box.output(0, 0, b"a" * 2 * PAGE)
        box.output(0, 0, b"b")
        assert box.write(pipe.write_end) == PAGE
        box.post({"op": "report"})
        assert shown(drained(box, pipe)) == ["a", "report", "b"]


def test_a_link_whose_reader_is_gone_raises(tmp_path: Path, pipe: Pipe) -> None:
    with outbox_in(tmp_path) as box:
        box.output(0, 0, b"text")
        pipe.leave()
        with pytest.raises(BrokenPipeError):
            box.write(pipe.write_end)


def test_discarded_data_is_never_sent(tmp_path: Path, pipe: Pipe) -> None:
    with outbox_in(tmp_path) as box:
        box.output(0, 0, b"a" * 2 * PAGE)
        box.write(pipe.write_end)
        box.post({"op": "report"})
        box.output(0, 0, b"b")
        pipe.read_rest()
        box.discard()
        assert not box and box.write(pipe.write_end) == 0 and pipe.read_rest() == b""


def test_reports_losses_once_by_rank_and_stream_and_still_accepts_reports(pipe: Pipe) -> None:
    data = b"x" * wire.MAX_OUTPUT
    with outbox_in() as box:
        fits = outbox.MEMORY // (wire.HEADER.size + len(data))
        for _ in range(fits):
            box.output(0, 0, data)
        assert box.losses() == []
        for channel in (5, 0, 5):
            box.output(0, channel, data)
        assert box.losses() == [OutputLost(5, 0, 0, len(data)), OutputLost(5, 2, 1, 2 * len(data))]
        assert box.losses() == []
        box.flight(0, 0, data)
        assert box.losses() == [], "a flight record is not output"
        box.output(0, 1, data)
        assert box.losses() == [OutputLost(5, 0, 1, len(data))]
        box.post({"op": "report"})
        assert shown(drained(box, pipe)) == ["report"] + ["x"] * fits


_traffic = st.lists(
    st.one_of(
        st.tuples(st.just("output"), st.integers(0, 3 * PAGE)),
        st.tuples(st.just("report"), st.integers(0, 50)),
        st.tuples(st.just("write"), st.just(0)),
        st.tuples(st.just("read"), st.integers(1, 2 * PAGE)),
    ),
    max_size=30,
)


@given(_traffic)
@bounded(200)
def test_all_queued_data_is_sent_once_and_in_order(traffic: list[tuple[str, int]]) -> None:
    data, outputs, reports = b"", [], []
    with outbox_in() as box, contextlib.closing(Pipe()) as pipe:
        os.set_blocking(pipe.write_end, False)
        for index, (what, size) in enumerate(traffic):
            if what == "output":
                outputs.append(bytes([index]) * size)
                box.output(0, 0, outputs[-1])
            elif what == "report":
                reports.append({"op": "x" * size, "index": index})
                box.post(reports[-1])
            elif what == "write":
                box.write(pipe.write_end)
            else:
                data += pipe.read_rest(size)
        data += pipe.read_rest()
        sent = frames(data + drained(box, pipe))
    assert [each.payload for each in sent if each.kind == wire.OUTPUT] == outputs
    assert [each.message() for each in sent if each.kind == wire.CONTROL] == reports
