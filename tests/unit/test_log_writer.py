"""The writer of log files: order, private files, slow disks, and a count of what is lost."""

import contextlib
import os
import socket
import stat
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.observers import run_directory as module
from distlaunch.observers.run_directory import LogWriter, RunDirectory
from tests.unit.samples import PAGE, Pipe, bounded, longest_file, no_room, open_files

pytestmark = pytest.mark.timeout(60)
"""A pipe that nothing comes out of would be waited for."""

LONG_S = 30.0
"""What never takes so long has failed."""
AT_ONCE_S = 0.001


class Disk(Pipe):
    """What takes bytes when `take` says so: a full pipe, in the place of the writer's file `log`."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self.fill()
        writer._open["log"] = self.write_end  # it closes its files itself

    def fill(self) -> None:
        super().fill()
        self._filled = PAGE

    def take(self, size: int) -> bytes:
        """So many bytes of the log, as soon as they come."""
        data, self._filled = self.read(self._filled + size)[self._filled :], 0
        return data


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[LogWriter]:
    yield LogWriter(str(tmp_path))
    for thread in threading.enumerate():
        if "_close_files" in thread.name:  # `short` doesn't wait for it
            thread.join(LONG_S)


@pytest.fixture
def disk(writer: LogWriter) -> Iterator[Disk]:
    """A disk that takes nothing yet; at the end it breaks, and the writer is closed."""
    disk = Disk(writer)
    yield disk
    if disk.read_end >= 0:
        disk.leave()
    with writer._backlog.changed:
        assert writer._backlog.changed.wait_for(lambda: not writer._backlog.waiting, LONG_S)
    writer.close()


short = mock.patch.multiple(module, CAPACITY=6, PATIENCE_S=AT_ONCE_S, FLUSH_S=AT_ONCE_S)
"""Six bytes may wait, and no time is spent on a disk that takes nothing."""


@contextlib.contextmanager
def when_waited_for(writer: LogWriter, act: Callable[[], object]) -> Iterator[list[float]]:
    """Does that once this thread waits for the writer's; the times for which it was willing to wait."""
    moves, waits = writer._backlog.moves, list[float]()
    acting = threading.Thread(target=act)

    def observed(within_s: float) -> bool:
        waits.append(within_s)
        if len(waits) == 1:
            acting.start()  # it may need the lock, which the wait gives back
        return moves(within_s)

    with mock.patch.object(writer._backlog, "moves", observed):
        yield waits
    if acting.ident:
        acting.join(LONG_S)


# Files


def test_files_and_directories_are_private(writer: LogWriter, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        writer.append("node1/rank0/out.log", b"text")
        writer.close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "node1/rank0/out.log").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "node1/rank0").stat().st_mode) == 0o700


def test_reads_on_without_waiting_for_the_disk(writer: LogWriter, tmp_path: Path) -> None:
    responds, fd_of = threading.Event(), module.fd_of
    (tmp_path / "requests").write_bytes(b"us")
    with mock.patch.object(module, "fd_of", lambda *where: responds.wait() and fd_of(*where)):
        assert [writer.read_on("requests") for _ in range(3)] == [b""] * 3
        responds.set()
        writer.flush()
        (tmp_path / "requests").write_bytes(b"usu")
        assert writer.read_on("requests") == b"us"
        writer.flush()
        assert (writer.read_on("requests"), writer.lost_bytes) == (b"u", 0)
        writer.close()


# Files that can't be opened


@pytest.mark.parametrize("link", ["", "victim", "missing"])
def test_touches_no_planted_file_and_no_planted_link(writer: LogWriter, tmp_path: Path, link: str) -> None:
    victim, planted = tmp_path / "victim", tmp_path / "node1/theirs"
    planted.parent.mkdir()
    for theirs in (victim, planted):
        theirs.write_bytes(b"theirs")
    if link:
        planted.unlink()
        planted.symlink_to(tmp_path / link)
    for name in ("node1/theirs", "node1/ours", "node1/theirs"):
        writer.append(name, b"text")
    writer.close()
    assert victim.read_bytes() == b"theirs" and not (tmp_path / "missing").exists()
    assert link or planted.read_bytes() == b"theirs"
    assert (tmp_path / "node1/ours").read_bytes() == b"text" and writer.lost_bytes == 8


@mock.patch.object(module, "MAX_OPEN", 1)
def test_follows_no_later_link(writer: LogWriter, tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"theirs")
    writer.append("log", b"text")
    writer.append("other", b"text")
    assert writer.flush()
    (tmp_path / "log").unlink()
    (tmp_path / "log").symlink_to("victim")
    writer.append("log", b"more")
    writer.close()
    assert (tmp_path / "victim").read_bytes() == b"theirs" and writer.lost_bytes == 4


def test_an_impossible_file_loses_its_own_data_and_is_tried_again(writer: LogWriter, tmp_path: Path) -> None:
    (tmp_path / "directory").write_bytes(b"")
    for name in ("directory/log", "log", "n" * 300):
        writer.append(name, b"text")
    assert writer.flush() and (tmp_path / "log").read_bytes() == b"text"
    (tmp_path / "directory").unlink()
    writer.append("directory/log", b"more")
    writer.close()
    assert (tmp_path / "directory/log").read_bytes() == b"more" and writer.lost_bytes == 8


# Disks that fail


def test_what_a_full_disk_refuses_is_lost_and_the_rest_is_written(writer: LogWriter, tmp_path: Path) -> None:
    with longest_file(5):
        writer.append("log", b"abcdefgh")
        writer.append("other", b"abcd")
        assert writer.flush()
    writer.append("log", b"ij")  # there is room again
    writer.close()
    assert (tmp_path / "log").read_bytes() == b"abcdeij"
    assert (tmp_path / "other").read_bytes() == b"abcd"
    assert (writer.lost_bytes, writer.trouble) == (3, "File too large")


# Disks that are slow, or take nothing


@short
def test_waits_once_for_a_stalled_disk_and_counts_what_is_lost(writer: LogWriter, disk: Disk) -> None:
    writer.append("log", b"abc")
    with when_waited_for(writer, lambda: None) as waits:
        writer.append("log", b"de")
        assert (writer.lost_bytes, waits) == (0, [])
        writer.append("log", b"gh")
        assert (writer.lost_bytes, waits) == (2, [AT_ONCE_S]), "a byte too much"
        writer.append("log", b"f")
        assert (writer.lost_bytes, waits) == (2, [AT_ONCE_S]), "as much as may wait"
        writer.append("log", b"i")
        assert (writer.lost_bytes, waits) == (3, [AT_ONCE_S]), "not a second time"
    assert disk.take(6) == b"abcdef"


@short
def test_a_piece_may_exceed_capacity(writer: LogWriter, disk: Disk) -> None:
    with when_waited_for(writer, lambda: None) as waits:
        writer.append("log", b"abcdefghi")
        assert (disk.take(9), waits, writer.lost_bytes) == (b"abcdefghi", [], 0)


@short
def test_waits_for_a_recovered_disk(writer: LogWriter, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.append("log", b"abcdef")
    writer.append("log", b"lost")
    assert disk.take(6) == b"abcdef"
    monkeypatch.setattr(module, "FLUSH_S", LONG_S)
    assert writer.flush()
    disk.fill()
    writer.append("log", b"ghijkl")
    monkeypatch.setattr(module, "PATIENCE_S", LONG_S)
    with when_waited_for(writer, lambda: disk.take(6)) as waits:
        writer.append("log", b"mno")
    assert waits == [LONG_S], "it is waited for"
    assert disk.take(3) == b"mno" and writer.lost_bytes == 4


@mock.patch.object(module, "FLUSH_S", LONG_S)
def test_flush_and_close_wait_for_a_slow_disk(writer: LogWriter, disk: Disk) -> None:
    got: list[bytes] = []
    for wait in (writer.flush, writer.close):
        writer.append("log", b"one ")
        writer.append("log", b"two")
        with when_waited_for(writer, lambda: got.append(disk.take(7))) as waits:
            wait()
        assert waits[0] == LONG_S and got.pop() == b"one two" and writer.lost_bytes == 0
        if wait == writer.flush:
            disk.fill()
    assert not any(thread.name == "log-writer" for thread in threading.enumerate())


@short
def test_flush_and_close_give_up_on_a_stalled_disk(writer: LogWriter, disk: Disk) -> None:
    writer.append("log", b"abc")
    assert not writer.flush() and writer.lost_bytes == 0, "it may be written still"
    writer.append("log", b"de")
    writer.close()
    assert writer.lost_bytes == 5


_appends = st.lists(st.tuples(st.sampled_from(["a", "b", "n/c", "n/d", "m/e"]), st.binary(max_size=50)))


@given(_appends, st.integers(1, 6))
@bounded(60)
def test_all_data_is_in_its_file_in_order_and_few_files_are_open(
    appends: list[tuple[str, bytes]], most_open: int
) -> None:
    limits = mock.patch.multiple(module, MAX_OPEN=most_open, CAPACITY=64, PATIENCE_S=LONG_S, FLUSH_S=LONG_S)
    with limits, tempfile.TemporaryDirectory() as directory:
        writer = LogWriter(directory)
        for name, data in appends:
            writer.append(name, data)
        assert writer.flush() and open_files(directory) <= most_open
        for name in {name for name, _ in appends}:
            expected = b"".join(data for each, data in appends if each == name)
            assert not expected or Path(directory, name).read_bytes() == expected
        writer.close()
        assert open_files(directory) == 0 and writer.lost_bytes == 0


def test_writes_without_a_thread(writer: LogWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_room)
    for text in (b"one ", b"two "):
        writer.append("log", text)
    assert (tmp_path / "log").read_bytes() == b"one two "
    writer.close()
    assert writer.lost_bytes == 0


@mock.patch.object(module, "FLUSH_S", 0.1)
def test_a_disk_that_keeps_a_file_from_being_closed_is_not_waited_for(tmp_path: Path) -> None:
    """As NFS does, which writes it back then. Here, a connection whose rest is not read takes its place."""
    directory = RunDirectory(str(tmp_path), "run")
    with socket.create_server(("127.0.0.1", 0)) as server:
        stuck = socket.create_connection(server.getsockname())
        reader = server.accept()[0]
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
    stuck.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            stuck.send(bytes(PAGE))
    stuck.setblocking(True)
    directory._locked.append(stuck.detach())
    directory.close()
    (closing,) = [thread for thread in threading.enumerate() if "_unlock" in thread.name]
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reader.close()  # which resets the connection
    closing.join(LONG_S)
    assert not closing.is_alive()
