"""Files from nodes: what a node may send, and what is kept of it."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from distlaunch.agent import collection
from distlaunch.agent.collection import MAX_FILES, Collection
from distlaunch.agent.messages import Collect as Wanted
from distlaunch.agent.messages import FileBegins, FilesEnd
from distlaunch.agent.wire import ProtocolError
from distlaunch.job.spec import Collect
from distlaunch.launch import collecting
from distlaunch.launch.collecting import Files
from distlaunch.observers.outlet import CAPACITY

LIMIT = 1000
PATHS = (
    *("../x", "a/../../x", "/x", "..", "a/.."),  # outside
    *("", ".", "./x", "a/.", "a/"),  # the directory
    *("a//x", "a\0b", "x" * 256, "é" * 128, "\ud800", "a/" * 2000 + "x"),  # no name
)


def received(directory: Path, *paths: str) -> Files:
    """Files of which each has one byte."""
    files = Files(str(directory), Collect(("*",), limit=LIMIT))
    for path in paths:
        files.take(0, "gpu-a", FileBegins(0, path, 1))
        files.take(0, "gpu-a", b"x")
    return files


def names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", PATHS)
def test_refuses_a_path_that_leads_elsewhere_or_is_no_name(path: str, tmp_path: Path) -> None:
    files = received(tmp_path, "first")
    with pytest.raises(ProtocolError, match="is not the path of a collected file"):
        files.take(0, "gpu-a", FileBegins(0, path, 1))
    _, lines = files.close({})
    assert names(tmp_path) == ["collected/gpu-a/first"]
    assert lines[1].startswith("not collected from gpu-a: other files (protocol error: ")


@pytest.mark.parametrize("path", ["x", "a/b/x", "\udcff", "...", "a b", "-rf", "x" * 255])
def test_keeps_a_file_at_its_path(path: str, tmp_path: Path) -> None:
    files = received(tmp_path, path)
    files.take(0, "gpu-a", FilesEnd(0, (), 0))
    assert files.close({})[0] == [{"node": "gpu-a", "path": path, "size": 1}]
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
    files.close({})
    assert names(tmp_path) == ["collected/gpu-a/x"]


def test_refuses_more_files_than_a_node_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_FILES == 10_000
    monkeypatch.setattr(collecting, "MAX_FILES", 3)
    files = received(tmp_path, "a", "b", "c")
    with pytest.raises(ProtocolError, match="is not the path"):
        files.take(0, "gpu-a", FileBegins(0, "d", 1))
    files.close({})


def test_removes_what_did_not_arrive_whole(tmp_path: Path) -> None:
    files = received(tmp_path, "a")
    for path in ("changed", "cut"):
        files.take(0, "gpu-a", FileBegins(0, path, 2))
        files.take(0, "gpu-a", b"x")
    files.take(0, "gpu-a", FilesEnd(0, (("changed", "changed while it was read"),), 3))
    kept, lines = files.close({})
    assert [file["path"] for file in kept] == ["a"] and names(tmp_path) == ["collected/gpu-a/a"]
    left_out = "changed (changed while it was read), cut (is incomplete) and 3 more"
    done = f"collected 1 file (0 KiB) into {tmp_path}/collected"
    assert lines == [done, f"not collected from gpu-a: {left_out}"]


def test_nodes_that_lack_the_same_share_a_line(tmp_path: Path) -> None:
    files = Files(str(tmp_path), Collect(("*",)))
    for number in range(12):
        files.take(number, f"gpu-{number}", FilesEnd(number, (("*", "matches nothing"),), 0))
    (line,) = files.close({})[1]
    assert line.endswith("gpu-7 and 4 more: * (matches nothing)")


def test_a_file_that_can_not_be_written_harms_no_other(tmp_path: Path) -> None:
    files = received(tmp_path, "a", "a/b", "c")
    files.take(0, "gpu-a", FilesEnd(0, (), 0))
    kept, lines = files.close({})
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
    why = "No space left on device: 16 MiB are kept free for the run's other files"
    assert files.close({}) == ([], [f"not collected from gpu-b: huge ({why})"])


# The side of the node


class Box:
    """An outbox that keeps what is queued, and has room for `room` entries."""

    node, has_output = 0, True

    def __init__(self) -> None:
        self.room, self.queued = 1_000_000, list[Any]()

    @property
    def has_room(self) -> bool:
        return len(self.queued) < self.room

    def file(self, data: bytes) -> None:
        self.queued.append(data)

    def report_in_order(self, report: Any) -> None:
        self.queued.append(report)

    def names(self) -> list[str]:
        return [each.path for each in self.queued if isinstance(each, FileBegins)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    checkpoints = ("ckpt/1/.metadata", "ckpt/1/x.pt", "ckpt/2/x.pt")
    for name in ("a.csv", "b[1].csv", ".c.csv", *checkpoints, "runs/a.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "ckpt" / "last").symlink_to("2")
    (tmp_path / "ckpt" / "up").symlink_to("..")
    return tmp_path


def collection_of(tree: Path, *paths: str, box: Box) -> Collection:
    return Collection(Wanted(paths, str(tree), 1 << 20, str(tree / "runs")), box)  # type: ignore[arg-type]


def finish(files: Collection) -> None:
    """Take all steps, which a busy machine may need several turns for."""
    while not files.go_on():
        pass


def collected(tree: Path, *paths: str) -> Box:
    finish(collection_of(tree, *paths, box=(box := Box())))
    return box


PATTERNS = {
    "*.csv": [".c.csv", "a.csv", "b[1].csv"],
    "b[1].csv": ["b[1].csv"],
    "?.csv": ["a.csv"],
    "ckpt/*/x.pt": ["ckpt/1/x.pt", "ckpt/2/x.pt"],
    "ckpt/last/x.pt": ["ckpt/last/x.pt"],
    "./ckpt//1/": ["ckpt/1/.metadata", "ckpt/1/x.pt"],
    "ckpt/1/**": ["ckpt/1/.metadata", "ckpt/1/x.pt"],
    "**/x.pt": ["ckpt/1/x.pt", "ckpt/2/x.pt"],
    "**/**/a.csv": ["a.csv"],
    "ckpt/1/.": ["ckpt/1/.metadata", "ckpt/1/x.pt"],
    "a.csv/x": [],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_finds_what_a_pattern_matches_once(pattern: str, tree: Path) -> None:
    box = collected(tree, pattern, pattern)
    assert box.names() == PATTERNS[pattern]
    nothing = () if PATTERNS[pattern] else ((pattern, "matches nothing"),) * 2
    assert box.queued[-1] == FilesEnd(0, nothing, 0)


@pytest.mark.parametrize("pattern", [".", "./", "ckpt/.."])
def test_a_dot_stands_for_the_working_directory(pattern: str, tree: Path) -> None:
    assert collected(tree, pattern).names() == collected(tree, "**").names() != []


@pytest.mark.parametrize("pattern", ["**/*.pt", "out*/a.pt", "TREE/out*/*.pt", "TREE/**/a.pt"])
def test_names_symlinks_to_directories_elsewhere_that_a_pattern_matches(pattern: str, tree: Path) -> None:
    inside = tree / "ckpt"
    (inside / "outputs").symlink_to("/usr/lib")
    (inside / "out").symlink_to("1")
    box = collected(inside, pattern.replace("TREE", str(inside)))
    assert [(name.rpartition("/")[2], why) for name, why in box.queued[-1].left_out if "is " in why] == [
        ("outputs", "is a symlink"),
        *([("up", "is a symlink")] if "**" in pattern else []),
    ]


def test_names_what_is_too_deep(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "MAX_DEPTH", str(tree).count("/") + 2)
    box = collected(tree, "**")
    assert "ckpt/1/x.pt" not in box.names() and "a.csv" in box.names()
    assert {path for path, why in box.queued[-1].left_out if "directories deep" in why} == {
        f"{tree}/ckpt/{number}" for number in (1, 2)
    }


def test_leaves_out_logs_behind_a_symlink(tree: Path) -> None:
    (tree / "home").symlink_to(tree)
    assert collected(tree, "home/**/a.csv").names() == ["home/a.csv"]


def test_names_symlinks_and_counts_what_it_leaves_out(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "MAX_LEFT_OUT", 1)
    box = collected(tree, "ckpt/*")
    assert box.names() == ["ckpt/1/.metadata", "ckpt/1/x.pt", "ckpt/2/x.pt"]
    assert box.queued[-1] == FilesEnd(0, (("ckpt/last", "is a symlink"),), 1)


def test_of_two_files_with_the_same_name_sends_the_first(tree: Path) -> None:
    name = str(tree / "a.csv")
    (tree / name[1:]).parent.mkdir(parents=True)
    (tree / name[1:]).write_text("another")
    box = collected(tree, name[1:], name)
    assert box.names() == [name[1:]]
    assert box.queued[-1].left_out == ((name[1:], "another file has the same path under collected/"),)


def test_several_stars_in_a_row_read_each_directory_once(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, listdir = Counter[str](), os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: read.update([path]) or listdir(path))
    collected(tree, "/".join(["**"] * 9))
    assert {*read.values()} == {1}


def test_tries_no_more_files_than_the_maximum(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "MAX_FILES", 3)
    box = collected(tree, "*.csv", "**/x.pt")
    assert box.names() == [".c.csv", "a.csv", "b[1].csv"]
    assert box.queued[-1].left_out == (("**/x.pt", "matches too many files"),)


@pytest.mark.parametrize("change", [lambda file: file.truncate(9), lambda file: file.write(b"x")])
def test_holds_back_the_end_of_a_file_that_changes(change: Any, tree: Path) -> None:
    (tree / "big").write_bytes(bytes(size := 3 << 17))
    files = collection_of(tree, "big", box=(box := Box()))
    box.room = 2
    while box.has_room:
        assert not files.go_on()
    with (tree / "big").open("r+b") as file:
        change(file)
    os.utime(tree / "big", ns=(0, 0))  # the clock of a file system may be slow
    box.room = 1_000_000
    finish(files)
    assert box.queued[0] == FileBegins(0, "big", size)
    assert sum(map(len, box.queued[1:-1])) < size
    assert box.queued[-1].left_out == (("big", "changed while it was read"),)
