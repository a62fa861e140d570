"""The snapshot of a job's code: the list of its files, and their contents in this machine's store.

A run sends contents from the store, never from the working tree, which may change in the meantime.
"""

import hashlib
import json
import os
import re
import stat
import subprocess
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from distlaunch.agent.setup import ENVIRONMENTS
from distlaunch.agent.tree import (
    FILE,
    LINK,
    MAX_DEPTH,
    MAX_FILES,
    PLACES,
    PROGRAM,
    Entry,
    Store,
    TreeError,
    digest_of,
    link_stays_inside,
    manifest_text,
    parents_of,
    read_manifest,
)
from distlaunch.agent.wire import MAX_OUTPUT
from distlaunch.errors import DistlaunchError, JobError, UsageError, reason
from distlaunch.job.spec import DEFAULT_BASE, JobSpec, Setup, Tree
from distlaunch.job.text import path_in
from distlaunch.launch.wheels import wheels_of
from distlaunch.observers.run_directory import CODE, RunDirectory, fd_of
from distlaunch.wording import listed, size_words

IGNORE_FILE = ".distlaunchignore"
_INCLUDE = f"list it in sync.include, and make sure that neither sync.exclude nor {IGNORE_FILE} matches it"
_EXCLUDE = f"leave it out with sync.exclude or {IGNORE_FILE}"
ABOUT_RUN = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{8}(/|\.html$|\.tar\.gz$)")
"""Matches run directories, and files that `report` or `bundle` writes to the current directory by default."""
UNWANTED = frozenset({".git", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache"})
"""Directories to leave out if the code isn't in a git repository, which has its own ignore rules."""
ANOTHER_REPOSITORY = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"}
"""Variables that point git to a repository, as in a git hook, perhaps not to the one of the job's code."""
LARGEST = 5
TRIES = 3
"""Maximum attempts to read a file that changes while it is being read."""
MAX_DIFF = 8 << 20
PLAIN = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/")
"""Options for a diff that `git apply` accepts, whatever the user's settings are."""


WHEELS = ".distlaunch-wheels"
"""The directory for packages from this machine, in the root of the job's code on the nodes."""
LISTS = ("uv.lock", "requirements.txt", "pyproject.toml")
"""The files in the workdir that may list the packages; the first one found counts."""
PYTHON_VERSION = ".python-version"
LOCKS = {
    "uv": (*LISTS, PYTHON_VERSION),
    "controller": LISTS,
    "conda": ("environment.yml", "environment.yaml"),
}
"""The files in the workdir that determine the content of an environment."""


def with_tree(spec: JobSpec) -> JobSpec:
    """Return `spec` with the snapshot of its code. Raises `DistlaunchError`."""
    spec, tree, entries = take(spec)
    return spec if spec.setup is None else _with_setup(spec, tree, spec.setup, entries)


def _with_setup(spec: JobSpec, tree: Tree, setup: Setup, entries: Iterable[Entry]) -> JobSpec:
    """Return `spec` with the environment's name, and the files that determine its content."""
    contents = {path_in(tree.root, entry.path): entry.content for entry in entries}
    paths = {name: path_in(spec.program.workdir, name) for name in setup.files or LOCKS.get(setup.kind, ())}
    present = [(name, path) for name, path in paths.items() if path in contents]
    # The content of a symlink is only its target's name.
    found = {name: contents.get(os.path.realpath(path), contents[path]) for name, path in present}
    missing = [name for name in setup.files if name not in found]
    names = [name for name in LOCKS.get(setup.kind, ()) if name != PYTHON_VERSION]
    workdir = f"the workdir, {spec.program.workdir},"
    if (missing or names) and not found and not f"{spec.program.workdir}/".startswith(f"{tree.root}/"):
        advice = "correct workdir, or move the job file into the project"
        raise spec.error("setup", f"{workdir} is outside the code in {tree.root}, which is copied; {advice}")
    if missing:
        raise _missing(spec, "setup", tree.root, paths[missing[0]])
    if names and not {*names} & {*found}:
        advice = "create one there, set workdir to the directory that has it or, if git ignores it,"
        raise spec.error("setup", f"{workdir} has none of {', '.join(names)}: {advice} {_INCLUDE}")
    if setup.kind == "controller":
        packages = (entry for entry in sorted(entries) if entry.path.startswith(f"{WHEELS}/"))
        found = {entry.path: entry.content for entry in packages}
    key = digest_of(json.dumps([setup.kind, setup.run, spec.program.python, *found.items()]).encode())
    return spec._replace(tree=tree._replace(environment=key), setup=setup._replace(files=tuple(found)))


def _below(root: str, path: str) -> str:
    """Return `path` as written below `root` if it is there, perhaps through ~ or symlinks; else unchanged."""
    whole = os.path.expanduser(path)
    # A symlink in the code may be the script itself, and keeps its name.
    named = os.path.join(os.path.realpath(os.path.dirname(whole)), os.path.basename(whole))
    for real in (named, os.path.realpath(whole)):
        if os.path.isabs(whole) and f"{real}/".startswith(f"{root}/"):
            return real
    return path


def take(spec: JobSpec) -> tuple[JobSpec, Tree, list[Entry]]:
    """Put a job's code into this machine's store. Return the job with its tree, the tree, and its entries.

    In that job, paths into the code are written without ~ and symlinks. Raises `DistlaunchError`.
    """
    directory = os.path.realpath(os.path.dirname(spec.invocation.file) or os.getcwd())
    top = _top_level(directory)
    root = top or directory
    spec = spec.with_paths(lambda path: _below(root, path))
    with _explained("can't save the code for the nodes"):
        store = local_store()
        paths = _of_git(root, "") if top else _walked(root)
        entries = _entries(store, spec, root, directory, paths)
        commit, dirty = _state(root) if top else ("", False)
        _check_program(spec, root, {entry.path for entry in entries})
        entries += _packages(store, spec, root, entries)
        digest = store.put(manifest_text(entries))
    size = sum(entry.size for entry in entries)
    tree = Tree(digest, spec.sync.base, root, len(entries), size, commit, dirty)
    return spec._replace(tree=tree), tree, entries


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise `DistlaunchError` if the store can't be used. `what` describes the failure."""
    try:
        yield
    except OSError as error:
        raise DistlaunchError(f"{what}: {error.filename or DEFAULT_BASE}: {reason(error)}") from None
    except TreeError as error:
        raise DistlaunchError(f"{what}: {error}") from None


def local_store() -> Store:
    """Return this machine's store. Raises `TreeError` or OSError."""
    return Store(DEFAULT_BASE)


def manifest_of(digest: str) -> bytes:
    """Return the manifest of a tree in this machine's store. Raises `DistlaunchError`."""
    with _explained(f"the code {digest[:12]} can't be read"):
        if manifest := local_store().read(digest):
            return manifest
    raise DistlaunchError(f"{DEFAULT_BASE} on this machine no longer has the code; start the job again")


def contents(digest: str, indices: Sequence[int]) -> Iterator[bytes]:
    """Yield, as a zlib stream, the files of a tree at `indices`, or its manifest if `indices` is empty.

    The stream answers `TreeLacks`. Raises `DistlaunchError`.
    """
    # A piece is at most as long as the data read plus the compressor's buffer, 96 KiB.
    deflate, size = zlib.compressobj(1), MAX_OUTPUT // 4
    with _explained("can't read the code to send"):
        store, entries = local_store(), read_manifest(manifest_of(digest)) if indices else []
        for entry in [entries[index] for index in indices] or [Entry("", FILE, 0, digest)]:
            path, hashed = store.path_of(entry), hashlib.sha256()
            with open(path, "rb") as file:
                while data := file.read(size):
                    hashed.update(data)
                    if piece := deflate.compress(data):
                        yield piece
            if hashed.hexdigest() != entry.content:
                os.unlink(path)
                raise DistlaunchError(f"{path} was changed; to replace it, start the job again")
    yield deflate.flush()


def _top_level(directory: str) -> str | None:
    """Return the root of the repository around `directory`, or None if there is no git or no repository."""
    try:
        return _git(directory, "rev-parse", "--show-toplevel").removesuffix("\n")
    except FileNotFoundError:
        return None
    except DistlaunchError:
        # A repository that git can't read has ignore rules, too: without them, secrets might be copied.
        while not os.path.lexists(f"{directory}/.git"):
            if os.path.ismount(directory):  # git looks no further
                return None
            directory = os.path.dirname(directory)
        raise


def _git(directory: str, *words: str) -> str:
    """Return git's output. Raises `DistlaunchError`, or FileNotFoundError if there is no git."""
    argv = ["git", "--no-optional-locks", "-C", directory, *words]
    env = {name: value for name, value in os.environ.items() if name not in ANOTHER_REPOSITORY}
    env["LC_ALL"] = "C"
    done = subprocess.run(argv, check=False, env=env, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode:
        raise DistlaunchError(f"git can't read {directory}: {os.fsdecode(done.stderr).strip()}")
    return os.fsdecode(done.stdout)


def _state(root: str) -> tuple[str, bool]:
    """Return the commit ("" = none yet), and whether tracked files differ from it."""
    status = _git(root, "status", "--porcelain=2", "--branch", "-z", "--untracked-files=no")
    records = status.split("\0")
    commits = [line.removeprefix("# branch.oid ") for line in records if line.startswith("# branch.oid ")]
    commit = commits[0] if commits and commits[0] != "(initial)" else ""
    return commit, any(record and not record.startswith("#") for record in records)


def record(tree: Tree, directory: RunDirectory, run_id: str) -> Store:
    """Write the code's manifest and its difference from the commit to a run directory.

    The returned store keeps the contents until it is released. Raises `DistlaunchError`.
    """
    manifest = manifest_of(tree.digest)
    directory.append(CODE, manifest)
    if tree.commit and tree.dirty:
        diff = os.fsencode(_git(tree.root, "diff", *PLAIN, "HEAD"))
        if len(diff) <= MAX_DIFF:
            directory.append("code.diff", diff)
    with _explained("can't save the code for the nodes"):
        store = local_store()
        for wait_s in store.hold(f"{run_id}.origin"):
            time.sleep(wait_s)
        store.note(manifest)
        store.grown = True  # perhaps, by `take`
    return store


def check_out(directory: str, to: str) -> int:
    """Write the code of the run in `directory` into the new directory `to`. Return the number of files.

    Raises `DistlaunchError`.
    """
    commit = f"if plan.json in {directory} names a git commit, use it, with any changes in code.diff; "
    commit += "both lack files that git didn't track"
    with _explained(f"can't write the code into {to}"):
        try:
            with open(fd_of(directory, CODE), "rb") as file:
                entries = read_manifest(file.read())
        except FileNotFoundError:
            raise UsageError(f"{directory} has no code: its job did not use sync") from None
        except TreeError as error:
            raise DistlaunchError(f"{error}; {commit}") from None
        store = local_store()
        files = [each for each in entries if each.kind != LINK]
        if gone := [each.path for each in files if not os.path.exists(store.path_of(each))]:
            text = f"{DEFAULT_BASE} on this machine doesn't have all of the code ({listed(gone)})"
            raise DistlaunchError(f"{text}; {commit}")
        import shutil  # slow to import, and few runs need it

        os.mkdir(to)
        wrong = []
        for entry in entries:
            path = os.path.join(to, entry.path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if entry.kind == LINK:
                os.symlink(entry.content, path)
                continue
            shutil.copyfile(store.path_of(entry), path)
            os.chmod(path, 0o755 if entry.kind == PROGRAM else 0o644)
            with open(path, "rb") as file:
                unchanged = digest_of(file.read()) == entry.content
            if not unchanged:
                wrong.append(entry.path)
                os.remove(path)
        if wrong:
            what = f"{DEFAULT_BASE} was changed, so {to} lacks {listed(wrong)}"
            raise DistlaunchError(f"{what}; {commit}")
    return len(entries)


# Which files


def _entries(store: Store, spec: JobSpec, root: str, directory: str, paths: Iterable[str]) -> list[Entry]:
    """Return the entries of the tree, after putting their contents into the store."""
    sources = {path: f"{root}/{path}" for path in _wanted(spec, root, paths)}
    for given in spec.sync.files:
        path = os.path.relpath(f"{directory}/{os.path.basename(given)}", root)
        source = os.path.realpath(given)
        if not os.path.isfile(source):
            raise spec.error("files", f"{given} is not a file")
        if (other := os.path.realpath(sources.get(path, source))) != source:
            raise spec.error("files", f"{given} and {other} would both be {path} on the nodes; rename one")
        if any(each.startswith(f"{path}/") for each in sources):
            text = f"{given} would be {path} on the nodes, but that is a directory in the code; rename one"
            raise spec.error("files", text)
        sources[path] = source
    every = [(path, source, os.lstat(source)) for path, source in sorted(sources.items())]
    links = {path for path, _, status in every if stat.S_ISLNK(status.st_mode)}
    found = [each for each in every if stat.S_ISREG(each[2].st_mode) or each[0] in links]
    # git's index may still list files in a directory that a symlink has replaced.
    found = [each for each in found if links.isdisjoint(parents_of(each[0]))]
    if len(found) > MAX_FILES:
        text = f"the code in {root} has {len(found)} files; at most {MAX_FILES} are supported"
        raise spec.error("sync", f"{text}; leave some out with sync.exclude or {IGNORE_FILE}")
    if deep := next((path for path, *_ in found if path.count("/") >= MAX_DEPTH), None):
        raise spec.error("sync", f"{deep} is more than {MAX_DEPTH} directories deep; {_EXCLUDE}")
    if (size := sum(each[2].st_size for each in found)) > spec.sync.limit:
        raise _too_large(spec, root, size, found)
    return [_entry(store, *each) for each in found]


def _packages(store: Store, spec: JobSpec, root: str, code: Iterable[Entry]) -> list[Entry]:
    """Return the entries of packages for `setup: {from: controller}`. `code` is the code in `root`."""
    if not (spec.setup and spec.setup.kind == "controller"):
        return []
    program, present = spec.program, {path_in(root, entry.path) for entry in code}
    lists = [path for name in LISTS if (path := path_in(program.workdir, name)) in present]
    if not lists:
        return []
    found = wheels_of(lists[0], program.python, program.fixed_env)
    return [_entry(store, f"{WHEELS}/{os.path.basename(path)}", path, os.lstat(path)) for path in found]


def _too_large(
    spec: JobSpec, root: str, size: int, found: list[tuple[str, str, os.stat_result]]
) -> Exception:
    largest = sorted(found, key=lambda each: -each[2].st_size)[:LARGEST]
    names = ", ".join(f"{path} ({size_words(status.st_size)})" for path, _, status in largest)
    text = f"the code in {root} has {size_words(size)}, more than {size_words(spec.sync.limit)} (sync.limit)"
    advice = f"leave out data with sync.exclude or {IGNORE_FILE}, or raise sync.limit"
    return spec.error("sync", f"{text}; its largest files are {names}; {advice}")


def _wanted(spec: JobSpec, root: str, listed: Iterable[str]) -> Iterator[str]:
    """Yield the relative paths of files and symlinks in the tree: those `listed`, and those to include."""
    paths = set(listed)
    if spec.sync.include:
        paths |= {*_matching(spec, spec.sync.include, _walked(root, frozenset({".git"})))}
    patterns = [*spec.sync.exclude]
    file = os.path.join(root, IGNORE_FILE)
    with suppress(FileNotFoundError), open(file, encoding="utf-8", errors="surrogateescape") as ignored:
        patterns = [*ignored.read().splitlines(), *patterns]
    if patterns:
        paths -= {*_matching(spec, patterns, paths)}
    logs, base = spec.logs.directory, os.path.expanduser(spec.sync.base)
    copies = [os.path.join(base, name) for name in (*PLACES, ENVIRONMENTS)]  # if this is a node, too
    runs = {os.path.relpath(way(each), root) for each in (logs, *copies) for way in (str, os.path.realpath)}
    below = (WHEELS, *(f"{each}/" for each in runs))
    for path in paths:
        if path not in runs and not path.startswith(below) and not ABOUT_RUN.search(path):
            yield path


def _of_git(root: str, inside: str) -> Iterator[str]:
    """Yield tracked files, and untracked files that aren't ignored, including those in submodules."""
    directory = os.path.join(root, inside)
    files = _git(directory, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for path in files.split("\0"):
        whole = f"{directory}/{path}"
        try:
            is_directory = stat.S_ISDIR(os.lstat(whole).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            continue  # deleted, but still in the index
        if not is_directory:
            yield f"{inside}{path}"
        elif path == "./":  # a submodule that isn't checked out lists itself like this
            if os.listdir(directory):
                advice = "run `git submodule update --init`, or move its files away"
                raise DistlaunchError(f"{directory} is a submodule with files, but without .git; {advice}")
        elif path:
            yield from _of_git(root, f"{inside}{path.rstrip('/')}/")


def _walked(root: str, unwanted: frozenset[str] = UNWANTED) -> Iterator[str]:
    """Yield the relative paths of files and symlinks below `root`, except in `unwanted` directories."""
    for where, directories, names in os.walk(root):
        directories[:] = [name for name in directories if name not in unwanted]
        links = [name for name in directories if os.path.islink(os.path.join(where, name))]
        for name in (*names, *links):
            yield os.path.relpath(os.path.join(where, name), root)


def _matching(spec: JobSpec, patterns: Iterable[str], paths: Iterable[str]) -> Iterable[str]:
    """Yield the `paths` that match patterns in the format of .gitignore."""
    from pathspec import GitIgnoreSpec  # few jobs have patterns

    try:
        return GitIgnoreSpec.from_lines(patterns).match_files(paths)
    except (ValueError, re.error) as error:
        what = f"a pattern in {IGNORE_FILE}, sync.include or sync.exclude is invalid: {error}"
        raise spec.error("sync", what) from None


def _check_program(spec: JobSpec, root: str, paths: set[str]) -> None:
    """Check that the program's file is among the files, if it is inside the tree."""
    for node in (None, *spec.pool):
        program = spec.program_of(node) if node else spec.program
        path = path_in(program.workdir, program.words[0])
        # Its directory may be behind a symlink.
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if program.placed and path.startswith(f"{root}/") and os.path.relpath(real, root) not in paths:
            raise _missing(spec, program.kind, root, real)


def _missing(spec: JobSpec, key: str, root: str, path: str) -> JobError:
    """Return the error about the value of `key`: the file at `path` is not part of the code in `root`."""
    path = _below(root, os.path.expanduser(path))
    if not os.path.exists(path):
        return spec.error(key, f"{path} does not exist")
    if os.path.isdir(path):
        return spec.error(key, f"{path} is a directory; write the path of a file")
    if not path.startswith(f"{root}/"):
        return spec.error(
            key, f"{path} is outside the code in {root}; move it there, and correct its path here"
        )
    name, runs = os.path.relpath(path, root), os.path.relpath(os.path.realpath(spec.logs.directory), root)
    if name.startswith(f"{runs}/"):
        return spec.error(
            key, f"{name} is in logs.dir, which is not copied; set logs.dir to another directory"
        )
    if about := ABOUT_RUN.search(name):
        of_run = name[: about.end()].rstrip("/")
        return spec.error(key, f"{of_run} looks like a run directory or report, so it is left out; rename it")
    return spec.error(key, f"{name} is not part of the code in {root}; {_INCLUDE}")


# Their contents


def _entry(store: Store, path: str, source: str, found: os.stat_result) -> Entry:
    """Put a file's contents into the store, and return its entry. `found` is its status.

    A file that changes while it is being read is read again. Raises `DistlaunchError`.
    """
    if stat.S_ISLNK(found.st_mode):
        target = os.readlink(source)
        if not link_stays_inside(path, target):
            what = f"{source} is a symlink to {target}, which is not a relative path inside the code"
            # A pattern such as data/ doesn't match a symlink.
            ignored = f"{source.removesuffix(path)}{IGNORE_FILE}"
            advice = f"correct it, or leave it out with the pattern /{path} in {ignored}"
            raise DistlaunchError(f"{what}; {advice}")
        return Entry(path, LINK, 0, target)
    is_program = bool(found.st_mode & stat.S_IXUSR)
    for _ in range(TRIES):
        with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            data = file.read(found.st_size)
            before, found = found, os.fstat(file.fileno())
        if _version(before) == _version(found) and len(data) == found.st_size:
            return Entry(path, PROGRAM if is_program else FILE, len(data), store.put(data, is_program))
        time.sleep(0.05)
    raise DistlaunchError(f"{source} keeps changing while it is being read; try again, or {_EXCLUDE}")


def _version(status: os.stat_result) -> tuple[int, ...]:
    """Return a tuple that changes when a file is replaced or written to."""
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
