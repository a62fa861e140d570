"""The job's code on a node: a store of file contents, and the tree of each run, made from it and proven.

A manifest lists the files of a tree, and its own digest names the tree. The store keeps contents by their
digests, in files that never change. The tree of a run consists of hard links to them, so that removing a
content from the store harms no run. Directories of the tree belong to the run, which may write there. Before
the tree gets its name, every file is read again and compared with the manifest.

    BASE/store        the identity of the store, which nodes with a shared home have in common
    BASE/blobs/XX/    contents, and manifests, by digest; a program's name ends in x, since links share modes
    BASE/runs/ID      the tree of a run
    BASE/runs/ID.tree its manifest, locked as long as an agent uses the tree
    BASE/new/         what is being made

Everything is private to the user: modes 0700, and 0400 or 0500 for contents.
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

from distlaunch.agent import messages
from distlaunch.agent.frozen import Frozen
from distlaunch.agent.setup import Environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Callable, Deque, Dict, Iterator, List, Optional, Set, Tuple

    from distlaunch.agent.poller import Poller

FILE, PROGRAM, LINK = "file", "program", "link"
MAX_FILES = 100_000
MAX_STORE = 20 << 30
DISK_SHARE = 0.05
"""The store has at most MAX_STORE bytes, and this share of its disk, beside those of present trees."""
STALE_S = 86_400.0
"""Seconds after which something unfinished belongs to a process that was killed."""
TURN_S = 0.02
PROGRESS_S = 1.0
MAX_ASKED = 5
_READ = 1 << 20
_NO_LINKS = (errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV, errno.EACCES)


class TreeError(Exception):
    """The tree can't be made. The text is for the user."""


class MissingError(Exception):
    """Contents at these indices of the manifest are not in the store; no indices = the manifest is not."""

    def __init__(self, indices: List[int]) -> None:
        super().__init__()
        self.indices = indices


class Entry(Frozen):
    """A file, program or symlink of a tree. `content` is the digest, or the target of a symlink."""

    path: str
    kind: str
    size: int
    content: str


def digest_of(data: bytes) -> str:
    """Return the digest of a content."""
    return hashlib.sha256(data).hexdigest()


def manifest_text(entries: List[Entry]) -> bytes:
    """Return the manifest of a tree, whose digest names the tree."""
    return json.dumps(sorted(map(tuple, entries)), separators=(",", ":")).encode()


def read_manifest(data: bytes) -> List[Entry]:
    """Return the entries of a manifest. Raises `TreeError` unless each is inside, and below no other."""
    try:
        entries = [Entry(*row) for row in json.loads(data.decode())]
    except (ValueError, TypeError, RecursionError):
        raise TreeError("the manifest is damaged") from None
    if len(entries) > MAX_FILES:
        raise TreeError("the tree has more than %d files" % MAX_FILES)
    kinds: Dict[str, str] = {}
    for entry in entries:
        flaw = _flaw(entry) or ("occurs twice" if entry.path in kinds else "")
        if flaw:
            raise TreeError("%.200r in the manifest %s" % (entry.path, flaw))
        kinds[entry.path] = entry.kind
    for path in kinds:
        parts = path.split("/")
        for length in range(1, len(parts)):
            if "/".join(parts[:length]) in kinds:
                raise TreeError("%.200r in the manifest is below a file" % path)
    return entries


def _flaw(entry: Entry) -> str:
    """Return what is wrong with an entry, or ""."""
    if not all(isinstance(each, str) for each in (entry.path, entry.kind, entry.content)):
        return "is damaged"
    if not _stays_inside(entry.path):
        return "is outside the tree"
    if entry.kind == LINK:
        return "" if link_stays_inside(entry.path, entry.content) else "points out of the tree"
    hexadecimal = len(entry.content) == 64 and not entry.content.strip("0123456789abcdef")
    sized = isinstance(entry.size, int) and not isinstance(entry.size, bool) and entry.size >= 0
    return "" if entry.kind in (FILE, PROGRAM) and hexadecimal and sized else "is damaged"


def _stays_inside(path: str) -> bool:
    """Return whether a path is relative, and has only names that any file system accepts."""
    names = path.split("/")
    return "\0" not in path and not any(
        name in ("", ".", "..") or len(os.fsencode(name)) > 255 for name in names
    )


def link_stays_inside(path: str, target: str) -> bool:
    """Return whether a symlink at `path`, relative to the tree, leads to a place inside."""
    depth = path.count("/")
    for part in target.split("/"):
        depth += {"": 0, ".": 0, "..": -1}.get(part, 1)
        if depth < 0:
            return False
    return bool(target) and "\0" not in target and not target.startswith("/")


class Store:
    """The contents at `base`, which may begin with ~. Raises `TreeError` or OSError."""

    def __init__(self, base: str) -> None:
        self.base = os.path.expanduser(base)
        self._blobs, self._new, self._runs = (
            os.path.join(self.base, name) for name in ("blobs", "new", "runs")
        )
        for path in (self.base, self._blobs, self._new, self._runs):
            os.makedirs(path, 0o700, exist_ok=True)
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise TreeError("%s is not a directory that only this user can write to" % path)

    def identity(self) -> str:
        """Return a random word that the store keeps."""
        path = os.path.join(self.base, "store")
        if not os.path.exists(path):
            new = self._unfinished()
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(os.urandom(16).hex())
            try:
                os.link(new, path)
            except FileExistsError:
                pass  # another agent was faster
            except OSError:
                os.replace(new, path)
                return self.identity()
            os.unlink(new)
        with open(path) as file:
            return file.read(64)

    def read(self, digest: str) -> Optional[bytes]:
        """Return a whole content, None if it is missing or damaged."""
        try:
            with open(self._path(digest), "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return None
        return data if digest_of(data) == digest else None

    def missing(self, entries: List[Entry]) -> List[int]:
        """Return the indices of contents that are not there, each content once."""
        found: List[int] = []
        seen: Set[str] = set()
        for index, entry in enumerate(entries):
            path = self.path_of(entry)
            if entry.kind == LINK or path in seen:
                continue
            seen.add(path)
            if not _is_kept(path, entry.size):
                found.append(index)
        return found

    def put(self, data: bytes, program: bool = False) -> str:
        """Put a content into the store, unless it is there, and return its digest. Raises OSError."""
        digest = digest_of(data)
        if not _is_kept(self._path(digest, program), len(data)):
            content = self.add(program)
            content.write(data)
            content.keep()
        return digest

    def path_of(self, entry: Entry) -> str:
        """Return the path of the content of a file."""
        return self._path(entry.content, entry.kind == PROGRAM)

    def _path(self, digest: str, program: bool = False) -> str:
        return os.path.join(self._blobs, digest[:2], digest[2:] + ("x" if program else ""))

    def add(self, program: bool = False) -> NewContent:
        """Return a new content, to be written."""
        return NewContent(
            self._unfinished(), lambda digest: self._path(digest, program), 0o500 if program else 0o400
        )

    def _unfinished(self) -> str:
        return os.path.join(self._new, os.urandom(8).hex())

    def lay_out(self, entries: List[Entry], run_id: str) -> Iterator[None]:
        """Make the tree of a run, in steps, or prove the one that is there. Raises `MissingError`."""
        final = self.tree_of(run_id)
        if not os.path.isdir(final):
            new = self._unfinished()
            try:
                yield from self._link_all(entries, new)
                yield from self._proven(entries, new)
                os.rename(new, final)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                remove_tree(new)  # an agent of the run on another node with the same store was faster
            except BaseException:
                remove_tree(new)
                raise
            else:
                return
        yield from self._proven(entries, final)

    def _link_all(self, entries: List[Entry], new: str) -> Iterator[None]:
        os.mkdir(new, 0o700)
        made = {""}
        for index, entry in enumerate(entries):
            _make_parents(new, entry.path, made)
            path = os.path.join(new, entry.path)
            try:
                if entry.kind == LINK:
                    os.symlink(entry.content, path)
                else:
                    self._link(entry, path)
            except FileNotFoundError:
                raise MissingError([index]) from None  # another job has just trimmed the store
            except FileExistsError:
                raise TreeError("two names in the tree are the same here: %s" % entry.path) from None
            yield

    def _link(self, entry: Entry, path: str) -> None:
        source = self.path_of(entry)
        try:
            os.link(source, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with open(source, "rb") as old, open(path, "xb") as new:
                new.writelines(iter(lambda: old.read(_READ), b""))
            os.chmod(path, 0o500 if entry.kind == PROGRAM else 0o400)

    def _proven(self, entries: List[Entry], folder: str) -> Iterator[None]:
        """Read every file of a tree. Raises `MissingError`, after removing wrong contents from the store."""
        wrong = []
        for index, entry in enumerate(entries):
            if not is_as_listed(os.path.join(folder, entry.path), entry):
                wrong.append(index)
                if entry.kind != LINK:
                    _unlink(self.path_of(entry))
            yield
        if wrong and folder == self.tree_of(os.path.basename(folder)):
            raise TreeError(
                "%s has changed since it was laid out" % os.path.join(folder, entries[wrong[0]].path)
            )
        if wrong:
            raise MissingError(wrong)

    def tree_of(self, run_id: str) -> str:
        """Return the path of the tree of a run."""
        return os.path.join(self._runs, run_id)

    def use(self, run_id: str, manifest: bytes) -> int:
        """Note that the tree of a run is in use. Return the descriptor that must stay open meanwhile."""
        fd = os.open(self.tree_of(run_id) + ".tree", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            pass  # a file system without locks
        os.pwrite(fd, manifest, 0)
        return fd

    def retire(self, run_id: str) -> bool:
        """Remove the tree of a run that nobody uses any more. Return whether the run has left files there."""
        folder = self.tree_of(run_id)
        try:
            fd = os.open(folder + ".tree", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            return False
        with open(fd, "rb") as note:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._remove_listed(folder, {entry.path: entry for entry in read_manifest(note.read())})
                os.unlink(folder + ".tree")
            except (OSError, TreeError):
                return False  # in use, or without locks
        return os.path.lexists(folder)

    def _remove_listed(self, folder: str, listed: Dict[str, Entry]) -> None:
        """Remove the files that the run has not changed, compiled Python code, and empty directories."""
        for where, folders, names in os.walk(folder, topdown=False):
            inside = os.path.relpath(where, folder)
            links = [name for name in folders if os.path.islink(os.path.join(where, name))]
            for name in (*names, *links):
                path, entry = (
                    os.path.join(where, name),
                    listed.get(os.path.normpath(os.path.join(inside, name))),
                )
                if os.path.basename(where) == "__pycache__" or (entry and self._is_unchanged(path, entry)):
                    _unlink(path)
            try:
                os.rmdir(where)
            except OSError:
                pass  # the run has written there

    def _is_unchanged(self, path: str, entry: Entry) -> bool:
        if entry.kind == LINK:
            return os.path.islink(path)
        try:
            return os.path.samestat(os.lstat(path), os.stat(self.path_of(entry)))
        except OSError:
            return is_as_listed(path, entry)  # trimmed meanwhile

    def tidy(self, trims: bool) -> None:
        """Remove what killed agents left behind and, if it `trims`, the oldest contents that are too many."""
        for name in os.listdir(self._runs):
            if name.endswith(".tree"):
                self.retire(name[:-5])
        for name in os.listdir(self._new):
            path = os.path.join(self._new, name)
            if _age_s(path) > STALE_S:
                remove_tree(path)
        if trims:
            self._trim()

    def _trim(self) -> None:
        disk = os.statvfs(self._blobs)
        most = min(MAX_STORE, int(disk.f_blocks * disk.f_frsize * DISK_SHARE) or MAX_STORE)
        idle, total = [], 0
        for folder in os.listdir(self._blobs):
            with os.scandir(os.path.join(self._blobs, folder)) as found:
                for each in found:
                    state = each.stat(follow_symlinks=False)
                    if state.st_nlink == 1:
                        idle.append((state.st_mtime, state.st_size, each.path))
                        total += state.st_size
        for _, size, path in sorted(idle):
            if total <= most:
                break
            _unlink(path)
            total -= size


class NewContent:
    """A content that is being written. It gets its place in the store once it is whole."""

    def __init__(self, new: str, place: Callable[[str], str], mode: int) -> None:
        self._new, self._place, self._mode = new, place, mode
        self._hash, self.size = hashlib.sha256(), 0
        self._file: BinaryIO = open(new, "xb")  # noqa: SIM115 (until `keep` or `discard`)

    def write(self, data: bytes) -> None:
        """Append to the content. Raises OSError."""
        try:
            self._file.write(data)
        except OSError:
            self.discard()
            raise
        self._hash.update(data)
        self.size += len(data)

    def keep(self, expected: str = "") -> str:
        """Put the content into the store, and return its digest. Raises `TreeError` if not as `expected`."""
        digest = self._hash.hexdigest()
        if expected not in ("", digest):
            self.discard()
            raise TreeError("a file was damaged on its way")
        try:
            self._file.close()
            os.chmod(self._new, self._mode)
            final = self._place(digest)
            os.makedirs(os.path.dirname(final), 0o700, exist_ok=True)
            os.replace(self._new, final)
        except OSError:
            self.discard()
            raise
        return digest

    def discard(self) -> None:
        """Remove what was written."""
        try:
            self._file.close()
        except OSError:
            pass  # a full disk
        _unlink(self._new)


def is_as_listed(path: str, entry: Entry) -> bool:
    """Return whether a file of a tree is what the manifest says. Raises OSError if it can't be read."""
    try:
        if entry.kind == LINK:
            return os.readlink(path) == entry.content
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EINVAL, errno.ENOTDIR, errno.EACCES):
            return False
        raise
    hashed = hashlib.sha256()
    with open(fd, "rb", buffering=0) as file:
        state = os.fstat(fd)
        runs = bool(state.st_mode & stat.S_IXUSR)
        if not stat.S_ISREG(state.st_mode) or state.st_size != entry.size or runs != (entry.kind == PROGRAM):
            return False
        for piece in iter(lambda: file.read(_READ), b""):
            hashed.update(piece)
    return hashed.hexdigest() == entry.content


def _is_kept(path: str, size: int) -> bool:
    """Return whether the store has a content, and note that it was used."""
    try:
        state = os.stat(path)
    except FileNotFoundError:
        return False
    if time.time() - state.st_mtime > STALE_S:
        os.utime(path)
    return state.st_size == size


def _make_parents(folder: str, path: str, made: Set[str]) -> None:
    parent = path.rpartition("/")[0]
    if parent not in made:
        _make_parents(folder, parent, made)
        try:
            os.mkdir(os.path.join(folder, parent), 0o700)
        except FileExistsError:
            raise TreeError("two names in the tree are the same here: %s" % parent) from None
        made.add(parent)


def remove_tree(path: str) -> None:
    """Remove a file or directory of the store with everything below it, as far as possible."""
    import shutil  # seldom needed

    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        _unlink(path)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def _age_s(path: str) -> float:
    try:
        return time.time() - os.lstat(path).st_mtime
    except OSError:
        return 0.0


class Placement:
    """Makes the tree of a run on this node, in steps between which the agent does its other work.

    What is missing in the store is requested with `TreeLacks`, and arrives as pieces of a zlib stream. An
    empty piece ends it.
    """

    def __init__(self, node: int, poller: Poller, report: Callable[[Tuple[Any, ...]], None]) -> None:
        self._node, self._poller, self._report = node, poller, report
        self._command: messages.PlaceTree
        self._store: Optional[Store] = None
        self._entries: List[Entry] = []
        self._awaited: Deque[Entry] = deque()
        self._inflate: Any = None
        self._content: Optional[NewContent] = None
        self._asked, self._received, self._told_at = 0, 0, 0.0
        self._in_use = -1
        self._environment: Optional[Environment] = None

    def place(self, command: messages.PlaceTree) -> None:
        """Begin, or begin again."""
        self._command = command
        self._start()

    def _start(self) -> None:
        self._go_on(self._steps())

    def _go_on(self, steps: Iterator[None]) -> None:
        """Take steps for TURN_S, and the others in later turns of the agent."""
        until = time.monotonic() + TURN_S
        try:
            for _ in steps:
                if time.monotonic() > until:
                    self._tell_progress()
                    self._poller.after(0.0, "tree", lambda: self._go_on(steps))
                    return
        except MissingError as error:
            self._ask(error.indices)
        except (TreeError, OSError) as error:
            self._refuse(error)

    def _steps(self) -> Iterator[None]:
        command = self._command
        self._store = store = self._store or Store(command.base)
        manifest = store.read(command.tree)
        if manifest is None:
            raise MissingError([])
        self._entries = entries = read_manifest(manifest)
        missing = store.missing(entries)
        if missing:
            raise MissingError(missing)
        yield from store.lay_out(entries, command.run_id)
        if self._in_use < 0:
            self._in_use = store.use(command.run_id, manifest)
        if command.setup is None:
            self._report(messages.TreePlaced(self._node, command.tree))
        else:
            self._set_up(Environment(command.base, command.setup))

    def _set_up(self, environment: Environment) -> None:
        self._environment = environment
        if environment.complete:
            self._report_environment(environment)
            return

        def printed(text: str) -> None:
            self._report(messages.SetupPrinted(self._node, text))

        def wait() -> None:
            self._tell_progress()
            self._poller.after(PROGRESS_S, "tree", wait)

        environment.build(self._poller, printed, lambda: self._report_environment(environment))
        wait()

    def _report_environment(self, environment: Environment) -> None:
        self._poller.cancel("tree")
        if environment.complete:
            versions = tuple([(name, str(value)) for name, value in environment.facts().items()])
            tree = self._command.tree
            self._report(messages.TreePlaced(self._node, tree, environment.path, versions))
        else:
            self._report(messages.TreeRefused(self._node, environment.last_words, placed=True))

    def _ask(self, indices: List[int]) -> None:
        self._asked += 1
        if self._asked > MAX_ASKED:
            self._refuse(TreeError("the contents of files in %s keep changing" % self._command.base))
            return
        assert self._store
        # The manifest is a content, too, whose size is not known.
        manifest = Entry("", FILE, -1, self._command.tree)
        self._awaited = deque([self._entries[index] for index in indices] or [manifest])
        self._inflate = zlib.decompressobj()
        self._report(messages.TreeLacks(self._node, self._store.identity(), tuple(indices)))

    def _refuse(self, error: Exception) -> None:
        self._inflate = None
        if isinstance(error, OSError):
            error = TreeError("%s: %s" % (error.filename or self._command.base, error.strerror))
        self._report(messages.TreeRefused(self._node, str(error)))

    def feed(self, piece: bytes) -> None:
        """Take the next piece of missing contents."""
        if self._inflate is None:
            return  # refused meanwhile
        try:
            self._take(self._inflate.decompress(piece) if piece else self._inflate.flush(), not piece)
            self._tell_progress()
            if piece:
                return
            if self._awaited:
                raise TreeError("files are missing")
            self._inflate = None
            self._start()
        except (TreeError, OSError, zlib.error) as error:
            self._refuse(error)

    def _take(self, data: bytes, last: bool) -> None:
        """Append `data` to the awaited contents, in order."""
        assert self._store
        self._received += len(data)
        while self._awaited:
            entry = self._awaited[0]
            content = self._content = self._content or self._store.add(entry.kind == PROGRAM)
            left = len(data) if entry.size < 0 else entry.size - content.size
            content.write(data[:left])
            data = data[left:]
            if content.size < entry.size or (entry.size < 0 and not last):
                return
            self._content = None
            content.keep(entry.content)
            self._awaited.popleft()
        if data:
            raise TreeError("more arrived than was missing")

    def _tell_progress(self) -> None:
        if time.monotonic() - self._told_at >= PROGRESS_S:
            self._told_at = time.monotonic()
            self._report(messages.TreeProgress(self._node, self._received))

    def close(self) -> None:
        """Remove the tree, except for what the run has written there."""
        if self._content:
            self._content.discard()
        if self._in_use < 0 or not self._store:
            return
        os.close(self._in_use)
        try:
            if self._environment:
                self._environment.stop()
            if self._store.retire(self._command.run_id):
                self._report(messages.TreeKept(self._node, self._store.tree_of(self._command.run_id)))
            self._store.tidy(bool(self._received))
        except OSError:
            pass  # it is tried again after the next run
