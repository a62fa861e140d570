"""Files from nodes: what a node may send, and what is kept of it."""

import os
from pathlib import Path

import pytest

from distlaunch.agent.collection import MAX_FILES
from distlaunch.agent.messages import FileBegins, FilesEnd
from distlaunch.agent.wire import ProtocolError
from distlaunch.job.spec import Collect
from distlaunch.launch import collecting
from distlaunch.launch.collecting import Files
from distlaunch.observers.outlet import CAPACITY

LIMIT = 1000
PLACES = {
    "outside": ["../x", "a/../../x", "/x", "..", "a/.."],
    "the directory": ["", ".", "./x", "a/.", "a/"],
    "no name": ["a//x", "a\0b", "x" * 256, "é" * 128, "\ud800", "a/" * 2000 + "x"],
}


def received(folder: Path, *paths: str) -> Files:
    """Files of which each has one byte."""
    files = Files(str(folder), Collect(("*",), limit=LIMIT))
    for path in paths:
        files.take(0, "gpu-a", FileBegins(0, path, 1))
        files.take(0, "gpu-a", b"x")
    return files


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", [path for paths in PLACES.values() for path in paths])
def test_refuses_a_path_that_leads_elsewhere_or_is_no_name(path: str, tmp_path: Path) -> None:
    files = received(tmp_path, "first")
    with pytest.raises(ProtocolError, match="is not the path of a collected file"):
        files.take(0, "gpu-a", FileBegins(0, path, 1))
    _, lines = files.close()
    assert names(tmp_path) == ["collected/gpu-a/first"]
    assert lines[1].startswith("not collected from gpu-a: other files (protocol error: ")


@pytest.mark.parametrize("path", ["x", "a/b/x", "\udcff", "...", "a b", "-rf", "x" * 255])
def test_keeps_a_file_at_its_path(path: str, tmp_path: Path) -> None:
    files = received(tmp_path, path)
    files.take(0, "gpu-a", FilesEnd(0, (), 0))
    assert files.close()[0] == [{"node": "gpu-a", "path": path, "size": 1}]
    assert (tmp_path / "collected" / "gpu-a" / path).read_bytes() == b"x"


def test_refuses_more_than_was_announced_or_is_allowed(tmp_path: Path) -> None:
    files = received(tmp_path, "x")
    for sent, words in (
        (b"y", "larger than announced"),
        (FileBegins(0, "x", 1), "is not the path"),
        (FileBegins(0, "y", LIMIT), "exceeds collect.limit"),
        (FileBegins(0, "y", -1), "exceeds collect.limit"),
    ):
        with pytest.raises(ProtocolError, match=words):
            files.take(0, "gpu-a", sent)
    with pytest.raises(ProtocolError, match="larger than announced"):
        files.take(1, "gpu-b", b"y")
    files.close()
    assert names(tmp_path) == ["collected/gpu-a/x"]


def test_refuses_more_files_than_a_node_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_FILES == 10_000
    monkeypatch.setattr(collecting, "MAX_FILES", 3)
    files = received(tmp_path, "a", "b", "c")
    with pytest.raises(ProtocolError, match="is not the path"):
        files.take(0, "gpu-a", FileBegins(0, "d", 1))
    files.close()


def test_removes_what_did_not_arrive_whole(tmp_path: Path) -> None:
    files = received(tmp_path, "a")
    for path in ("changed", "cut"):
        files.take(0, "gpu-a", FileBegins(0, path, 2))
        files.take(0, "gpu-a", b"x")
    files.take(0, "gpu-a", FilesEnd(0, (("changed", "changed while it was read"),), 3))
    kept, lines = files.close()
    assert [file["path"] for file in kept] == ["a"] and names(tmp_path) == ["collected/gpu-a/a"]
    left_out = "changed (changed while it was read), cut (is incomplete) and 3 more"
    done = f"collected 1 file (0 KiB) into {tmp_path}/collected"
    assert lines == [done, f"not collected from gpu-a: {left_out}"]


def test_nodes_that_lack_the_same_share_a_line(tmp_path: Path) -> None:
    files = Files(str(tmp_path), Collect(("*",)))
    for number in range(12):
        files.take(number, f"gpu-{number}", FilesEnd(number, (("*", "matches nothing"),), 0))
    (line,) = files.close()[1]
    assert line.endswith("gpu-7 and 4 more: * (matches nothing)")


def test_a_file_that_can_not_be_written_harms_no_other(tmp_path: Path) -> None:
    files = received(tmp_path, "a", "a/b", "c")
    files.take(0, "gpu-a", FilesEnd(0, (), 0))
    kept, lines = files.close()
    assert [file["path"] for file in kept] == ["a", "c"]
    assert names(tmp_path) == ["collected/gpu-a/a", "collected/gpu-a/c"]
    assert lines[1] == "not collected from gpu-a: a/b (Not a directory)"


def test_a_file_that_would_fill_the_disk_is_not_written(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    room = disk.f_bavail * disk.f_frsize
    files = Files(str(tmp_path), Collect(("*",), limit=2 * room))
    files.take(1, "gpu-b", FileBegins(0, "huge", room - CAPACITY))
    files.take(1, "gpu-b", b"x")
    files.take(1, "gpu-b", FilesEnd(0, (), 0))
    assert files.close() == ([], ["not collected from gpu-b: huge (No space left on device)"])
