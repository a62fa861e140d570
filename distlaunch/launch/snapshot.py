"""The snapshot of a job's code: the list of its files, and their contents in this machine's store.

A run sends contents from the store, never from the working tree, which may change in the meantime.
"""

import hashlib
import os
import re
import stat
import subprocess
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from distlaunch.agent.frozen import Frozen
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
PRIVATE = (".ssh/", ".aws/", ".gnupg/", ".kube/", ".config/gcloud/", ".netrc", ".git-credentials")
"""Files in the home directory that are never copied."""
ANOTHER_REPOSITORY = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"}
"""Variables that point git to a repository, as in a git hook, perhaps not to the one of the job's code."""
GONE = f"{DEFAULT_BASE} on this machine no longer has the code; start the job again"
"""The error if another run has removed contents, to make room, before this run has marked them as in use."""
LARGEST = 5
TRIES = 3
"""Maximum attempts to read the code while it changes."""
MAX_DIFF = 8 << 20
PLAIN = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/")
"""Options for a diff that `git apply` accepts, whatever the user's settings are."""


WHEELS = ".distlaunch-wheels"
"""The directory for packages from this machine, in the root of the job's code on the nodes."""
LISTS = ("uv.lock", "requirements.txt", "pyproject.toml")
"""The files in the workdir that may list the packages; the first one found counts."""
LOCKS = {"uv": LISTS, "controller": LISTS, "conda": ("environment.yml", "environment.yaml")}
UV_SETTINGS = (".python-version", "uv.toml")
"""Further files in the workdir that determine which environment uv builds."""


def with_tree(spec: JobSpec) -> JobSpec:
    """Return `spec` with the snapshot of its code. Raises `DistlaunchError`."""
    spec, tree, entries = take(spec)
    return spec if spec.setup is None else _with_setup(spec, tree.root, spec.setup, entries)


def _with_setup(spec: JobSpec, root: str, setup: Setup, entries: Iterable[Entry]) -> JobSpec:
    """Return `spec` with the files that may list packages, after checking that every workdir has them."""
    present = {path_in(root, entry.path) for entry in entries}
    names = LOCKS.get(setup.kind, ())
    programs = [spec.program_of(node) for node in spec.pool] or [spec.program]
    for place in dict.fromkeys(program.workdir for program in programs):
        missing = [path for name in setup.files if (path := path_in(place, name)) not in present]
        found = present.intersection(path_in(place, name) for name in (*setup.files, *names))
        workdir = f"the workdir, {place},"
        if (missing or names) and not found and not f"{place}/".startswith(f"{root}/"):
            advice = "correct workdir, or move the job file into the project"
            raise spec.error("setup", f"{workdir} is outside the code in {root}, which is copied; {advice}")
        if missing:
            raise _missing(spec, "setup", root, missing[0])
        if names and not found:
            advice = "create one there, set workdir to the directory that has it or, if git ignores it,"
            raise spec.error("setup", f"{workdir} has none of {', '.join(names)}: {advice} {_INCLUDE}")
    files = (*setup.files, *names, *(UV_SETTINGS if setup.kind == "uv" else ()))
    if setup.kind == "controller":
        files = tuple(sorted(path for each in entries if (path := each.path).startswith(f"{WHEELS}/")))
    return spec._replace(setup=setup._replace(files=files))


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
        entries, (commit, dirty, diff) = _read(store, lambda: _listed(spec, root, directory, top), top)
        _check_program(spec, root, {entry.path for entry in entries})
        entries += _packages(store, spec, root, entries)
        digest = store.put(manifest_text(entries))
    size = sum(entry.size for entry in entries)
    tree = Tree(digest, spec.sync.base, root, len(entries), size, commit, dirty, diff)
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


def _kept(digest: str) -> bytes:
    """Return a manifest or diff from this machine's store. Raises `DistlaunchError`."""
    with _explained(f"the code {digest[:12]} can't be read"):
        if data := local_store().read(digest):
            return data
    raise DistlaunchError(GONE)


def contents(digest: str, indices: Sequence[int]) -> Iterator[bytes]:
    """Yield, as a zlib stream, the files of a tree at `indices`, or its manifest if `indices` is empty.

    The stream answers `TreeLacks`. Raises `DistlaunchError`.
    """
    # A piece is at most as long as the data read plus the compressor's buffer, 96 KiB.
    deflate, size = zlib.compressobj(1), MAX_OUTPUT // 4
    with _explained("can't read the code to send"):
        store, entries = local_store(), read_manifest(_kept(digest)) if indices else []
        for entry in [entries[index] for index in indices] or [Entry("", FILE, 0, digest)]:
            path, hashed = store.path_of(entry), hashlib.sha256()
            if not os.path.exists(path):
                raise DistlaunchError(GONE)
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
    what = f"git can't read {directory}: {os.fsdecode(done.stderr).strip()}"
    if done.returncode:
        raise DistlaunchError(what)
    if b"could not open directory" in done.stderr:  # for git only a warning
        raise DistlaunchError(f"{what}; make it readable, or add it to .gitignore")
    return os.fsdecode(done.stdout)


def _state(store: Store, root: str, tracked: bool) -> tuple[str, bool, str]:
    """Return the commit ("" = none yet), whether files differ from it, and the digest of the diff.

    `tracked` is whether git tracks all files in the tree.
    """
    status = _git(root, "status", "--porcelain=2", "--branch", "-z", "--untracked-files=no")
    records = status.split("\0")
    commits = [line.removeprefix("# branch.oid ") for line in records if line.startswith("# branch.oid ")]
    commit = commits[0] if commits and commits[0] != "(initial)" else ""
    dirty = not tracked or any(record and not record.startswith("#") for record in records)
    diff = b""
    if commit and dirty:
        with suppress(DistlaunchError):  # a tracked file was replaced by a pipe or socket
            diff = os.fsencode(_git(root, "diff", *PLAIN, commit))
    return commit, dirty, store.put(diff) if 0 < len(diff) <= MAX_DIFF else ""


def record(tree: Tree, directory: RunDirectory, run_id: str) -> Store:
    """Write the code's manifest and its difference from the commit to a run directory.

    The returned store keeps the contents until it is released. Raises `DistlaunchError`.
    """
    manifest = _kept(tree.digest)
    directory.append(CODE, manifest)
    if tree.diff:
        directory.append("code.diff", _kept(tree.diff))
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
        os.mkdir(to)
        wrong = []
        for entry in entries:
            path = os.path.join(to, entry.path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if entry.kind == LINK:
                os.symlink(entry.content, path)
                continue
            with open(store.path_of(entry), "rb") as file:
                data = file.read()
            if digest_of(data) != entry.content:
                wrong.append(entry.path)
                continue
            mode = 0o777 if entry.kind == PROGRAM else 0o666  # without the bits in the user's umask
            with open(path, "xb", opener=partial(os.open, mode=mode)) as file:
                file.write(data)
        if wrong:
            what = f"{DEFAULT_BASE} was changed, so {to} lacks {listed(wrong)}"
            raise DistlaunchError(f"{what}; {commit}")
    return len(entries)


# Which files


class _File(Frozen):
    """A file or symlink for the nodes, as listed. The `stamp` changes when it is replaced or written to."""

    path: str
    source: str
    mode: int
    size: int
    stamp: tuple[int, ...]
    tracked: bool


def _file(path: str, source: str, tracked: bool = False) -> _File:
    found = os.lstat(source)
    return _File(path, source, found.st_mode, found.st_size, _stamp(found), tracked)


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _files(root: str, paths: Iterable[str], tracked: bool = False) -> dict[str, _File]:
    """Return those files at `paths` that exist."""
    files = {}
    for path in paths:
        with suppress(FileNotFoundError, NotADirectoryError):  # deleted, but perhaps still in git's index
            files[path] = _file(path, f"{root}/{path}", tracked)
    return files


def _listed(spec: JobSpec, root: str, directory: str, top: str | None) -> list[_File]:
    """Return the files of the tree, sorted by path. `top` is None if git doesn't list them."""
    files = _wanted(spec, root, _of_git(root, "", True) if top else _files(root, _walked(root)))
    _add_further(files, spec, root, directory)
    for each in files.values():
        if stat.S_ISDIR(each.mode):  # one that `_walked` couldn't read
            try:
                os.listdir(each.source)
            except OSError as error:
                what = f"can't read {each.source}: {reason(error)}"
                raise DistlaunchError(f"{what}; make it readable, or {_EXCLUDE}") from None
    links = {each.path for each in files.values() if stat.S_ISLNK(each.mode)}
    found = [each for _, each in sorted(files.items()) if stat.S_ISREG(each.mode) or each.path in links]
    # git's index may still list files in a directory that a symlink has replaced.
    found = [each for each in found if links.isdisjoint(parents_of(each.path))]
    _check_private(spec, found)
    if len(found) > MAX_FILES:
        text = f"the code in {root} has {len(found)} files; at most {MAX_FILES} are supported"
        raise spec.error("sync", f"{text}; leave some out with sync.exclude or {IGNORE_FILE}")
    if deep := next((each.path for each in found if each.path.count("/") >= MAX_DEPTH), None):
        raise spec.error("sync", f"{deep} is more than {MAX_DEPTH} directories deep; {_EXCLUDE}")
    if (size := sum(each.size for each in found)) > spec.sync.limit:
        raise _too_large(spec, root, size, found)
    return found


def _check_private(spec: JobSpec, found: list[_File]) -> None:
    """Raise an error if keys in the home directory would be copied, as for a job file directly in it."""
    private = tuple(os.path.join(os.path.realpath(os.path.expanduser("~")), name) for name in PRIVATE)
    if key := next((each.source for each in found if each.source.startswith(private)), None):
        advice = "move the job file and the code into a directory of their own"
        raise spec.error("sync", f"{key} would be copied to the nodes; {advice}, or {_EXCLUDE}")


def _add_further(files: dict[str, _File], spec: JobSpec, root: str, directory: str) -> None:
    """Add the job's `files`, which may be anywhere, to those in the tree."""
    for given in spec.sync.files:
        path = os.path.relpath(f"{directory}/{os.path.basename(given)}", root)
        source = os.path.realpath(given)
        if not os.path.isfile(source):
            raise spec.error("files", f"{given} is not a file")
        if (other := os.path.realpath(files[path].source if path in files else source)) != source:
            raise spec.error("files", f"{given} and {other} would both be {path} on the nodes; rename one")
        if any(each.startswith(f"{path}/") for each in files):
            text = f"{given} would be {path} on the nodes, but that is a directory in the code; rename one"
            raise spec.error("files", text)
        files[path] = _file(path, source)


def _packages(store: Store, spec: JobSpec, root: str, code: Iterable[Entry]) -> list[Entry]:
    """Return the entries of packages for `setup: {from: controller}`. `code` is the code in `root`."""
    if not (spec.setup and spec.setup.kind == "controller"):
        return []
    program, present = spec.program, {path_in(root, entry.path) for entry in code}
    if other := next((node for node in spec.pool if spec.program_of(node).workdir != program.workdir), None):
        text = "from: controller gets the packages of the job's workdir only; remove this, or use setup: uv"
        raise spec.error(f"{other.path}.workdir", text)
    lists = [path for name in LISTS if (path := path_in(program.workdir, name)) in present]
    if not lists:
        return []
    found = wheels_of(lists[0], program.python, program.fixed_env)
    packages = (_entry(store, _file(os.path.basename(path), path)) for path in found)
    return [each._replace(path=f"{WHEELS}/{each.content}/{each.path}") for each in packages]


def _too_large(spec: JobSpec, root: str, size: int, found: list[_File]) -> Exception:
    largest = sorted(found, key=lambda each: -each.size)[:LARGEST]
    names = ", ".join(f"{each.path} ({size_words(each.size)})" for each in largest)
    text = f"the code in {root} has {size_words(size)}, more than {size_words(spec.sync.limit)} (sync.limit)"
    advice = f"leave out data with sync.exclude or {IGNORE_FILE}, or raise sync.limit"
    return spec.error("sync", f"{text}; its largest files are {names}; {advice}")


def _wanted(spec: JobSpec, root: str, files: dict[str, _File]) -> dict[str, _File]:
    """Return the `files` of the tree that aren't left out, and those to include."""
    if spec.sync.include:
        included = _matching(spec, spec.sync.include, _walked(root, frozenset({".git"})))
        files |= _files(root, [path for path in included if path not in files])
    patterns = [*spec.sync.exclude]
    file = os.path.join(root, IGNORE_FILE)
    with suppress(FileNotFoundError), open(file, encoding="utf-8-sig", errors="surrogateescape") as ignored:
        patterns = [*ignored.read().splitlines(), *patterns]
    unwanted = {*_matching(spec, patterns, files)} if patterns else set()
    logs, base = spec.logs.directory, os.path.expanduser(spec.sync.base)
    copies = [os.path.join(base, name) for name in (*PLACES, ENVIRONMENTS)]  # if this is a node, too
    runs = {os.path.relpath(way(each), root) for each in (logs, *copies) for way in (str, os.path.realpath)}
    below = tuple(f"{each}/" for each in runs)
    for path, each in files.items():
        of_run = not each.tracked and (path.startswith(below) or ABOUT_RUN.search(path))
        if of_run or path in runs or path.startswith(WHEELS):
            unwanted.add(path)
    return {path: each for path, each in files.items() if path not in unwanted}


def _of_git(root: str, inside: str, tracked: bool) -> dict[str, _File]:
    """Return tracked files, and untracked files that aren't ignored, including those in submodules.

    `tracked` is whether the directory `inside` is in the commit.
    """
    directory, files = f"{root}/{inside}".rstrip("/"), dict[str, _File]()
    lines = _git(directory, "ls-files", "-t", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    if lines[0] == "H ./":  # a submodule that isn't checked out
        if os.listdir(directory):
            advice = "run `git submodule update --init`, or move its files away"
            raise DistlaunchError(f"{directory} is a submodule with files, but without .git; {advice}")
        return {}
    for line in lines[:-1]:
        files |= _files(root, [f"{inside}{line[2:]}"], tracked and not line.startswith("?"))
    for path, each in [*files.items()]:
        if stat.S_ISDIR(each.mode):
            del files[path]
            files |= _of_git(root, f"{path.rstrip('/')}/", each.tracked)
    return files


def _walked(root: str, unwanted: frozenset[str] = UNWANTED) -> Iterator[str]:
    """Yield the relative paths of files and symlinks below `root`, except in `unwanted` directories.

    A directory that can't be read is yielded, too, and ends in / as the patterns that match it do.
    """
    unreadable: list[OSError] = []
    for where, directories, names in os.walk(root, onerror=unreadable.append):
        directories[:] = [name for name in directories if name not in unwanted]
        links = [name for name in directories if os.path.islink(os.path.join(where, name))]
        for name in (*names, *links):
            yield os.path.relpath(os.path.join(where, name), root)
    for error in unreadable:
        yield f"{os.path.relpath(error.filename, root)}/"


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


def _read(
    store: Store, list_files: Callable[[], list[_File]], top: str | None
) -> tuple[list[Entry], tuple[str, bool, str]]:
    """Put the contents of the files from `list_files` into the store. Return their entries and `_state`.

    If files that git tracks change in the meantime, as by `git checkout`, read again: all are from the same
    moment. Others, such as logs, may change all the time. Raises OSError or `DistlaunchError`.
    """
    entries, files = dict[_File, Entry](), list_files()
    for _ in range(TRIES):
        failure = None
        try:
            for file in files:
                if file not in entries:
                    entries[file] = _entry(store, file)
        except OSError as error:
            failure = error
        state = _state(store, top, all(file.tracked for file in files)) if top else ("", False, "")
        before, files = files, list_files()
        changed = {*before} ^ {*files}
        if failure and not changed:
            raise failure
        if not failure and not any(file.tracked for file in changed):
            return [entries[file] for file in before], state
    raise _changing(min(changed).source)


def _changing(source: str) -> DistlaunchError:
    return DistlaunchError(f"{source} keeps changing while it is being read; try again, or {_EXCLUDE}")


def _entry(store: Store, file: _File) -> Entry:
    """Put a file's contents into the store, and return its entry. Raises OSError or `DistlaunchError`."""
    path, source = file.path, file.source
    if stat.S_ISLNK(file.mode):
        target = os.readlink(source)
        if not link_stays_inside(path, target):
            what = f"{source} is a symlink to {target}, which is not a relative path inside the code"
            # A pattern such as data/ doesn't match a symlink.
            ignored = f"{source.removesuffix(path)}{IGNORE_FILE}"
            advice = f"correct it, or leave it out with the pattern /{path} in {ignored}"
            raise DistlaunchError(f"{what}; {advice}")
        return Entry(path, LINK, 0, target)
    for _ in range(TRIES):
        with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            before = os.fstat(opened.fileno())
            data = opened.read(before.st_size)
            after = os.fstat(opened.fileno())
        if _stamp(before) == _stamp(after) and len(data) == after.st_size:
            is_program = bool(after.st_mode & stat.S_IXUSR)
            return Entry(path, PROGRAM if is_program else FILE, len(data), store.put(data, is_program))
    raise _changing(source)
