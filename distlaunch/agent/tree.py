"""The job's code on a node: a store of file contents, and each run's verified tree, created from the store.

A manifest lists the files of a tree, and the digest of the manifest names the tree. The store keeps contents
in files that are named by digest and never change. A run's tree consists of hard links to these files, so
removing contents from the store doesn't harm any run. The directories of the tree belong to the run, which
may write to them. Before the tree gets its name, every file is read back and compared with the manifest.

    BASE/blobs/XX/    contents and manifests, by digest; names of programs end in x, since links share modes
    BASE/runs/ID      the tree of a run
    BASE/runs/ID.tree its manifest, locked while an agent uses the tree
    BASE/new/ID.1a2b  unfinished files for a run

Nodes may share BASE. The agent with the exclusive lock creates the tree. The others wait for it and then
share the lock. The last agent to exit removes the tree. If agents were killed, any later run by the same user
removes it.

Everything is private to the user: directories have mode 0700, and contents have mode 0400 or 0500.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import lru_cache

from distlaunch.agent import messages
from distlaunch.agent.frozen import Frozen
from distlaunch.agent.locks import lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

    from distlaunch.agent.poller import Poller
    from distlaunch.agent.setup import Environment

FILE, PROGRAM, LINK = "file", "program", "link"
MAX_FILES = 100_000
MAX_STORE = 20 << 30
DISK_SHARE = 0.05
"""Limits of the store, in bytes and as a share of its disk, not counting files of existing trees."""
STALE_S = 86_400.0
"""Age in seconds at which an unfinished file or a mark is presumed to be left over from a killed process."""
MARK_S = STALE_S / 24
"""Seconds between renewals of a mark."""
TURN_S = 0.05
PROGRESS_S = 1.0
"""Seconds that a placement may work without a pause, and seconds between its progress reports."""
MAX_NAME, MAX_PATH, MAX_DEPTH = 255, 4096, 200
"""Maximum bytes of a name and of a path, and maximum names in a path. Python can't remove deeper trees."""
PLACES = ("blobs", "new", "runs")
"""The directories in a store, beside that of `agent.setup`."""
DAMAGED = "the code was damaged in transit; start the job again"
BAD_MANIFEST = "the list of files (code.json) is damaged"
_READ = 1 << 20
_CONTENTS = (stat.S_IFREG | 0o400, stat.S_IFREG | 0o500)
_NO_NAMES = frozenset((b"", b".", b".."))


class TreeError(Exception):
    """The tree can't be created. The text is for the user."""


def _same_name(path: str) -> TreeError:
    """Return the error about names that are the same on this node, perhaps because only case differs."""
    return TreeError("this node's file system can't tell %s from another name in the code; rename one" % path)


def _changed(path: str) -> TreeError:
    """Return the error about a file in a tree that differs from its entry, or is in the way of one."""
    return TreeError("%s was changed during the run; ranks and setup must write to other files" % path)


class Entry(Frozen):
    """A file, program or symlink in a tree. `content` is the digest, or the target of a symlink."""

    path: str
    kind: str
    size: int
    content: str


def digest_of(data: bytes) -> str:
    """Return the digest that identifies `data` as content of the store."""
    return hashlib.sha256(data).hexdigest()


def manifest_text(entries: list[Entry]) -> bytes:
    """Return the manifest of a tree. The manifest's digest identifies the tree."""
    return json.dumps(sorted(map(tuple, entries)), separators=(",", ":")).encode()


@lru_cache(1)
def read_manifest(data: bytes) -> list[Entry]:
    """Return the entries of a manifest. Raises `TreeError` if one lies outside the tree or below another."""
    try:
        entries = [Entry(*row) for row in json.loads(data.decode())]
    except (ValueError, TypeError, RecursionError):
        raise TreeError(BAD_MANIFEST) from None
    if len(entries) > MAX_FILES:
        raise TreeError("the code has more than %d files; leave some out with sync.exclude" % MAX_FILES)
    paths: set[str] = set()
    for entry in entries:
        flaw = _flaw(entry) or ("occurs twice" if entry.path in paths else "")
        if flaw:
            raise TreeError("%s: %.200r %s" % (BAD_MANIFEST, entry.path, flaw))
        paths.add(entry.path)
    for path in paths:
        if not paths.isdisjoint(parents_of(path)):
            raise TreeError("%s: %.200r is below a file" % (BAD_MANIFEST, path))
    return entries


def parents_of(path: str) -> Iterator[str]:
    """Yield the directories in a tree that contain a path, innermost first."""
    parent = path.rpartition("/")[0]
    while parent:
        yield parent
        parent = parent.rpartition("/")[0]


def _flaw(entry: Entry) -> str:
    """Return the reason why an entry is invalid, or ""."""
    if not isinstance(entry.path, str) or not isinstance(entry.content, str):
        return "is damaged"
    if not stays_inside(entry.path):
        return "is outside the tree, or too deep"
    if entry.kind == LINK:
        return "" if link_stays_inside(entry.path, entry.content) else "points outside the tree"
    hexadecimal = len(entry.content) == 64 and not entry.content.strip("0123456789abcdef")
    sized = isinstance(entry.size, int) and not isinstance(entry.size, bool) and entry.size >= 0
    return "" if entry.kind in (FILE, PROGRAM) and hexadecimal and sized else "is damaged"


def stays_inside(path: str) -> bool:
    """Return whether a path is relative, without .., and valid on every file system."""
    names = _encoded(path).split(b"/")
    fits = len(names) <= MAX_DEPTH and max(map(len, names)) <= MAX_NAME
    return fits and not _NO_NAMES.intersection(names)


def _encoded(path: str) -> bytes:
    """Return a path, or a symlink's target, in the system's encoding; b"" if that is impossible."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return b""
    return b"" if b"\0" in encoded or len(encoded) >= MAX_PATH else encoded


def link_stays_inside(path: str, target: str) -> bool:
    """Return whether a symlink at `path`, relative to the tree, points inside the tree.

    Only the beginning of the target may lead upward. A later .. could follow another symlink and lead
    elsewhere.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = 0
    while parts[up : up + 1] == [".."]:
        up += 1
    inside = up <= path.count("/") and ".." not in parts[up:]
    return inside and _encoded(target)[:1] not in (b"", b"/")


class Store:
    """The store at `base`, which may begin with ~, for the run passed to `hold`.

    An agent uses it for a `Placement`, and the controller for `snapshot`. Raises `TreeError` or OSError.
    """

    def __init__(self, base: str) -> None:
        self.base = os.path.expanduser(base)
        if not os.path.isabs(self.base):
            what = "can't expand %s: this user has no home directory" % self.base
            raise TreeError("%s; set HOME or, on a node, set sync.to to an absolute path" % what)
        self._blobs, self._new, self._runs = (os.path.join(self.base, name) for name in PLACES)
        for path in (self.base, self._blobs, self._new, self._runs):
            os.makedirs(path, 0o700, exist_ok=True)
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode):
                advice = "; replace it with a directory or, on a node, set sync.to to its target"
                raise TreeError("%s is a symlink, not a directory" % path + advice)
            if found.st_uid != os.geteuid():
                advice = "; for a node, set sync.to to a directory of your own; for this machine, set HOME"
                raise TreeError("%s belongs to another user" % path + advice)
            if found.st_mode & 0o022:
                advice = "; run `chmod -R go-w` on it if only you use it, or set sync.to to another directory"
                raise TreeError("%s can be written to by others" % path + advice)
        # The run held, and the descriptors of its locked manifest and of its mark
        self._run, self._note, self._mark = "", -1, -1
        self.left = ""
        """The path of the run's tree if `release` has left files in it."""
        self.grown = False
        """Whether contents were added, so that `release` also trims the store."""

    # Contents

    def read(self, digest: str) -> bytes | None:
        """Return the content with this digest; None if it is missing or damaged. Removes damaged content."""
        path = self.blob(digest)
        try:
            with _opened(path) as file:
                data = file.read()
        except FileNotFoundError:
            return None
        if digest_of(data) == digest:
            return data
        _unlink(path)
        return None

    def put(self, data: bytes, program: bool = False) -> str:
        """Put content into the store, unless it is already there. Return its digest. Raises OSError."""
        digest = digest_of(data)
        if not _is_kept(self.blob(digest, program), len(data)):
            content = NewContent(self, program)
            try:
                content.write(data)
                content.keep()
            except OSError:
                content.discard()
                raise
        return digest

    def path_of(self, entry: Entry) -> str:
        """Return the path of a file's content in the store. Raises OSError for a symlink."""
        if entry.kind == LINK:
            raise OSError(errno.EINVAL, "a symlink has no content", entry.path)
        return self.blob(entry.content, entry.kind == PROGRAM)

    def blob(self, digest: str, program: bool = False) -> str:
        """Return the path for content with this digest, whether or not the store has it."""
        return "%s/%s/%s%s" % (self._blobs, digest[:2], digest[2:], "x" if program else "")

    def unfinished(self) -> str:
        """Return a new path for an unfinished file or directory of the run."""
        return os.path.join(self._new, "%s.%s" % (self._run, os.urandom(8).hex()))

    # The tree of a run

    def tree_of(self, run_id: str) -> str:
        """Return the path of the tree of a run."""
        return os.path.join(self._runs, run_id)

    def hold(self, run_id: str) -> Iterator[float]:
        """Keep the tree of a run until `release`. Yield seconds to wait while another agent is creating it.

        The lock is exclusive until the tree is complete.
        """
        wait_s, path = 0.01, self.tree_of(run_id) + ".tree"
        while self._note < 0:
            self._run, self._note = run_id, _claimed(path, fcntl.LOCK_EX, fcntl.LOCK_SH)
            if self._note < 0:  # another agent is making the tree, or has just removed it
                yield wait_s
                wait_s = min(2 * wait_s, 0.5)
        while self._mark < 0:
            self._mark = _claimed(self._mark_of(run_id), fcntl.LOCK_SH)
            if self._mark < 0:  # another agent on this host has just removed it
                yield 0.0

    def _mark_of(self, run_id: str) -> str:
        """Return the path of the file that marks the tree of a run as in use on this host.

        Hosts may share the store, and many file systems don't show locks of other hosts.
        """
        return "%s@%s" % (self.tree_of(run_id), os.uname().nodename)

    def renew(self) -> None:
        """Show other hosts that the tree is still in use. Called every MARK_S seconds."""
        os.utime(self._mark)

    def _is_marked(self, run_id: str) -> bool:
        """Return whether the tree of a run is in use on any host. Remove marks that agents left behind."""
        # Remove this host's before listing the others: the last of several hosts then finds none.
        if _is_in_use(self._mark_of(run_id), own=True):
            return True
        names = [name for name in os.listdir(self._runs) if name.startswith(run_id + "@")]
        return any(_is_in_use(os.path.join(self._runs, name)) for name in names)

    def note(self, manifest: bytes) -> None:
        """Record the files in the run's tree, for the agents that remove the tree and trim the store."""
        if os.fstat(self._note).st_size != len(manifest):
            with open(self._note, "r+b", closefd=False) as note:
                note.seek(0)
                note.write(manifest)
                note.truncate()

    def lay_out(self, entries: list[Entry]) -> Iterator[float | list[int]]:
        """Create the run's tree in steps, or verify and complete an existing one.

        After an attempt, agents that lost their connection leave only what the ranks have written to it.
        Each step yields the indices of contents that the store needs before the next step, or 0 if none.
        """
        final = self.tree_of(self._run)
        while (lacking := (yield from self._lacking(entries, final))) or not os.path.isdir(final):
            new = self.unfinished()
            try:
                yield from self._make(entries, lacking, new)
                if _is_moved(new, final):
                    break
                yield from _merge(new, final)
            finally:
                remove_tree(new)
        lock(self._note, fcntl.LOCK_SH)

    def _make(self, entries: list[Entry], todo: list[int], new: str) -> Iterator[float | list[int]]:
        """Create the entries `todo` (indices) in the directory `new`, in steps like those of `lay_out`.

        Wrong contents are removed from the store. These and missing ones are requested until every file is
        correct.
        """
        os.mkdir(new, 0o700)
        made: set[str] = set()
        while todo:
            wrong: dict[str, list[int]] = {}
            for index in todo:
                entry = entries[index]
                _make_parents(new, entry.path, made)
                path = "%s/%s" % (new, entry.path)
                if not (self._link(entry, path) and is_as_listed(path, entry)):
                    wrong.setdefault(self.path_of(entry), []).append(index)
                    _unlink(path)
                yield 0.0
            for content in wrong:
                _unlink(content)
            if wrong:
                yield sorted(indices[0] for indices in wrong.values())
            todo = sorted(index for indices in wrong.values() for index in indices)

    def _link(self, entry: Entry, path: str) -> bool:
        """Create a file in a tree, and return whether the store had its content."""
        source = "" if entry.kind == LINK else self.path_of(entry)
        try:
            if source:
                os.link(source, path)
            else:
                os.symlink(entry.content, path)
        except FileNotFoundError:
            return False
        except FileExistsError:
            raise _same_name(entry.path) from None
        except OSError:
            if not source:
                raise
            # The file system has no hard links, or the content has too many.
            with _opened(source) as old, open(path, "xb") as new:
                new.writelines(iter(lambda: old.read(_READ), b""))
            os.chmod(path, 0o500 if entry.kind == PROGRAM else 0o400)
        return True

    def _lacking(self, entries: list[Entry], directory: str) -> Generator[float, None, list[int]]:
        """Return the indices of files that a tree lacks. Raises `TreeError` if one differs from its entry."""
        lacking = []
        for index, entry in enumerate(entries):
            path = os.path.join(directory, entry.path)
            if not os.path.lexists(path):
                lacking.append(index)
            elif not is_as_listed(path, entry):
                raise _changed(path)
            yield 0.0
        return lacking

    def release(self) -> str:
        """Remove the run's tree and unused files. Return the tree's path if files are left in it, or ""."""
        deque(self.release_in_steps(), maxlen=0)
        return self.left

    def release_in_steps(self) -> Iterator[float]:
        """Do the same as `release`. Afterwards, `left` is the path."""
        for fd in (self._mark, self._note):
            if fd >= 0:
                os.close(fd)
        self._mark = self._note = -1
        with suppress(OSError):  # another agent has removed the same files; the next run removes the rest
            yield from self._retire(self._run)
            yield from self._tidy()

    def _retire(self, run_id: str) -> Iterator[float]:
        """Remove a run's tree unless it is in use."""
        directory = self.tree_of(run_id)
        try:
            note = _opened(directory + ".tree", os.O_RDWR)
        except OSError:
            return
        with note:
            if self._is_marked(run_id) or not lock(note.fileno(), fcntl.LOCK_EX):
                return
            listed = {entry.path: entry for entry in _noted(note.read())}
            yield from self._remove_listed(directory, listed, os.fstat(note.fileno()).st_mtime)
            _unlink(directory + ".tree")
        if run_id == self._run and os.path.lexists(directory):
            self.left = directory

    def _remove_listed(self, directory: str, listed: dict[str, Entry], since: float) -> Iterator[float]:
        """Remove compiled Python code, empty directories, and the files that the run has not changed."""
        for where, directories, names in os.walk(directory, topdown=False):
            inside = where[len(directory) + 1 :] + "/" if where != directory else ""
            compiled = where.endswith("/__pycache__")
            links = [name for name in directories if os.path.islink(os.path.join(where, name))]
            for name in (*names, *links):
                path, entry = "%s/%s" % (where, name), listed.get(inside + name)
                if compiled or (entry and _is_unchanged(path, entry, since)):
                    _unlink(path)
                yield 0.0
            with suppress(OSError):  # the run has written there
                os.rmdir(where)

    def _tidy(self) -> Iterator[float]:
        """Remove files left by killed agents. If contents were added, remove the oldest beyond the limit."""
        for name in os.listdir(self._runs):
            if name.endswith(".tree") and name[:-5] != self._run:
                yield from self._retire(name[:-5])
        for name in os.listdir(self._new):
            path, run_id = os.path.join(self._new, name), name.rpartition(".")[0]
            if _age_s(path) > STALE_S or (run_id and not os.path.exists(self.tree_of(run_id) + ".tree")):
                remove_tree(path)
        if self.grown:
            yield from self._trim()

    def _trim(self) -> Iterator[float]:
        """Remove contents not in any tree in use, least recently (un)linked first, down to the limit."""
        disk = os.statvfs(self._blobs)
        most = min(MAX_STORE, int(disk.f_blocks * disk.f_frsize * DISK_SHARE) or MAX_STORE)
        busy = self._busy()
        idle, total = [], 0
        for directory in os.listdir(self._blobs):
            with os.scandir(os.path.join(self._blobs, directory)) as found:
                for each in found:
                    state = each.stat(follow_symlinks=False)
                    if each.path not in busy:
                        idle.append((state.st_ctime, state.st_size, each.path))
                        total += state.st_size
            yield 0.0
        for _, size, path in sorted(idle):
            if total <= most:
                break
            _unlink(path)
            total -= size
            yield 0.0

    def _busy(self) -> set[str]:
        """Return the paths of the contents of all trees in use."""
        busy = set()
        for name in os.listdir(self._runs):
            if name.endswith(".tree"):
                with _opened(os.path.join(self._runs, name)) as note:
                    manifest = note.read()
                busy.add(self.blob(digest_of(manifest)))
                busy.update([self.path_of(each) for each in _noted(manifest) if each.kind != LINK])
        return busy


class NewContent:
    """Content that is being written. It is moved to its place in the store once it is complete.

    The writer must call `discard` after an error.
    """

    def __init__(self, store: Store, program: bool) -> None:
        self._store, self._program = store, program
        self._hash, self.size = hashlib.sha256(), 0
        self._new = store.unfinished()
        self._file: BinaryIO = open(self._new, "xb")  # noqa: SIM115 (until `keep` or `discard`)
        store.grown = True

    def write(self, data: bytes) -> None:
        """Append to the content. Raises OSError."""
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def keep(self, expected: str = "") -> None:
        """Put the content into the store. Raises OSError, or `TreeError` if its digest isn't `expected`.

        If `expected` is "", any digest is accepted.
        """
        digest = self._hash.hexdigest()
        if expected not in ("", digest):
            raise TreeError(DAMAGED)
        self._file.close()
        os.chmod(self._new, 0o500 if self._program else 0o400)
        final = self._store.blob(digest, self._program)
        os.makedirs(os.path.dirname(final), 0o700, exist_ok=True)
        os.replace(self._new, final)

    def discard(self) -> None:
        """Remove the unfinished content."""
        with suppress(OSError):  # a full disk
            self._file.close()
        _unlink(self._new)


def is_as_listed(path: str, entry: Entry) -> bool:
    """Return whether a file in a tree matches the manifest. Raises OSError if it can't be read."""
    try:
        if entry.kind == LINK:
            return os.readlink(path) == entry.content
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.ENOTDIR, errno.EACCES):
            return False
        raise
    hashed = hashlib.sha256()
    try:
        state = os.fstat(fd)
        runs = bool(state.st_mode & stat.S_IXUSR)
        if not stat.S_ISREG(state.st_mode) or state.st_size != entry.size or runs != (entry.kind == PROGRAM):
            return False
        while piece := os.read(fd, min(_READ, entry.size + 1)):
            hashed.update(piece)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(fd)
    return hashed.hexdigest() == entry.content


def _is_unchanged(path: str, entry: Entry, since: float) -> bool:
    """Return whether a file is unchanged since the time `since`, when the tree was created."""
    try:
        found = os.lstat(path)
        # A hard link to content. Root can write to it whatever its mode is, but that changes its time.
        if found.st_mode in _CONTENTS and found.st_nlink > 1 and found.st_mtime < since:
            return found.st_size == entry.size
        return is_as_listed(path, entry)
    except OSError:
        return False


def _is_kept(path: str, size: int) -> bool:
    """Return whether the store has the content, and record that it was used."""
    try:
        state = os.stat(path)
    except FileNotFoundError:
        return False
    if time.time() - state.st_mtime > STALE_S:
        os.utime(path)
    return state.st_size == size


def _opened(path: str, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a file in the store. Raises OSError. A pipe, on which the agent would wait, is removed instead."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return open(fd, "rb")
        os.close(fd)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
    remove_tree(path)
    raise FileNotFoundError(errno.ENOENT, "is not a file", path)


def _make_parents(directory: str, path: str, made: set[str]) -> None:
    parent = path.rpartition("/")[0]
    if parent and parent not in made:
        _make_parents(directory, parent, made)
        try:
            os.mkdir("%s/%s" % (directory, parent), 0o700)
        except FileExistsError:
            raise _same_name(parent) from None
        made.add(parent)


def _is_moved(new: str, final: str) -> bool:
    """Move a directory, and return True; False if one with files is there. Raises `TreeError` or OSError."""
    try:
        os.rename(new, final)
    except NotADirectoryError:
        raise _changed(final) from None
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _merge(new: str, final: str) -> Iterator[float]:
    """Move the contents of one directory into another, except for files that it already has, in steps."""
    for name in os.listdir(new):
        source, target = "%s/%s" % (new, name), "%s/%s" % (final, name)
        if os.path.isdir(source) and not os.path.islink(source):
            if not _is_moved(source, target):
                yield from _merge(source, target)
        elif not os.path.lexists(target):
            os.rename(source, target)
        yield 0.0


def _noted(manifest: bytes) -> list[Entry]:
    """Return the recorded files of a tree; [] if the agent was killed before the tree was created."""
    try:
        return read_manifest(manifest)
    except TreeError:
        return []


def _is_in_use(mark: str, own: bool = False) -> bool:
    """Return whether an agent needs a mark, of this host if `own`. Remove the mark if none does."""
    try:
        with open(mark, "r+b") as file:  # NFS refuses exclusive locks on files open only for reading
            # A recent mark of another host isn't locked here, since that host may be about to lock it.
            unused = own or _age_s(mark) > STALE_S
            if unused and lock(file.fileno(), fcntl.LOCK_EX):
                _unlink(mark)
                return False
            return True
    except FileNotFoundError:
        return False  # removed by another agent


def _claimed(path: str, *ways: int) -> int:
    """Lock a file in the first of these ways that is possible now. Return its descriptor; -1 if none is.

    The file is created if necessary. Another process may remove it before it is locked.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    if any(lock(fd, how) is not False for how in ways) and os.fstat(fd).st_nlink:
        return fd
    os.close(fd)
    return -1


def remove_tree(path: str) -> None:
    """Remove a file in the store, or a directory and everything below it, as far as possible."""
    _unlink(path)
    if os.path.lexists(path):
        import shutil  # seldom needed

        shutil.rmtree(path, ignore_errors=True)


def _unlink(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


def _age_s(path: str) -> float:
    try:
        return time.time() - os.lstat(path).st_mtime
    except OSError:
        return 0.0


class Placement:
    """The creation of a run's tree on this node, in steps. Between steps, the agent does its other work.

    Contents missing from the store are requested with `TreeLacks`, and arrive as pieces of a zlib stream. An
    empty piece ends the stream.
    """

    def __init__(
        self,
        node: int,
        poller: Poller,
        report: Callable[[tuple[Any, ...]], None],
        command: messages.PlaceTree,
    ) -> None:
        self._node, self._poller, self._report, self._command = node, poller, report, command
        self._store: Store | None = None
        self._steps = self._placing(command)
        self._entries: list[Entry] = []
        self._awaited: deque[Entry] = deque()
        self._inflate: Any = None
        self._content: NewContent | None = None
        self._requests, self._received, self._reported_at = 0, 0, 0.0
        self._environment: Environment | None = None

    def go_on(self) -> None:
        """Continue for TURN_S seconds, and leave further steps to later turns of the agent.

        If contents are missing, request them. Once they have arrived, `feed` continues.
        """
        until = time.monotonic() + TURN_S
        try:
            for step in self._steps:
                if isinstance(step, list):
                    self._ask(step)
                    return
                if step or time.monotonic() > until:
                    if not step:
                        self._report_progress()
                    self._poller.after(step, "tree", self.go_on)
                    return
        except (TreeError, OSError) as error:
            self._refuse(error)

    def _placing(self, command: messages.PlaceTree) -> Generator[float | list[int], None, None]:
        """Place the tree in steps. Yield the seconds to wait, or the indices of missing contents.

        If the list is empty, the manifest is missing.
        """
        self._store = store = Store(command.base)
        yield from store.hold(command.run_id)
        self._renew()
        manifest = store.read(command.tree)
        while manifest is None:
            yield []
            manifest = store.read(command.tree)
        store.note(manifest)
        self._entries = read_manifest(manifest)
        yield from store.lay_out(self._entries)
        if command.setup is None:
            self._report(messages.TreePlaced(self._node, command.tree))
        else:
            yield from self._set_up(command, command.setup)

    def _renew(self) -> None:
        """Renew the mark in the store every MARK_S seconds."""
        assert self._store
        with suppress(OSError):
            self._store.renew()
        self._poller.after(MARK_S, "mark", self._renew)

    def _set_up(self, command: messages.PlaceTree, setup: messages.Setup) -> Iterator[float]:
        """Build the environment, unless the node has it. Report progress, and finally the result."""
        from distlaunch.agent.setup import Environment  # few jobs have one

        environment = self._environment = Environment(command.base, setup)
        if not environment.complete:
            report = self._report
            environment.build(
                self._poller, lambda text: report(messages.SetupPrinted(self._node, text)), self.go_on
            )
        while environment.builder:
            self._report_progress()
            yield PROGRESS_S
        if environment.complete:
            versions = tuple([(name, str(value)) for name, value in environment.facts().items()])
            self._report(messages.TreePlaced(self._node, command.tree, environment.path, versions))
        else:
            self._report(messages.TreeRefused(self._node, environment.last_output, True, environment.late))

    def _ask(self, indices: list[int]) -> None:
        """Request these contents, or the manifest if there are no indices. Raises `TreeError`."""
        self._requests += 1
        if self._requests > messages.MAX_LACKS:
            what = "files in %s keep changing, or their file system doesn't keep modes" % self._command.base
            raise TreeError(what + "; set sync.to to another disk")
        # The manifest is also content of the store. Its size is not known.
        manifest = Entry("", FILE, -1, self._command.tree)
        self._awaited = deque([self._entries[index] for index in indices] or [manifest])
        self._inflate = zlib.decompressobj()
        self._report(messages.TreeLacks(self._node, tuple(indices)))

    def _refuse(self, error: Exception) -> None:
        self._stop()
        if isinstance(error, OSError):
            place = error.filename or os.path.expanduser(self._command.base)
            error = TreeError("%s: %s; to use another directory, set sync.to" % (place, error.strerror))
        self._report(messages.TreeRefused(self._node, str(error)))

    def _stop(self) -> None:
        """Remove unfinished files."""
        self._poller.cancel("tree")
        self._inflate = None
        if self._content:
            self._content.discard()
            self._content = None
        self._steps.close()

    def feed(self, piece: bytes) -> None:
        """Handle the next piece of the missing files, from a TREE frame. An empty piece is the last one."""
        if self._inflate is None:
            return  # refused meanwhile
        try:
            left = piece
            while left:
                self._take(self._inflate.decompress(left, _READ))
                left = self._inflate.unconsumed_tail
            self._report_progress()
            if piece:
                return
            self._take(self._inflate.flush(), last=True)
            if self._awaited:
                raise TreeError(DAMAGED)
            self._inflate = None
        except (TreeError, OSError, zlib.error) as error:
            self._refuse(TreeError(DAMAGED) if isinstance(error, zlib.error) else error)
            return
        self.go_on()

    def _take(self, data: bytes, last: bool = False) -> None:
        """Append `data` to the awaited contents, in order. `last` is set if the stream has ended."""
        assert self._store
        self._received += len(data)
        while self._awaited:
            entry = self._awaited[0]
            content = self._content = self._content or NewContent(self._store, entry.kind == PROGRAM)
            left = len(data) if entry.size < 0 else entry.size - content.size
            content.write(data[:left])
            data = data[left:]
            if content.size < entry.size or (entry.size < 0 and not last):
                return
            content.keep(entry.content)
            self._content = None
            self._awaited.popleft()
        if data:
            raise TreeError(DAMAGED)

    def _report_progress(self) -> None:
        if time.monotonic() - self._reported_at >= PROGRESS_S:
            self._reported_at = time.monotonic()
            self._report(messages.TreeProgress(self._node, self._received))

    def close(self, turn: Callable[[], None]) -> None:
        """Remove the tree, except for files that the run has written to it.

        If that takes longer than TURN_S, call `turn` in between, for the agent's other work.
        """
        self._stop()
        self._poller.cancel("mark")
        if self._environment:
            self._environment.stop()
        until = time.monotonic() + TURN_S
        for _ in self._store.release_in_steps() if self._store else ():
            if time.monotonic() > until:
                self._poller.after(0.0, "tree", lambda: None)  # continue immediately
                turn()
                until = time.monotonic() + TURN_S
        if self._store and self._store.left:
            self._report(messages.TreeKept(self._node, self._store.left))
