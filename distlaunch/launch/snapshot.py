"""The snapshot of a job's code: which files it consists of, and their contents in the store of this machine.

A run sends contents from the store, never from the working tree, which may change meanwhile.
"""

import json
import os
import shutil
import stat
import subprocess
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from distlaunch.agent.frozen import Frozen
from distlaunch.agent.tree import (
    FILE,
    LINK,
    MAX_FILES,
    PROGRAM,
    Entry,
    Store,
    TreeError,
    digest_of,
    is_as_listed,
    link_stays_inside,
    manifest_text,
    read_manifest,
)
from distlaunch.agent.wire import MAX_OUTPUT
from distlaunch.errors import DistlaunchError, UsageError, reason
from distlaunch.job.spec import DEFAULT_BASE, JobSpec, Setup, Tree
from distlaunch.job.text import path_in
from distlaunch.observers.run_directory import RunDirectory, fd_of
from distlaunch.wording import listed, size_words

IGNORE_FILE = ".distlaunchignore"
UNWANTED = frozenset({".git", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache"})
"""Directories left out if there is no git repository that says what to ignore."""
MANIFEST = "code.json"
"""The manifest of the code in a run directory."""
LARGEST = 5
TRIES = 3
"""How often a file is read that changes meanwhile."""
MAX_DIFF = 8 << 20


class Snapshot(Frozen):
    """A snapshot: the tree for the job, and its entries."""

    tree: Tree
    entries: tuple[Entry, ...]


LOCKS = {
    "uv": ("uv.lock", "requirements.txt", "pyproject.toml", ".python-version"),
    "conda": ("environment.yml", "environment.yaml"),
}
"""The files in the workdir that decide what is in an environment."""


def with_tree(spec: JobSpec) -> JobSpec:
    """Return `spec` with the snapshot of its code, if it brings any. Raises `DistlaunchError`."""
    if not spec.sync.tree:
        return spec
    tree, entries = take(spec)
    return spec._replace(tree=tree) if spec.setup is None else _with_setup(spec, tree, spec.setup, entries)


def _with_setup(spec: JobSpec, tree: Tree, setup: Setup, entries: Iterable[Entry]) -> JobSpec:
    """Return `spec` with the files that decide what is in the environment, and with its name."""
    contents = {path_in(tree.root, entry.path): entry.content for entry in entries}
    paths = {name: path_in(spec.program.workdir, name) for name in setup.files or LOCKS.get(setup.kind, ())}
    found = {name: contents[path] for name, path in paths.items() if path in contents}
    if missing := [name for name in setup.files if name not in found]:
        raise spec.error("setup", f"{listed(missing)} is not part of the code in {tree.root}")
    if not found and setup.kind != "run":
        names = ", ".join(LOCKS[setup.kind])
        raise spec.error("setup", f"found none of {names} in {spec.program.workdir}")
    key = digest_of(json.dumps([setup.kind, setup.run, spec.program.python, *found.items()]).encode())
    return spec._replace(tree=tree._replace(environment=key), setup=setup._replace(files=tuple(found)))


def take(spec: JobSpec) -> Snapshot:
    """Put the code of a job into the store of this machine. Raises `DistlaunchError`."""
    folder = os.path.dirname(spec.invocation.file) or os.getcwd()
    try:
        store = local_store()
        root = _git(folder, "rev-parse", "--show-toplevel").strip() or os.path.realpath(folder)
        words = ("status", "--porcelain=2", "--branch", "-z", "--untracked-files=no")
        with ThreadPoolExecutor() as pool:  # git is slower than what else there is to do
            state = pool.submit(_git, root, *words)
            entries = _entries(store, spec, root, os.path.realpath(folder))
            commit, dirty = _state(state.result())
        _check_program(spec, root, {entry.path for entry in entries})
        digest = store.put(manifest_text(entries))
    except OSError as error:
        text = f"can't read the code to bring to the nodes: {error.filename or DEFAULT_BASE}: {reason(error)}"
        raise DistlaunchError(text) from None
    except TreeError as error:
        raise DistlaunchError(str(error)) from None
    size = sum(entry.size for entry in entries)
    tree = Tree(digest, spec.sync.base, root, len(entries), size, commit, dirty)
    return Snapshot(tree, tuple(entries))


def local_store() -> Store:
    """Return the store of this machine. Raises `TreeError` or OSError."""
    return Store(DEFAULT_BASE)


def entries_of(digest: str) -> list[Entry]:
    """Return the entries of a tree in the store of this machine. Raises `DistlaunchError`."""
    try:
        manifest = local_store().read(digest)
        if manifest is not None:
            return read_manifest(manifest)
    except (OSError, TreeError) as error:
        raise DistlaunchError(f"the code {digest[:12]} can't be read: {error}") from None
    raise DistlaunchError(f"the code {digest[:12]} is no longer in {DEFAULT_BASE} of this machine")


def contents(digest: str, indices: Sequence[int]) -> Iterator[bytes]:
    """Yield contents of a tree in the store, or without indices its manifest, as pieces of a zlib stream.

    Raises `DistlaunchError`.
    """
    store, deflate, size = local_store(), zlib.compressobj(1), MAX_OUTPUT // 2
    entries = entries_of(digest) if indices else []
    for entry in [entries[index] for index in indices] or [Entry("", FILE, 0, digest)]:
        path = store.path_of(entry)
        try:
            with open(path, "rb") as file:
                while data := file.read(size):
                    if piece := deflate.compress(data):
                        yield piece
        except OSError as error:
            raise DistlaunchError(f"can't read the code to send: {path}: {reason(error)}") from None
    yield deflate.flush()


def _git(folder: str, *words: str) -> str:
    """Return the output of git, "" if there is no git or no repository."""
    argv = ["git", "-C", folder, "-c", "core.quotePath=false", *words]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except FileNotFoundError:
        return ""
    return os.fsdecode(done.stdout) if done.returncode == 0 else ""


def _state(status: str) -> tuple[str, bool]:
    """Return the commit, and whether files that git tracks differ from it."""
    records = status.split("\0")
    commits = [line.removeprefix("# branch.oid ") for line in records if line.startswith("# branch.oid ")]
    commit = commits[0] if commits and commits[0] != "(initial)" else ""
    return commit, any(record and not record.startswith("#") for record in records)


def record(tree: Tree, folder: RunDirectory) -> None:
    """Write the manifest of the code into a run directory, and its difference from the commit."""
    folder.append(MANIFEST, manifest_text(entries_of(tree.digest)))
    if tree.dirty and len(diff := os.fsencode(_git(tree.root, "diff", "--binary", "HEAD"))) <= MAX_DIFF:
        folder.append("code.diff", diff)


def check_out(folder: str, to: str) -> int:
    """Write the code of a run, given its run directory, into a new directory. Return the number of files.

    Raises `DistlaunchError`.
    """
    try:
        with open(fd_of(folder, MANIFEST), "rb") as file:
            entries = read_manifest(file.read())
        store = local_store()
        if missing := store.missing(entries):
            names = listed([entries[index].path for index in missing])
            text = f"{DEFAULT_BASE} on this machine no longer has all of the code ({names})"
            raise DistlaunchError(f"{text}; plan.json names the git commit, and code.diff has the changes")
        os.mkdir(to)
        for entry in entries:
            path = os.path.join(to, entry.path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if entry.kind == LINK:
                os.symlink(entry.content, path)
                continue
            shutil.copyfile(store.path_of(entry), path)
            os.chmod(path, 0o755 if entry.kind == PROGRAM else 0o644)
            if not is_as_listed(path, entry):
                raise DistlaunchError(f"{path}: its content in {DEFAULT_BASE} was changed")
    except FileNotFoundError as error:
        if os.path.basename(error.filename or "") == MANIFEST:
            raise UsageError(f"{folder} has no code: its job did not use sync") from None
        raise DistlaunchError(f"{error.filename}: {reason(error)}") from None
    except (OSError, TreeError) as error:
        raise DistlaunchError(f"can't write the code into {to}: {error}") from None
    return len(entries)


# Which files


def _entries(store: Store, spec: JobSpec, root: str, folder: str) -> list[Entry]:
    """Return the entries of the tree, whose contents are in the store afterwards."""
    sources = {path: os.path.join(root, path) for path in _wanted(spec, root)}
    for source in spec.sync.files:
        path = os.path.relpath(os.path.join(folder, os.path.basename(source)), root)
        if not os.path.isfile(source):
            raise spec.error("files", f"{source} is not a file")
        sources[path] = source
    found = [(path, source, os.lstat(source)) for path, source in sorted(sources.items())]
    if len(found) > MAX_FILES:
        text = f"the code in {root} has {len(found)} files; at most {MAX_FILES} are supported"
        raise spec.error("sync", text)
    if (size := sum(each[2].st_size for each in found)) > spec.sync.limit:
        raise _too_large(spec, root, size, found)
    return [_entry(store, *each) for each in found]


def _too_large(
    spec: JobSpec, root: str, size: int, found: list[tuple[str, str, os.stat_result]]
) -> Exception:
    largest = sorted(found, key=lambda each: -each[2].st_size)[:LARGEST]
    names = ", ".join(f"{path} ({size_words(status.st_size)})" for path, _, status in largest)
    text = f"the code in {root} has {size_words(size)}, more than {size_words(spec.sync.limit)} (sync.limit)"
    advice = f"its largest files are {names}; leave out data with sync.exclude or {IGNORE_FILE}"
    return spec.error("sync", f"{text}; {advice}")


def _wanted(spec: JobSpec, root: str) -> Iterator[str]:
    """Yield the paths of files and symlinks, relative to the root."""
    listed = _git(root, "rev-parse", "--is-inside-work-tree") and list(_of_git(root, ""))
    paths = set(listed or _walked(root))
    if spec.sync.include:
        paths |= {*_matching(spec.sync.include, _walked(root, frozenset({".git"})))}
    patterns = [*_lines(os.path.join(root, IGNORE_FILE)), *spec.sync.exclude]
    if patterns:
        paths -= {*_matching(patterns, paths)}
    runs = os.path.relpath(spec.logs.folder, root)
    for path in paths:
        if path != runs and not path.startswith(f"{runs}/"):
            yield path


def _of_git(root: str, inside: str) -> Iterator[str]:
    """Yield the files that git tracks, or that are new and not ignored, in submodules, too."""
    folder = os.path.join(root, inside)
    for path in _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        whole = os.path.join(root, inside, path)
        if not path or not os.path.lexists(whole):
            continue  # deleted, but still in the index
        if os.path.isdir(whole) and not os.path.islink(whole):
            yield from _of_git(root, os.path.join(inside, path.rstrip("/")))
        else:
            yield os.path.join(inside, path)


def _walked(root: str, unwanted: frozenset[str] = UNWANTED) -> Iterator[str]:
    for where, folders, names in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        folders[:] = [name for name in folders if name not in unwanted]
        for name in (*names, *links):
            path = os.path.join(where, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
                yield os.path.relpath(path, root)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def _matching(patterns: Iterable[str], paths: Iterable[str]) -> Iterable[str]:
    from pathspec import GitIgnoreSpec  # few jobs have patterns

    return GitIgnoreSpec.from_lines(patterns).match_files(paths)


def _check_program(spec: JobSpec, root: str, paths: set[str]) -> None:
    """Check that the program's file is among the files, if it is in the tree at all."""
    for node in (None, *spec.pool):
        program = spec.program_of(node) if node else spec.program
        path = path_in(program.workdir, program.words[0])
        if program.placed and path.startswith(f"{root}/") and os.path.relpath(path, root) not in paths:
            why = "is not part of the code: git or sync.exclude leaves it out; list it in sync.include"
            raise spec.error(program.kind, f"{path} {why if os.path.exists(path) else 'does not exist'}")


# Their contents


def _entry(store: Store, path: str, source: str, found: os.stat_result) -> Entry:
    if stat.S_ISLNK(found.st_mode):
        target = os.readlink(source)
        if not link_stays_inside(path, target):
            advice = f"leave it out with sync.exclude or {IGNORE_FILE}"
            raise DistlaunchError(f"{source} is a link to {target}, outside the code; {advice}")
        return Entry(path, LINK, 0, target)
    is_program = bool(found.st_mode & stat.S_IXUSR)
    for _ in range(TRIES):
        with open(source, "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            data = file.readall()
            after = os.fstat(file.fileno())
        if _version(before) == _version(after) and len(data) == after.st_size:
            return Entry(path, PROGRAM if is_program else FILE, len(data), store.put(data, is_program))
        time.sleep(0.05)
    advice = f"leave it out with sync.exclude or {IGNORE_FILE}"
    raise DistlaunchError(f"{source} changes while it is read; {advice}")


def _version(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
