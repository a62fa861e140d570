"""The agent's outbox: order and limits of its spool, priority of reports, and a count of what is lost."""

import contextlib
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent import messages, outbox, scratch, wire
from distlaunch.agent.messages import OutputLost
from distlaunch.agent.outbox import Outbox, Spool
from tests.unit.samples import PAGE, Pipe, bounded, longest_file, open_files

FRAME = wire.HEADER.size + 1
"""Bytes of a frame with one mark."""


@contextlib.contextmanager
def directory_in(*places: "Path | str") -> Iterator[scratch.Directory]:
    """A directory with only these places."""
    directory = scratch.Directory()
    directory.places = [str(place) for place in places]
    try:
        yield directory
    finally:
        paths, limits = directory._paths_read, directory._limits_read
        for pipe in (paths, directory._paths_write, limits, directory._limits_write):
            os.close(pipe)


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
    return "".join(mark for mark in marks if spool.append(wire.encode(0, 0, 0, mark.encode())))


def popped(spool: Spool, count: int = 1000) -> str:
    """The marks of the next frames, at most so many."""
    marks = ""
    while spool and len(marks) < count:
        marks += spool.pop()[wire.HEADER.size :].decode()
    return marks


# The spool


def test_segments_have_no_name_and_are_given_back_as_they_are_read(tmp_path: Path) -> None:
    with spool_in(tmp_path, memory=0, segment=2 * FRAME) as spool:
        taken(spool, "abcde")
        assert list(tmp_path.iterdir()) == []
        files = [open_files(tmp_path)]
        for mark in "abcde":
            assert popped(spool, 1) == mark
            files.append(open_files(tmp_path))
        assert files == [3, 3, 2, 2, 1, 0]


# The spool's places


def test_uses_the_first_place_with_room_or_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, full = scratch.unlinked_file, "/dev/full"

    def opened(place: str) -> int:
        """In `full`, a file can be made, but nothing can be written."""
        return os.open(full, os.O_RDWR) if place == full else make(place)

    monkeypatch.setattr(scratch, "unlinked_file", opened)
    before = len(os.listdir("/proc/self/fd"))
    (second := tmp_path / "second").mkdir()
    (first := tmp_path / "first").mkdir()
    with spool_in(tmp_path / "missing", full, first, second, memory=0, segment=FRAME) as spool:
        assert taken(spool, "abc") == "abc"
        assert (open_files(first), open_files(second)) == (3, 0)
        assert popped(spool) == "abc"
    with spool_in(tmp_path / "missing", full, disk=FRAME) as spool:
        assert taken(spool, "abcd") == "ab"
        (tmp_path / "missing").mkdir()
        assert taken(spool, "cd") == "c", "it is asked again, and refused data has taken no room"
        assert popped(spool) == "abc"
    assert len(os.listdir("/proc/self/fd")) == before, "no file in a full place stays open"


def test_writes_a_partly_written_frame_again_elsewhere(tmp_path: Path) -> None:
    with longest_file(2 * FRAME + FRAME // 2), spool_in(tmp_path, memory=0) as spool:
        assert taken(spool, "abcde") == "abcde"
        assert open_files(tmp_path) == 3
        assert popped(spool) == "abcde"


_limits = st.tuples(st.integers(0, 120), st.integers(0, 200), st.integers(1, 100))
_steps = st.lists(st.binary(max_size=40) | st.sampled_from(["pop", "close"]), max_size=40)
"""Frames with that content to append, and what else is done."""


@pytest.mark.parametrize("left", [0, 3, FRAME - 1])
def test_a_file_that_cannot_be_read_back_costs_only_what_is_in_it(tmp_path: Path, left: int) -> None:
    with spool_in(tmp_path, segment=FRAME) as spool:
        assert taken(spool, "abcde") == "abcde"
        os.ftruncate(spool._segments[0]._fd, left)
        assert (popped(spool), spool.is_damaged) == ("abde", True)
        assert taken(spool, "fgh") == popped(spool) == "fgh"


@given(_limits, _steps)
@bounded(200)
def test_frames_come_out_once_and_in_order_within_the_limits(
    limits: tuple[int, int, int], steps: list[bytes | str]
) -> None:
    """Memory is used again once the disk is read, and reading makes room on disk."""
    in_memory, on_disk = deque[bytes](), deque[bytes]()
    memory, disk, segment = limits
    sizes = {"memory": memory, "disk": disk, "segment": segment}
    with tempfile.TemporaryDirectory() as place, spool_in(place, **sizes) as spool:
        for step in steps:
            if isinstance(step, bytes):
                entry = wire.encode(1, 2, 3, step)
                fits = not on_disk and sum(map(len, in_memory)) + len(entry) <= memory
                room = fits or sum(map(len, on_disk)) + len(entry) <= disk
                assert spool.append(entry) == room
                (in_memory if fits else on_disk).extend([entry] * room)
            elif step == "close":
                spool.close()
                in_memory, on_disk = deque(), deque()
            elif spool:
                assert spool.pop() == (in_memory or on_disk).popleft()
            assert bool(spool) == bool(in_memory or on_disk)
            assert bool(open_files(place)) == bool(on_disk)
        assert [spool.pop() for _ in range(len(in_memory) + len(on_disk))] == [*in_memory, *on_disk]
        assert not spool and open_files(place) == 0


# The outbox


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """As small as the system has one; what is written never waits."""
    with contextlib.closing(Pipe()) as pipe:
        os.set_blocking(pipe.write_end, False)
        yield pipe


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Outbox]:
    with outbox_in(tmp_path) as box:
        yield box


@contextlib.contextmanager
def outbox_in(*places: Path) -> Iterator[Outbox]:
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


def test_frames_name_their_node_attempt_and_channel(box: Outbox, pipe: Pipe) -> None:
    box.output(65537, 3, b"text")
    box.flight(2, 9, b"dump")
    box.report(messages.Pong(5, 1.5))
    box.post({"op": "own"})
    sent = frames(drained(box, pipe))
    assert [(each.kind, each.node, each.attempt, each.channel, each.payload) for each in sent] == [
        (wire.CONTROL, 5, 0, 0, b'{"op":"Pong","node":5,"at":1.5}'),
        (wire.CONTROL, 5, 0, 0, b'{"op":"own"}'),
        (wire.OUTPUT, 5, 1, 3, b"text"),
        (wire.FLIGHT, 5, 2, 9, b"dump"),
    ]


def test_a_report_waits_for_the_frame_that_is_half_sent(box: Outbox, pipe: Pipe) -> None:
    box.output(0, 0, b"a" * 2 * PAGE)
    box.output(0, 0, b"b")
    assert box.write(pipe.write_end) == PAGE, "bytes were written"
    box.post({"op": "report"})
    assert shown(drained(box, pipe)) == ["a", "report", "b"]


def test_a_link_whose_reader_is_gone_raises_and_discarded_data_is_never_sent(box: Outbox, pipe: Pipe) -> None:
    box.output(0, 0, b"a" * 2 * PAGE)
    box.write(pipe.write_end)
    box.post({"op": "report"})
    box.output(0, 0, b"b")
    pipe.read_rest()
    box.discard()
    assert not box and box.write(pipe.write_end) == 0 and pipe.read_rest() == b""
    box.output(0, 0, b"text")
    pipe.leave()
    with pytest.raises(BrokenPipeError):
        box.write(pipe.write_end)


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


_kinds = {"output": (0, 3 * PAGE), "report": (0, 50), "write": (0, 0), "read": (1, 2 * PAGE)}
_traffic = st.lists(
    st.one_of(*(st.tuples(st.just(kind), st.integers(*sizes)) for kind, sizes in _kinds.items())),
    max_size=30,
)


@given(_traffic)
@bounded(150)
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
