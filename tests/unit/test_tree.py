"""The store of a node and the trees made from it: what is in them, what is refused, and what is removed."""

import fcntl
import json
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlaunch.agent import messages, tree
from distlaunch.agent.poller import Poller
from distlaunch.agent.tree import (
    FILE,
    LINK,
    PROGRAM,
    Entry,
    Placement,
    Store,
    TreeError,
    digest_of,
    link_stays_inside,
    manifest_text,
    read_manifest,
)
from tests.unit.samples import bounded, longest_file

CONTENT, OTHER = b"print(1)\n", b"print(2)\n"
FILES = {"train.py": CONTENT, "lib/model.py": OTHER, "lib/deep/empty": b"", "again.py": CONTENT}
ODD = {
    "a\nb": b"1",
    'it\'s "$(x)"': b"2",
    os.fsdecode(b"\xff\xfe"): b"3",
    "é": b"4",
    "e\u0301": b"5",
    "A": b"",
    "a": b"6",
}


def file(path: str, data: bytes = CONTENT, kind: str = FILE) -> Entry:
    return Entry(path, kind, len(data), digest_of(data))


ENTRIES = [*(file(path, data) for path, data in FILES.items()), file("run.sh", CONTENT, PROGRAM)]
ENTRIES += [Entry("lib/link", LINK, 0, "../train.py"), *(file(path, data) for path, data in ODD.items())]


def filled(base: Path, entries: list[Entry] = ENTRIES, hold: str = "") -> Store:
    """A store with the contents of all entries, for the run `hold`."""
    store = Store(str(base))
    for data in {*FILES.values(), *ODD.values()}:
        store.put(data)
    store.put(CONTENT, program=True)
    store.put(manifest_text(entries))
    if hold:
        held(store, hold, entries)
    return store


HELD = list[Store]()


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """No test keeps a store."""
    yield
    while HELD:
        if (store := HELD.pop())._note >= 0:
            die(store)


def die(store: Store) -> None:
    """Let go of the store as a killed agent does."""
    os.close(store._note)
    os.close(store._mark)


def held(store: Store, run: str, entries: list[Entry] = ENTRIES) -> Store:
    assert [*store.hold(run)] == []
    HELD.append(store)
    store.note(manifest_text(entries))
    return store


def made(store: Store, entries: list[Entry] = ENTRIES) -> Path:
    """The tree of the run, which lacks nothing."""
    assert not [step for step in store.lay_out(entries) if step]
    (directory,) = [path for path in (Path(store.base) / "runs").iterdir() if path.is_dir()]
    return directory


def everything(directory: Path) -> dict[str, tuple[int, bytes | str]]:
    """What is below a directory: modes, contents and targets."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(directory.rglob("*")):
        data = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(directory))] = (path.lstat().st_mode, data)
    return found


def unfinished(store: Store) -> list[str]:
    return os.listdir(Path(store.base) / "new")


# Manifests


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert read_manifest(manifest_text(ENTRIES)) == sorted(ENTRIES)


GOOD = ["a", FILE, 1, "0" * 64]
REFUSED: dict[str, Any] = {
    "no list": 3,
    "rows that are no lists": [3],
    "rows that are too short": [GOOD[:3]],
    "rows that are too long": [[*GOOD, 1]],
    "a path that is no text": [[["a"], *GOOD[1:]]],
    "an unknown kind": [["a", "device", 1, "0" * 64]],
    "a size that is no number": [["a", FILE, "1", "0" * 64]],
    "a size that is a truth value": [["a", FILE, True, "0" * 64]],
    "a size that is a fraction": [["a", FILE, 1e400, "0" * 64]],
    "a size below zero": [["a", FILE, -1, "0" * 64]],
    "a digest that leads elsewhere": [["a", FILE, 1, "/" * 64]],
    "a digest of other digits": [["a", FILE, 1, "A" * 64]],
    **{
        f"the path {path[:20]!r}": [[path, *GOOD[1:]]]
        for path in (
            "",
            "/",
            "/a",
            "a/",
            "a//b",
            ".",
            "a/.",
            "..",
            "../a",
            "a/../b",
            "a\0b",
            "\ud800",
            "x" * 256,
        )
    },
    "a path that no system accepts": [["/".join(["x" * 200] * 30), *GOOD[1:]]],
    "a path that is too deep": [["a/" * 200 + "a", *GOOD[1:]]],
    "a path that would take long": [["a/" * 500_000 + "a", *GOOD[1:]]],
    "a file twice": [GOOD, GOOD],
    "a file below a file": [GOOD, ["a/b", *GOOD[1:]]],
    "a file deep below a file": [GOOD, ["a/b/c/d", *GOOD[1:]]],
    "a file below a symlink": [["a", LINK, 0, "b"], ["a/b", *GOOD[1:]]],
    "a symlink outward": [["a", LINK, 0, "../b"]],
}


@pytest.mark.parametrize("rows", REFUSED.values(), ids=REFUSED)
def test_refuses_manifests_with_files_outside_or_in_each_others_way(rows: Any) -> None:
    with pytest.raises(TreeError, match="the list of files"):
        read_manifest(json.dumps(rows).encode())


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b"[[" + b"9" * 5000 + b"]]"])
def test_refuses_what_is_no_manifest(text: bytes) -> None:
    with pytest.raises(TreeError, match=r"the list of files .* is damaged"):
        read_manifest(text)


def test_refuses_more_files_than_a_tree_may_have() -> None:
    rows = [[str(number), *GOOD[1:]] for number in range(tree.MAX_FILES + 1)]
    with pytest.raises(TreeError, match="more than 100000 files"):
        read_manifest(json.dumps(rows).encode())


@pytest.mark.parametrize(
    ("path", "target", "inside"),
    [
        *(("a", target, True) for target in ("b", "./b", "b/c", "b//c", ".")),
        *(("a/b/c", target, True) for target in ("../d", "../../d", "..", "../..", "d")),
        *(("a", target, False) for target in ("", "..", "../b", "/", "/a", "a\0", "\ud800", "x" * 5000)),
        ("a/b", "../..", False),
        ("a/b", "../../c", False),
        ("a", "b/../../c", False),
        ("a", "b/b/../c", False),  # b may be a symlink to "."
    ],
)
def test_a_symlink_may_not_lead_out_of_the_tree(path: str, target: str, inside: bool) -> None:
    assert link_stays_inside(path, target) is inside


_names = st.sampled_from(
    ["a", "b", "A", "..", ".", "", "runs", "x" * 256, "\0", "é", "e\u0301", "\ud800", "\udcff"]
)
_paths = st.lists(_names, min_size=1, max_size=4).map("/".join) | st.sampled_from(
    ["/etc/passwd", "a/b", "a", "b"]
)
_contents = st.sampled_from(
    [digest_of(CONTENT), digest_of(OTHER), "0" * 64, "../" * 21 + "x", "", "/etc/passwd"]
)
_anything = (
    st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
)
_rows = st.one_of(
    st.tuples(_paths, st.sampled_from([FILE, PROGRAM]), st.just(len(CONTENT)), _contents),
    st.tuples(_paths, st.just(LINK), st.just(0), _paths),
    st.tuples(
        _paths, st.sampled_from([FILE, LINK, "x"]), st.integers() | st.just(1 << 80), _contents | _paths
    ),
    st.lists(_anything, max_size=5),
    _anything,
)
_manifests = st.lists(_rows, max_size=6).map(lambda rows: json.dumps(rows).encode()) | st.binary(max_size=20)


@bounded(1000)
@given(manifest=_manifests)
def test_no_manifest_leads_out_of_the_directory_of_its_tree(
    manifest: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    try:
        entries = read_manifest(manifest)
    except TreeError:
        return
    around = tmp_path_factory.mktemp("around")
    (around / "mine").write_text("keep")
    store = filled(around / "base", hold="run")
    before = {path: what for path, what in everything(around).items() if "blobs/" not in path}
    try:
        for step in store.lay_out(entries):
            if isinstance(step, list):
                break
    except (TreeError, OSError):
        pass
    own = ("base/runs/run", "base/blobs/")  # a content that isn't as the manifest says is removed
    after = {path: what for path, what in everything(around).items() if not path.startswith(own)}
    assert {path: what for path, what in before.items() if not path.startswith(own)} == after
    held(store, "run", entries)
    store.release()
    left = {path: what for path, what in everything(around).items() if "blobs/" not in path}
    assert left == after


# Trees


def test_a_tree_has_exactly_the_listed_files(tmp_path: Path) -> None:
    store = filled(tmp_path / "base", hold="run")
    found = everything(made(store))
    directories = {"lib": 0o40700, "lib/deep": 0o40700}
    expected: dict[str, tuple[int, bytes | str]] = {path: (mode, b"") for path, mode in directories.items()}
    expected |= {path: (0o100400, data) for path, data in (FILES | ODD).items()}
    expected |= {"run.sh": (0o100500, CONTENT), "lib/link": (0o120777, "../train.py")}
    assert found == expected
    assert store.release() == "" and not os.listdir(tmp_path / "base/runs") and not unfinished(store)


def test_a_tree_may_be_deep(tmp_path: Path) -> None:
    entries = [file("d/" * 199 + "a")]
    store = filled(tmp_path / "b", hold="run")
    made(store, entries)
    held(store, "run", entries)
    assert store.release() == ""


@pytest.mark.parametrize("rows", [["a", "a"], ["a", "a/b"]])
def test_names_that_are_the_same_on_this_file_system_are_an_error(tmp_path: Path, rows: list[str]) -> None:
    store = filled(tmp_path / "base", hold="run")  # on others, those may be A and a, or two forms of é
    with pytest.raises(TreeError, match=r"can't tell a from another name|Not a directory"):
        made(store, [file(path) for path in rows])
    assert not unfinished(store)


def _damage(path: Path, data: bytes | None) -> None:
    path.chmod(0o600)
    path.unlink() if data is None else path.write_bytes(data)


@pytest.mark.parametrize("data", [OTHER, CONTENT[:-1], b"", CONTENT * 2, None, "mode"], ids=repr)
def test_a_content_that_was_changed_is_requested_again(tmp_path: Path, data: Any) -> None:
    store = filled(tmp_path / "base", hold="run")
    path = Path(store.path_of(ENTRIES[0]))
    path.chmod(0o700) if data == "mode" else _damage(path, data)
    steps = store.lay_out(ENTRIES)
    lacks = [step for step in iter(lambda: next(steps), [0]) if step]
    assert lacks == [] and not path.exists()
    store.put(CONTENT)
    assert not [step for step in steps if step]
    assert everything(tmp_path / "base/runs/run")["again.py"] == (0o100400, CONTENT)


def test_a_damaged_manifest_is_removed(tmp_path: Path) -> None:
    store = filled(tmp_path / "base")
    manifest = manifest_text(ENTRIES)
    path = store.path_of(Entry("", FILE, 0, digest_of(manifest)))
    _damage(Path(path), manifest[:-1] + b"}")
    assert store.read(digest_of(manifest)) is None and not os.path.exists(path)


def test_a_file_that_was_changed_in_a_tree_in_use_is_an_error(tmp_path: Path) -> None:
    first = filled(tmp_path / "base", hold="run")
    directory = made(first)
    second = held(Store(str(tmp_path / "base")), "run")
    made(second)
    (directory / "train.py").unlink()
    (directory / "train.py").write_bytes(OTHER)
    with pytest.raises(TreeError, match=r"runs/run/train\.py was changed during the run"):
        made(second)


def test_one_agent_makes_the_tree_while_others_wait_and_the_last_one_removes_it(tmp_path: Path) -> None:
    first = filled(tmp_path / "base", hold="run")
    second = Store(str(tmp_path / "base"))
    waiting = second.hold("run")
    assert next(waiting) > 0
    directory = made(first)
    assert next(waiting, None) is None
    made(second)
    HELD.append(second)
    assert first.release() == "" and directory.exists()
    assert second.release() == "" and not directory.exists()


def test_an_agent_that_comes_while_the_tree_is_removed_makes_it_again(tmp_path: Path) -> None:
    first = filled(tmp_path / "base", hold="run")
    note = tmp_path / "base/runs/run.tree"
    second = Store(str(tmp_path / "base"))
    waiting = second.hold("run")
    assert next(waiting) > 0
    directory = made(first)
    first.release()
    assert not directory.exists() and not note.exists()
    assert next(waiting, None) is None and note.exists()
    made(second)
    assert directory.exists()
    second.release()


def test_without_locks_the_agents_make_the_tree_one_by_one_and_the_faster_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    slow, fast = filled(tmp_path / "base", hold="run"), held(Store(str(tmp_path / "base")), "run")
    steps = slow.lay_out(ENTRIES)
    assert next(steps) == 0.0
    made(fast)
    assert not [step for step in steps if step]
    assert not unfinished(slow)
    fast.release()
    assert (tmp_path / "base/runs/run").exists(), "nobody knows whether it is in use"


def test_without_hard_links_a_tree_has_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, path: str) -> None:
        raise OSError(1, "Operation not permitted", source)

    monkeypatch.setattr(os, "link", refuse)
    store = filled(tmp_path / "base", hold="run")
    assert everything(made(store))["run.sh"] == (0o100500, CONTENT)
    assert store.release() == ""


# What a run leaves


def _writes(directory: Path) -> None:
    (directory / "lib/out.txt").write_text("result")


def _replaces(directory: Path) -> None:
    (directory / "new").write_bytes(OTHER)
    (directory / "new").rename(directory / "train.py")


def _changes_in_place(directory: Path) -> None:
    (directory / "train.py").chmod(0o600)
    (directory / "train.py").write_bytes(OTHER)


def _links_elsewhere(directory: Path) -> None:
    (directory / "lib/link").unlink()
    (directory / "lib/link").symlink_to("model.py")


def _links_a_directory(directory: Path) -> None:
    (directory.parent.parent.parent / "outside").rename(directory / "moved")
    (directory / "moved").rename(directory.parent.parent.parent / "outside")
    for path in ("lib/deep/empty", "lib/model.py", "lib/link"):
        (directory / path).unlink()
    (directory / "lib/deep").rmdir()
    (directory / "lib").rmdir()
    (directory / "lib").symlink_to(directory.parent.parent.parent / "outside")


def _makes_directories(directory: Path) -> None:
    (directory / "out/empty").mkdir(parents=True)
    (directory / "lib/__pycache__").mkdir()
    (directory / "lib/__pycache__/model.cpython-311.pyc").touch()


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (_writes, {"lib/out.txt": b"result"}),
        (_replaces, {"train.py": OTHER}),
        (_changes_in_place, {"train.py": OTHER, "again.py": OTHER}),
        (_links_elsewhere, {"lib/link": "model.py"}),
        (_links_a_directory, {"lib": "{outside}"}),
        (_makes_directories, {}),
    ],
)
def test_what_a_run_has_written_stays(
    tmp_path: Path, change: Callable[[Path], None], left: dict[str, bytes | str]
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/model.py").write_bytes(OTHER)  # as in the tree
    store = filled(tmp_path / "base", hold="run")
    directory = made(store)
    change(directory)
    expected = {
        path: str(tmp_path / "outside") if data == "{outside}" else data for path, data in left.items()
    }
    assert store.release() == (str(directory) if left else "")
    found = {path: data for path, (mode, data) in everything(directory).items() if mode & 0o170000 != 0o40000}
    assert found == expected
    assert (tmp_path / "outside/model.py").read_bytes() == OTHER
    assert [*(tmp_path / "base/runs").glob("*.tree")] == []


def test_what_killed_agents_left_is_removed_by_the_next_run(tmp_path: Path) -> None:
    base = tmp_path / "base"
    made(filled(base, hold="busy"))
    for run in ("killed", "half"):
        dead = held(Store(str(base)), run)
        if run == "killed":
            assert not [step for step in dead.lay_out(ENTRIES) if step]
        else:
            next(dead.lay_out(ENTRIES))
            (base / "runs/half.tree").write_bytes(b"[[")
        die(dead)
        HELD.remove(dead)
    for name in ("half.1a", "busy.1a", ".1a", ".1b"):
        (base / "new" / name).mkdir()
    os.utime(base / "new/.1b", (0, 0))
    Store(str(base)).release()
    assert sorted(os.listdir(base / "runs")) == ["busy", "busy.tree", f"busy@{os.uname().nodename}"]
    assert sorted(os.listdir(base / "new")) == [".1a", "busy.1a"]


def test_a_tree_that_another_host_uses_stays_although_its_lock_is_not_seen(tmp_path: Path) -> None:
    """On many file systems, only processes of the same host see a lock."""
    base = tmp_path / "base"
    far = filled(base, hold="run")
    directory = made(far)
    here, there = base / f"runs/run@{os.uname().nodename}", base / "runs/run@another"
    here.rename(there)
    die(far)
    HELD.remove(far)
    held(Store(str(base)), "run").release()  # an agent of this host, which used it, too
    Store(str(base)).release()  # the next run
    assert directory.exists() and there.exists() and not here.exists()
    os.utime(there, (0, time.time() - 2 * tree.STALE_S))
    Store(str(base)).release()
    assert os.listdir(base / "runs") == []


# The store


def test_contents_in_no_tree_are_removed_beyond_the_limit_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "MAX_STORE", 3000)
    store = filled(tmp_path / "base", hold="run")
    directory = made(store)
    sending = held(Store(str(tmp_path / "base")), "other.origin", [file("x", b"sent" * 500)])
    sending.put(b"sent" * 500)
    digests = [store.put(bytes([number]) * 1000) for number in range(6)]
    last = Store(str(tmp_path / "base"))
    last.grown = True
    last.release()
    assert [last.read(digest) is not None for digest in digests] == [False] * 3 + [True] * 3
    assert last.read(digest_of(b"sent" * 500)) and last.read(digest_of(CONTENT))
    assert everything(directory)["train.py"] == (0o100400, CONTENT)
    for each in (sending, store):
        each.release()


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base").chmod(mode)
    with pytest.raises(TreeError, match=r"base can be written to by others; on a node, set sync\.to"):
        Store(str(tmp_path / "base"))


@pytest.mark.parametrize("place", ["a file", "a symlink"])
def test_a_base_that_is_no_directory_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "a file").touch()
    (tmp_path / "a symlink").symlink_to(tmp_path / "there")
    with pytest.raises((TreeError, OSError), match=r"is a symlink, not a directory|File exists"):
        Store(str(tmp_path / place))


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME and an entry in passwd
    with pytest.raises(TreeError, match=r"can't expand ~/code: this user has no home directory; set HOME"):
        Store("~/code")


# What arrives


class Node:
    """An agent that places a tree, in a store that lacks everything."""

    def __init__(self, base: Path, entries: list[Entry] = ENTRIES) -> None:
        self.base, self.entries, self.reports = base, entries, list[Any]()
        self.poller = Poller()
        self.placement = Placement(3, self.poller, self.reports.append)
        self.tree = digest_of(manifest_text(entries))
        self.placement.place(messages.PlaceTree("run", self.tree, str(base), None))

    def send(self, *contents: bytes) -> Any:
        """The report after contents have arrived."""
        return self.feed(zlib.compress(b"".join(contents)))

    def feed(self, stream: bytes) -> Any:
        self.reports.clear()
        chance = random.Random(len(stream))
        while stream:
            size = chance.choice([1, 7, 1000])
            self.placement.feed(stream[:size])
            stream = stream[size:]
        self.placement.feed(b"")
        while not (answers := [each for each in self.reports if not isinstance(each, messages.TreeProgress)]):
            self.poller.turn()
        return answers[-1]

    def wanted(self) -> list[bytes]:
        contents = {digest_of(data): data for data in (*FILES.values(), *ODD.values())}
        return [contents[self.entries[index].content] for index in self.reports[-1].contents]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "base", sorted(ENTRIES))
    yield node
    node.placement.close()
    assert not os.listdir(tmp_path / "base/new")
    assert not [*(tmp_path / "base/runs").iterdir()]


def test_a_node_requests_the_manifest_and_then_each_content_once(node: Node) -> None:
    assert node.reports == [messages.TreeLacks(3, ())]
    node.send(manifest_text(node.entries))
    contents = [
        (node.entries[index].content, node.entries[index].kind) for index in node.reports[-1].contents
    ]
    assert len(contents) == len({*contents}) == len({*FILES.values(), *ODD.values()}) + 1
    assert node.send(*node.wanted()) == messages.TreePlaced(3, node.tree)


def test_all_of_a_stream_may_be_much_larger_than_what_arrives(tmp_path: Path) -> None:
    data = bytes(5 << 20)
    node = Node(tmp_path / "base", [file("a", data), file("b", b"x")])
    node.send(manifest_text(node.entries))
    assert node.send(data, b"x") == messages.TreePlaced(3, node.tree)
    node.placement.close()


BAD_STREAMS: dict[str, Callable[[list[bytes]], bytes]] = {
    "nothing": lambda wanted: b"",
    "too little": lambda wanted: zlib.compress(b"".join(wanted)[:-1]),
    "a stream cut short": lambda wanted: zlib.compress(b"".join(wanted))[:-8],
    "too much": lambda wanted: zlib.compress(b"".join(wanted) + b"x"),
    "no zlib": lambda wanted: b"garbage",
    "other contents": lambda wanted: zlib.compress(b"x" * len(b"".join(wanted))),
}


@pytest.mark.parametrize("phase", ["manifest", "files"])
@pytest.mark.parametrize("stream", BAD_STREAMS.values(), ids=BAD_STREAMS)
def test_a_wrong_stream_is_refused_and_nothing_of_it_is_visible(
    node: Node, stream: Callable[[list[bytes]], bytes], phase: str
) -> None:
    wanted = [manifest_text(node.entries)]
    if phase == "files":
        node.send(*wanted)
        wanted = node.wanted()
    report = node.feed(stream(wanted))
    assert isinstance(report, messages.TreeRefused)
    assert "damaged in transit" in report.error
    node.reports.clear()
    node.placement.feed(b"more")
    node.placement.feed(b"")
    assert node.reports == [], "the rest of the stream doesn't count"
    blobs = [path for path in (node.base / "blobs").rglob("*") if path.is_file()]
    for path in blobs:
        assert digest_of(path.read_bytes()) == (path.parent.name + path.name).removesuffix("x")


def test_a_node_gives_up_if_contents_never_arrive_whole(node: Node) -> None:
    node.send(manifest_text(node.entries))
    wanted = node.wanted()
    for _ in range(messages.MAX_LACKS - 2):
        node.placement._go_on()  # as if the contents had been removed right after they arrived
        assert node.wanted() == wanted
    node.placement._go_on()
    assert "keep changing" in node.reports[-1].error


def test_a_full_disk_is_told_with_its_path_and_leaves_nothing(node: Node) -> None:
    with longest_file(4):
        report = node.send(manifest_text(node.entries))
    words = f"{node.base}: File too large; to use another directory, set sync.to"
    assert report == messages.TreeRefused(3, words)
