"""The store of a node and the trees made from it: what is in them, what is refused, and what is removed."""

import contextlib
import errno
import fcntl
import json
import os
import random
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
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
from tests.unit.samples import anything, bounded, longest_file

CONTENT, OTHER = b"print(1)\n", b"print(2)\n"
FILES = {"train.py": CONTENT, "lib/model.py": OTHER, "lib/deep/empty": b"", "again.py": CONTENT}
ODD = {"a\nb": b"1", 'it\'s "$(x)"': b"2", os.fsdecode(b"\xff\xfe"): b"3", "é": b"4", "e\u0301": b"5"}
ODD |= {"A": b"", "a": b"6"}


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


GOOD = ["a", FILE, 1, "0" * 64]
BAD_PATHS = ("", "/", "/a", "a/", "a//b", ".", "a/.", "..", "../a", "a/../b", "a\0b", "\ud800", "x" * 256)
REFUSED: list[Any] = [
    *(3, [3], [GOOD[:3]], [[*GOOD, 1]]),  # no list of rows of four
    [[["a"], *GOOD[1:]]],  # a path that is no text
    [["a", "device", 1, "0" * 64]],
    *([["a", FILE, size, "0" * 64]] for size in ("1", True, 1e400, -1)),
    *([["a", FILE, 1, digit * 64]] for digit in "/A"),  # a digest that leads elsewhere, and of other digits
    *([[path, *GOOD[1:]]] for path in BAD_PATHS),
    [["/".join(["x" * 200] * 30), *GOOD[1:]]],  # a path that no system accepts
    *([["a/" * depth + "a", *GOOD[1:]]] for depth in (200, 500_000)),  # too deep, and it would take long
    [GOOD, GOOD],
    *([GOOD, [path, *GOOD[1:]]] for path in ("a/b", "a/b/c/d")),  # a file below a file
    [["a", LINK, 0, "b"], ["a/b", *GOOD[1:]]],  # a file below a symlink
    [["a", LINK, 0, "../b"]],
]


@pytest.mark.parametrize(
    "rows", REFUSED, ids=lambda rows: repr(rows)[:30].encode("ascii", "replace").decode()
)
def test_refuses_manifests_with_files_outside_or_in_each_others_way(rows: Any) -> None:
    with pytest.raises(TreeError, match="the list of files"):
        read_manifest(json.dumps(rows).encode())


NO_MANIFESTS = (b"", b"{", b"\xff", b"[" * 100_000, b"[[" + b"9" * 5000 + b"]]")


@pytest.mark.parametrize("text", NO_MANIFESTS, ids=range(5))
def test_refuses_what_is_no_manifest(text: bytes) -> None:
    with pytest.raises(TreeError, match=r"the list of files .* is damaged"):
        read_manifest(text)


def test_refuses_too_many_files() -> None:
    many = [[str(number), *GOOD[1:]] for number in range(tree.MAX_FILES + 1)]
    with pytest.raises(TreeError, match="more than 100000 files"):
        read_manifest(json.dumps(many).encode())


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


NAMES = ["a", "b", "A", "..", ".", "", "runs", "x" * 256, "\0", "é", "e\u0301", "\ud800", "\udcff"]
_paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join) | st.just("/etc/passwd")
_contents = st.sampled_from(
    [digest_of(CONTENT), digest_of(OTHER), "0" * 64, "../" * 21 + "x", "", "/etc/passwd"]
)
_rows = st.one_of(
    st.tuples(_paths, st.sampled_from([FILE, PROGRAM]), st.just(len(CONTENT)), _contents),
    st.tuples(_paths, st.just(LINK), st.just(0), _paths),
    st.tuples(
        _paths, st.sampled_from([FILE, LINK, "x"]), st.integers() | st.just(1 << 80), _contents | _paths
    ),
    st.lists(anything, max_size=5),
    anything,
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

    def rest(*but: str) -> dict[str, Any]:
        return {path: what for path, what in everything(around).items() if not path.startswith(but)}

    before = rest("base/runs/run", "base/blobs/")
    with contextlib.suppress(TreeError, OSError):
        for step in store.lay_out(entries):
            if isinstance(step, list):
                break
    after = rest("base/runs/run")  # a content that isn't as the manifest says is removed
    assert {path: what for path, what in after.items() if not path.startswith("base/blobs/")} == before
    held(store, "run", entries)
    store.release()
    assert rest("base/blobs/") == before


# Trees


def test_a_tree_has_exactly_the_listed_files(tmp_path: Path) -> None:
    store = filled(tmp_path / "base", hold="run")
    assert everything(made(store)) == {
        **dict.fromkeys(("lib", "lib/deep"), (0o40700, b"")),
        **{path: (0o100400, data) for path, data in (FILES | ODD).items()},
        "run.sh": (0o100500, CONTENT),
        "lib/link": (0o120777, "../train.py"),
    }
    assert store.release() == "" and not os.listdir(tmp_path / "base/runs") and not unfinished(store)


def test_a_tree_may_be_deep(tmp_path: Path) -> None:
    entries = [file("d/" * 199 + "a")]
    store = filled(tmp_path / "b", entries, hold="run")
    made(store, entries)
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
    put(directory / "train.py", OTHER)
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
    first, second = filled(tmp_path / "base", hold="run"), Store(str(tmp_path / "base"))
    note = tmp_path / "base/runs/run.tree"
    waiting = second.hold("run")
    assert next(waiting) > 0
    directory = made(first)
    first.release()
    assert not directory.exists() and not note.exists()
    assert next(waiting, None) is None and note.exists()
    made(second)
    assert directory.exists()
    second.release()


def refuse(*_: object) -> None:
    raise OSError(1, "Operation not permitted")


def test_without_locks_the_agents_make_the_tree_one_by_one_and_the_faster_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(os, "link", refuse)
    store = filled(tmp_path / "base", hold="run")
    assert everything(made(store))["run.sh"] == (0o100500, CONTENT)
    assert store.release() == ""


def test_a_tree_is_removed_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def of_nfs(fd: int, how: int) -> None:
        if how & fcntl.LOCK_EX and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "an exclusive lock requires a descriptor for writing")
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    store = filled(tmp_path / "base", hold="run")
    made(store)
    assert store.release() == "" and not os.listdir(tmp_path / "base/runs")


# What a run leaves


def put(path: Path, data: bytes | str | None) -> None:
    """Make a file (of bytes), a symlink (to a text) or a directory, in the place of what is there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data) if isinstance(data, bytes) else path.symlink_to(data) if data else path.mkdir()


Left = dict[str, bytes | str | None]


WRITTEN = pytest.mark.parametrize(
    ("change", "left", "refused"),
    [
        ({"lib/out.txt": b"result"}, {"lib/out.txt": b"result"}, None),
        ({"train.py": OTHER}, {"train.py": OTHER}, "train.py"),
        (None, {"train.py": OTHER, "again.py": OTHER}, "train.py"),
        ({"lib/link": "model.py"}, {"lib/link": "model.py"}, "lib/link"),
        ({"lib": "../../../outside"}, {"lib": "../../../outside"}, "lib"),
        ({"out/empty": None, "lib/__pycache__/model.cpython-311.pyc": b""}, {}, None),
    ],
    ids=[
        "writes",
        "replaces",
        "changes in place",
        "links elsewhere",
        "links a directory",
        "makes directories",
    ],
)


def wrote(directory: Path, change: Left | None) -> None:
    """Do to a tree what a run does."""
    for path, data in (change or {}).items():
        put(directory / path, data)
    if change is None:  # in place
        _damage(directory / "train.py", OTHER)


@WRITTEN
def test_what_a_run_has_written_stays(
    tmp_path: Path, change: Left | None, left: Left, refused: str | None
) -> None:
    put(tmp_path / "outside/model.py", OTHER)  # as in the tree
    store = filled(tmp_path / "base", hold="run")
    directory = made(store)
    wrote(directory, change)
    assert store.release() == (str(directory) if left else "")
    found = {path: data for path, (mode, data) in everything(directory).items() if mode & 0o170000 != 0o40000}
    assert found == left
    assert (tmp_path / "outside/model.py").read_bytes() == OTHER
    assert [*(tmp_path / "base/runs").glob("*.tree")] == []


@WRITTEN
def test_the_next_attempt_gets_the_files_again_beside_what_the_last_one_has_written(
    tmp_path: Path, change: Left | None, left: Left, refused: str | None
) -> None:
    (tmp_path / "outside").mkdir()
    store = filled(tmp_path / "base", hold="run")
    directory = made(store)
    files = everything(directory)
    wrote(directory, change)
    store.release()
    written = everything(directory)
    _damage(Path(store.path_of(ENTRIES[0])), None)
    steps = held(Store(str(tmp_path / "base")), "run").lay_out(ENTRIES)
    why = f"runs/run/{refused} was changed during the run"
    with pytest.raises(TreeError, match=why) if refused else contextlib.nullcontext():
        for step in steps:
            if step:
                assert step == [0], "the store lacks only this"
                store.put(CONTENT)
    found = everything(directory)
    assert found == (found if refused else files) | written
    assert not [*(tmp_path / "outside").iterdir()] and not unfinished(store)


def test_what_killed_agents_left_is_removed_by_the_next_run(tmp_path: Path) -> None:
    base = tmp_path / "base"
    made(filled(base, hold="busy"))
    killed, half = held(Store(str(base)), "killed"), held(Store(str(base)), "half")
    assert not [step for step in killed.lay_out(ENTRIES) if step]
    next(half.lay_out(ENTRIES))
    (base / "runs/half.tree").write_bytes(b"[[")
    for dead in (HELD.pop(), HELD.pop()):
        die(dead)
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


def test_of_hosts_that_release_a_tree_at_once_one_returns_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, hosts, said = tmp_path / "base", ["a"], list[str]()
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=hosts[-1]))
    first = filled(base, hold="run")
    directory = made(first)
    (directory / "out").touch()
    hosts.append("b")
    second = held(Store(str(base)), "run")

    def meanwhile(path: Any, mode: str) -> Any:
        opened = open(path, mode)  # noqa: SIM115
        if str(path).endswith("run@a") and hosts[-1] == "b":
            hosts.append("a")
            said.append(first.release())
            hosts.append("b")
        return opened

    monkeypatch.setattr(tree, "open", meanwhile, raising=False)
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(listed(path)))
    said.append(second.release())
    assert sorted(said) == ["", str(directory)] and os.listdir(base / "runs") == ["run"]


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


def test_pipes_in_the_store_are_replaced(tmp_path: Path) -> None:
    """An agent that opened one would wait for a writer that never comes."""
    store = filled(tmp_path / "base", hold="run")
    other = tmp_path / "base/runs/killed.tree"
    for path in [*(tmp_path / "base/blobs").glob("*/*"), other]:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    digest = digest_of(manifest_text(ENTRIES))
    assert store.read(digest) is None and not os.path.lexists(store.blob(digest))
    assert next(filter(None, store.lay_out(ENTRIES)))  # asks for the contents
    store.grown = True
    store.release()
    assert not other.exists()


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base").chmod(mode)
    with pytest.raises(TreeError, match="base can be written to by others; run `chmod -R go-w` on it if"):
        Store(str(tmp_path / "base"))


def test_a_base_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "a symlink").symlink_to(tmp_path)
    with pytest.raises(OSError, match="File exists"):
        Store(str(tmp_path / "a file"))
    with pytest.raises(TreeError, match="is a symlink, not a directory"):
        Store(str(tmp_path / "a symlink"))


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
        self.tree = digest_of(manifest_text(entries))
        command = messages.PlaceTree("run", self.tree, str(base), None)
        self.placement = Placement(3, self.poller, self.reports.append, command)
        self.placement.go_on()

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
    node.placement.close(node.poller.turn)
    assert not os.listdir(tmp_path / "base/new")
    assert not [*(tmp_path / "base/runs").iterdir()]


def test_a_node_requests_the_manifest_and_then_each_content_once(node: Node) -> None:
    assert node.reports == [messages.TreeLacks(3, ())]
    node.send(manifest_text(node.entries))
    asked = [node.entries[index][1::2] for index in node.reports[-1].contents]
    assert len(asked) == len({*asked}) == len({*FILES.values(), *ODD.values()}) + 1
    assert node.send(*node.wanted()) == messages.TreePlaced(3, node.tree)


def test_all_of_a_stream_may_be_much_larger_than_what_arrives(tmp_path: Path) -> None:
    data = bytes(5 << 20)
    node = Node(tmp_path / "base", [file("a", data), file("b", b"x")])
    node.send(manifest_text(node.entries))
    assert node.send(data, b"x") == messages.TreePlaced(3, node.tree)
    node.placement.close(node.poller.turn)


def test_other_work_is_done_while_a_tree_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path / "base", [file(f"{number}", b"") for number in range(9)])
    node.send(manifest_text(node.entries))
    assert node.send(b"") == messages.TreePlaced(3, node.tree)
    left = list[int]()
    monkeypatch.setattr("distlaunch.agent.tree.TURN_S", -1.0)
    node.placement.close(lambda: left.append(sum(path.is_file() for path in tmp_path.rglob("run/*"))))
    assert {*range(9)} <= {*left}


BAD_STREAMS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda wanted: b"",
    "too little": lambda wanted: zlib.compress(wanted[:-1]),
    "a stream cut short": lambda wanted: zlib.compress(wanted)[:-8],
    "too much": lambda wanted: zlib.compress(wanted + b"x"),
    "no zlib": lambda wanted: b"garbage",
    "other contents": lambda wanted: zlib.compress(b"x" * len(wanted)),
}


@pytest.mark.parametrize("phase", ["manifest", "files"])
@pytest.mark.parametrize("stream", BAD_STREAMS.values(), ids=BAD_STREAMS)
def test_a_wrong_stream_is_refused_and_nothing_of_it_is_visible(
    node: Node, stream: Callable[[bytes], bytes], phase: str
) -> None:
    wanted = [manifest_text(node.entries)]
    if phase == "files":
        node.send(*wanted)
        wanted = node.wanted()
    report = node.feed(stream(b"".join(wanted)))
    assert isinstance(report, messages.TreeRefused) and "damaged in transit" in report.error
    node.reports.clear()
    node.placement.feed(b"more")
    node.placement.feed(b"")
    assert node.reports == [], "the rest of the stream doesn't count"
    for path in filter(Path.is_file, (node.base / "blobs").rglob("*")):
        assert digest_of(path.read_bytes()) == (path.parent.name + path.name).removesuffix("x")


def test_a_node_gives_up_if_contents_never_arrive_whole(node: Node) -> None:
    node.send(manifest_text(node.entries))
    wanted = node.wanted()
    for _ in range(messages.MAX_LACKS - 2):
        node.placement.go_on()  # as if the contents had been removed right after they arrived
        assert node.wanted() == wanted
    node.placement.go_on()
    assert "keep changing" in node.reports[-1].error


def test_a_full_disk_is_told_with_its_path_and_leaves_nothing(node: Node) -> None:
    with longest_file(4):
        report = node.send(manifest_text(node.entries))
    words = f"{node.base}: File too large; to use another directory, set sync.to"
    assert report == messages.TreeRefused(3, words)
