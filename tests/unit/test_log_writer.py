"""The writer of log files: order, private files, slow disks, and a count of what is lost."""

import contextlib
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.observers import run_directory as module
from distlaunch.observers.run_directory import LogWriter
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

    def close(self) -> None:
        """Takes what is left, so that the writer's thread can end."""
        if self.read_end >= 0:
            while os.read(self.read_end, 1 << 20):
                pass
            self.leave()


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    return LogWriter(str(tmp_path))


@pytest.fixture
def disk(writer: LogWriter) -> Iterator[Disk]:
    """A disk that takes nothing yet; at the end it takes all, and the writer is closed."""
    disk = Disk(writer)
    yield disk
    closing = threading.Thread(target=close_at_last, args=(writer,))
    closing.start()
    disk.close()
    closing.join(LONG_S)


def close_at_last(writer: LogWriter) -> None:
    """However long it takes: its patience may be short, or all gone."""
    with writer._backlog.changed:
        assert writer._backlog.changed.wait_for(lambda: not writer._backlog.waiting, LONG_S)
    writer.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six bytes may wait, and no time is spent on a disk that takes nothing."""
    monkeypatch.setattr(module, "CAPACITY", 6)
    monkeypatch.setattr(module, "PATIENCE_S", AT_ONCE_S)
    monkeypatch.setattr(module, "FLUSH_S", AT_ONCE_S)


@contextlib.contextmanager
def when_waited_for(
    writer: LogWriter, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]
) -> Iterator[list[float | None]]:
    """Does that once this thread waits for the writer's; the times for which it was willing to wait."""
    wait, waits = writer._backlog.changed.wait, list[float | None]()
    acting = threading.Thread(target=act)

    def observed(timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            waits.append(timeout)
            if len(waits) == 1:
                acting.start()  # it may need the lock, which the wait gives back
        return wait(timeout)

    monkeypatch.setattr(writer._backlog.changed, "wait", observed)
    yield waits
    if acting.ident:
        acting.join(LONG_S)


# Files


def test_writes_without_a_thread(writer: LogWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_room)
    for text in (b"one ", b"two "):
        writer.append("log", text)
    assert (tmp_path / "log").read_bytes() == b"one two "
    writer.close()
    assert writer.lost_bytes == 0


def test_files_and_directories_are_private(writer: LogWriter, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        writer.append("node1/rank0/out.log", b"text")
        writer.close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "node1/rank0/out.log").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "node1/rank0").stat().st_mode) == 0o700


def test_flushed_data_can_be_read(writer: LogWriter, tmp_path: Path) -> None:
    for text in (b"one ", b"two "):
        writer.append("log", text)
        assert writer.flush()
        assert (tmp_path / "log").read_bytes().endswith(text)
    writer.close()


def test_nothing_to_write_is_flushed_and_closed_at_once(writer: LogWriter, tmp_path: Path) -> None:
    assert writer.flush()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_keeps_few_files_open(writer: LogWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 2)
    for turn in range(3):
        for rank in range(5):
            writer.append(f"{rank}.log", b"%d.%d " % (rank, turn))
    assert writer.flush() and open_files(tmp_path) == 2
    writer.close()
    assert open_files(tmp_path) == 0 and writer.lost_bytes == 0
    for rank in range(5):
        assert (tmp_path / f"{rank}.log").read_text() == f"{rank}.0 {rank}.1 {rank}.2 "


# Files that can't be opened


def test_does_not_touch_an_existing_file(writer: LogWriter, tmp_path: Path) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1/theirs").write_bytes(b"theirs")
    for name in ("node1/theirs", "node1/ours", "node1/theirs"):
        writer.append(name, b"text")
    writer.close()
    assert (tmp_path / "node1/theirs").read_bytes() == b"theirs"
    assert (tmp_path / "node1/ours").read_bytes() == b"text"
    assert writer.lost_bytes == 8


@pytest.mark.parametrize("target", ["victim", "missing"])
def test_follows_no_planted_link(writer: LogWriter, tmp_path: Path, target: str) -> None:
    (tmp_path / "victim").write_bytes(b"theirs")
    (tmp_path / "log").symlink_to(tmp_path / target)
    writer.append("log", b"text")
    writer.close()
    assert (tmp_path / "victim").read_bytes() == b"theirs" and not (tmp_path / "missing").exists()
    assert writer.lost_bytes == 4


def test_follows_no_later_link(writer: LogWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 1)
    (tmp_path / "victim").write_bytes(b"theirs")
    writer.append("log", b"text")
    writer.append("other", b"text")
    assert writer.flush()
    (tmp_path / "log").unlink()
    (tmp_path / "log").symlink_to("victim")
    writer.append("log", b"more")
    writer.close()
    assert (tmp_path / "victim").read_bytes() == b"theirs" and writer.lost_bytes == 4


@pytest.mark.parametrize("name", ["file/log", "n" * 300], ids=["below a file", "a name too long"])
def test_an_impossible_file_loses_only_its_own_data(writer: LogWriter, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    writer.append(name, b"lost")
    writer.append("log", b"text")
    writer.append(name, b"lost too")
    writer.close()
    assert (tmp_path / "log").read_bytes() == b"text"
    assert writer.lost_bytes == 12


def test_tries_again_to_make_a_file(writer: LogWriter, tmp_path: Path) -> None:
    (tmp_path / "directory").write_bytes(b"")
    writer.append("directory/log", b"lost")
    assert writer.flush()
    (tmp_path / "directory").unlink()
    writer.append("directory/log", b"text")
    writer.close()
    assert (tmp_path / "directory/log").read_bytes() == b"text" and writer.lost_bytes == 4


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


def test_counts_bytes_lost_to_a_broken_disk(writer: LogWriter, disk: Disk) -> None:
    disk.leave()
    writer.append("log", b"text")
    assert writer.flush(), "nothing waits any more"
    writer.append("log", b"more")
    writer.close()
    assert writer.lost_bytes == 8


# Disks that are slow, or take nothing


@pytest.mark.usefixtures("short")
def test_waits_once_for_a_stalled_disk_and_counts_what_is_lost(
    writer: LogWriter, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.append("log", b"abc")
    with when_waited_for(writer, monkeypatch, lambda: None) as waits:
        writer.append("log", b"de")
        assert (writer.lost_bytes, waits) == (0, [])
        writer.append("log", b"gh")
        assert (writer.lost_bytes, waits) == (2, [AT_ONCE_S]), "a byte too much"
        writer.append("log", b"f")
        assert (writer.lost_bytes, waits) == (2, [AT_ONCE_S]), "as much as may wait"
        writer.append("log", b"i")
        assert (writer.lost_bytes, waits) == (3, [AT_ONCE_S]), "not a second time"
    assert disk.take(6) == b"abcdef"


@pytest.mark.usefixtures("short")
def test_a_piece_may_exceed_capacity(writer: LogWriter, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    with when_waited_for(writer, monkeypatch, lambda: None) as waits:
        writer.append("log", b"abcdefghi")
        assert (disk.take(9), waits, writer.lost_bytes) == (b"abcdefghi", [], 0)


@pytest.mark.usefixtures("short")
def test_waits_for_a_recovered_disk(writer: LogWriter, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.append("log", b"abcdef")
    writer.append("log", b"lost")
    assert disk.take(6) == b"abcdef"
    monkeypatch.setattr(module, "FLUSH_S", LONG_S)
    assert writer.flush()
    disk.fill()
    writer.append("log", b"ghijkl")
    monkeypatch.setattr(module, "PATIENCE_S", LONG_S)
    with when_waited_for(writer, monkeypatch, lambda: disk.take(6)) as waits:
        writer.append("log", b"mno")
    assert waits == [LONG_S], "it is waited for"
    assert disk.take(3) == b"mno" and writer.lost_bytes == 4


def test_flush_waits_for_a_slow_disk(writer: LogWriter, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_S", LONG_S)
    writer.append("log", b"text")
    with when_waited_for(writer, monkeypatch, lambda: disk.take(4)) as waits:
        assert writer.flush()
    assert waits == [LONG_S]


@pytest.mark.usefixtures("short")
def test_flush_gives_up_on_a_stalled_disk(writer: LogWriter, disk: Disk) -> None:
    writer.append("log", b"text")
    assert not writer.flush()
    assert writer.lost_bytes == 0, "it may be written still"
    disk.take(4)
    assert writer.lost_bytes == 0


def test_close_waits_for_a_slow_disk(writer: LogWriter, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_S", LONG_S)
    writer.append("log", b"one ")
    writer.append("log", b"two")
    got: list[bytes] = []
    with when_waited_for(writer, monkeypatch, lambda: got.append(disk.take(7))):
        writer.close()
    assert got == [b"one two"] and writer.lost_bytes == 0
    assert not any(thread.name == "log-writer" for thread in threading.enumerate())


@pytest.mark.usefixtures("short")
def test_close_counts_what_a_stalled_disk_did_not_take(writer: LogWriter, disk: Disk) -> None:
    writer.append("log", b"abc")
    writer.append("log", b"de")
    writer.close()
    assert writer.lost_bytes == 5


_appends = st.lists(st.tuples(st.sampled_from(["a", "b", "n/c", "n/d", "m/e"]), st.binary(max_size=50)))


@given(_appends, st.integers(1, 6))
@bounded(60)
def test_all_data_is_in_its_file_in_order(appends: list[tuple[str, bytes]], most_open: int) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setattr(module, "MAX_OPEN", most_open)
        patch.setattr(module, "CAPACITY", 64)
        patch.setattr(module, "PATIENCE_S", LONG_S)
        writer = LogWriter(directory)
        for name, data in appends:
            writer.append(name, data)
        writer.close()
        assert writer.lost_bytes == 0
        for name in {name for name, _ in appends}:
            expected = b"".join(data for each, data in appends if each == name)
            assert Path(directory, name).read_bytes() == expected
