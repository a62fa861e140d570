"""Which files a job brings to its nodes, with git, without it, and with odd files in its directory."""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from distlaunch.agent import tree
from distlaunch.agent.messages import Setup
from distlaunch.agent.poller import Poller
from distlaunch.agent.setup import Environment, key_of, read_lists
from distlaunch.agent.tree import LINK, PROGRAM, Entry, digest_of, manifest_text
from distlaunch.agent.wire import MAX_REPORT
from distlaunch.cli.job_file import load_job
from distlaunch.errors import DistlaunchError
from distlaunch.job.spec import DEFAULT_BASE, JobSpec
from distlaunch.launch import snapshot
from distlaunch.observers.run_directory import RunDirectory
from tests.harness import PATIENCE_S, completed, distlaunch, distlaunch_argv, program, wait_gone
from tests.unit.samples import longest_file

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "protocol.file.allow=always"]
SCRIPT = {"train.py": "print(1)\n"}


def git(directory: Path, *words: str | Path) -> None:
    completed([*GIT, *words], cwd=directory, status=0)


def commit(directory: Path) -> None:
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", "all")


def write(directory: Path, files: Mapping[str, str | bytes]) -> None:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data.encode() if isinstance(data, str) else data)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a job, which a git repository tracks."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    directory = tmp_path / "job"
    write(directory, SCRIPT | {".gitignore": "*.pt\n/job.yaml\n"})
    git(directory, "init", "-q")
    commit(directory)
    return directory


def spec_of(directory: Path, **keys: Any) -> JobSpec:
    """The job in this directory, as a file there says it."""
    job = {"gpus_per_node": 0, "script": "train.py", "sync": True} | keys
    (directory / "job.yaml").write_text(json.dumps(job))
    return load_job(str(directory / "job.yaml"), (), ())


def taken(directory: Path, **keys: Any) -> dict[str, Entry]:
    """The files of the snapshot, of which each is in the store."""
    entries = snapshot.take(spec_of(directory, **keys))[2]
    for each in entries:
        if each.kind != LINK:
            assert digest_of(Path(snapshot.local_store().path_of(each)).read_bytes()) == each.content
    return {each.path: each for each in entries}


def names(directory: Path, **keys: Any) -> list[str]:
    return sorted(name for name in taken(directory, **keys) if not name.startswith(".git"))


def refused(directory: Path, **keys: Any) -> str:
    with pytest.raises(DistlaunchError) as caught:
        taken(directory, **keys)
    return str(caught.value)


def _changed(job: Path) -> None:
    write(job, {"new.py": "", "a/b/c.py": "", "model.pt": "", "gone.py": ""})
    git(job, "add", "gone.py")
    (job / "gone.py").unlink()


def _another_kind_of_file(job: Path) -> None:
    write(job, {"was/file": "", "is": "", "old/x.py": "", "pipe": ""})
    git(job, "add", "-A")
    shutil.rmtree(job / "was")
    (job / "is").unlink()
    write(job, {"was": "", "is/file": ""})
    (job / "old").rename(job / "new")
    (job / "old").symlink_to("new")
    (job / "pipe").unlink()
    os.mkfifo(job / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(job / "socket"))


def _repositories(job: Path) -> None:
    """One inside, and two submodules, of which one is not checked out."""
    other = job / "inner"
    write(other, {"sub.py": "", "more/x.py": "", "left.pt": "", ".gitignore": "*.pt\n"})
    git(other, "init", "-q")
    commit(other)
    for name in ("mod", "gone"):
        git(job, "submodule", "add", "-q", other, name)
    write(job, {"mod/new.py": ""})
    git(job, "submodule", "--quiet", "deinit", "-f", "gone")


def _runs(job: Path) -> None:
    run = "train-20261126-010203-0123abcd"
    tracked = ("runs/config.yaml", f"old/{run}/plan.json")
    write(job, dict.fromkeys(tracked, ""))
    commit(job)
    names = ("runs/train-1/plan.json", "lib/runs/x.py", f"lib/runs/{run}/plan.json")
    write(job, dict.fromkeys([*names, f"{run}.html", f"{run}.tar.gz"], ""))


INNER = [f"{at}/{name}" for at in ("inner", "mod") for name in (".gitignore", "more/x.py", "sub.py")]
ODD = ["a\nb", 'it\'s "$(x)"', "\udcff", "é", "e\u0301", " ", "#"]
FOUND: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "changes": (_changed, ["a/b/c.py", "new.py"]),
    "another kind of file": (_another_kind_of_file, ["is/file", "was", "new/x.py", "old"]),
    "repositories": (_repositories, ["mod/new.py", *INNER]),
    "odd names": (lambda job: write(job, dict.fromkeys(ODD, "")), ODD),
    "runs": (
        _runs,
        ["lib/runs/x.py", "old/train-20261126-010203-0123abcd/plan.json", "runs/config.yaml"],
    ),
}


@pytest.mark.parametrize(("change", "found"), FOUND.values(), ids=FOUND)
def test_brings_what_git_does_not_ignore(job: Path, change: Callable[[Path], Any], found: list[str]) -> None:
    change(job)
    assert names(job) == sorted([*SCRIPT, *found])


def test_brings_the_repository_of_a_worktree_and_of_a_job_in_a_subdirectory(job: Path) -> None:
    write(job, {"exp/train.py": ""})
    commit(job)
    git(job, "worktree", "add", "-q", job.parent / "tree")
    write(job, {"later.py": ""})
    for place in ("tree/exp", "tree"):
        assert names(job.parent / place) == ["exp/job.yaml", "exp/train.py", "train.py"]


def test_without_git_brings_all_but_what_is_made_again(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(job, {"lib/x.py": "", "lib/__pycache__/x.pyc": "", ".venv/bin/python": "", "model.pt": ""})
    (job / "link").symlink_to("lib")
    found = [".gitignore", "job.yaml", "lib/x.py", "link", "model.pt", "train.py"]
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(job))
        assert sorted(taken(job)) == found
    shutil.rmtree(job / ".git")
    assert sorted(taken(job)) == found
    write(job, {"store/blobs/00": "", "lib/own.py": ""})  # the former as by an earlier run, to this machine
    assert sorted(taken(job, sync={"to": f"{job}/store"})) == sorted([*found, "lib/own.py"])


def test_reads_the_repository_around_the_job_although_variables_name_another(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a git hook."""
    other = job.parent / "other"
    write(other, {"x.py": ""})
    git(other, "init", "-q")
    commit(other)
    for name, path in {"DIR": ".git", "WORK_TREE": ".", "INDEX_FILE": ".git/index"}.items():
        monkeypatch.setenv(f"GIT_{name}", str(other / path))
    assert names(job) == ["train.py"]


@pytest.mark.parametrize("home", ["job", "job/home"])
def test_refuses_to_copy_keys_in_the_home_directory(
    job: Path, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be a git repository."""
    (job / "home").mkdir()
    (job.parent / "link").symlink_to(home)
    monkeypatch.setenv("HOME", str(job.parent / "link"))
    assert "train.py" in names(job)
    key = job.parent / home / ".ssh/id_ed25519"
    write(key.parent, {key.name: ""})
    words = (
        f"{key} would be copied to the nodes; move the job file and the code into a directory of their own"
    )
    assert words in refused(job)
    shutil.rmtree(job / ".git")
    assert words in refused(job)
    assert "train.py" in names(job, sync={"exclude": [".ssh"]})


def test_a_repository_without_commits_is_enough(job: Path) -> None:
    shutil.rmtree(job / ".git")
    git(job, "init", "-q")
    assert names(job) == ["train.py"]
    write(job, {".gitignore": "*\n"})
    assert f"is not part of the code in {os.path.realpath(job)}; list it in sync.include" in refused(job)
    assert taken(job, script="/bin/true") == {}


CHOSEN: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "nothing": ("", {}, ["data/a.bin", "data/b.bin", "lib/a.py"]),
    "an ignore file": ("*.bin\n", {}, ["lib/a.py"]),
    "negation": ("data/*\n!data/b.bin\n# all\n\n", {}, ["data/b.bin", "lib/a.py"]),
    "exclude": ("", {"exclude": ["/data/"]}, ["lib/a.py"]),
    "exclude after negation": ("data/*\n!data/b.bin\n", {"exclude": ["b.bin"]}, ["lib/a.py"]),
    "include": ("", {"include": ["/big.pt"]}, ["big.pt", "data/a.bin", "data/b.bin", "lib/a.py"]),
    "include against exclude": ("*.bin", {"include": ["*.pt"], "exclude": ["sub"]}, ["big.pt", "lib/a.py"]),
    "a byte order mark": ("\ufeff*.bin\n", {}, ["lib/a.py"]),
    "no UTF-8": ("\udcff\n*.bin\n", {}, ["lib/a.py"]),
}


@pytest.mark.parametrize(("ignored", "sync", "found"), CHOSEN.values(), ids=CHOSEN)
def test_patterns_choose_files(job: Path, ignored: str, sync: dict[str, Any], found: list[str]) -> None:
    write(job, {"big.pt": "", "sub/x.pt": "", "lib/a.py": "", "data/a.bin": "", "data/b.bin": ""})
    write(job, {".distlaunchignore": os.fsencode(ignored)})
    assert names(job, sync=sync or True) == sorted([".distlaunchignore", "train.py", *found])


@pytest.mark.parametrize(("workdir", "script"), [("~/../job", "train.py"), ("~", "~/../link/train.py")])
def test_paths_through_the_home_or_a_symlink_lead_to_the_copy(job: Path, workdir: str, script: str) -> None:
    (job.parent / "home").mkdir()
    (job.parent / "link").symlink_to("job")
    (job / "again.py").symlink_to("train.py")
    nodes = [{"host": "localhost", "script": f"{job.parent}/link/again.py"}]
    spec = snapshot.with_tree(spec_of(job, workdir=workdir, script=script, nodes=nodes)).in_tree("run")
    run = f"{DEFAULT_BASE}/runs/run"
    assert spec.program.workdir == (run if script == "train.py" else "~")
    assert spec.program.words == ("train.py" if script == "train.py" else f"{run}/train.py",)
    assert spec.nodes[0].script == f"{run}/again.py"


def test_a_program_keeps_its_bit_and_a_link_its_target(job: Path) -> None:
    write(job, {"run.sh": ""})
    (job / "run.sh").chmod(0o755)
    (job / "link").symlink_to("train.py")
    found = taken(job)
    assert (found["run.sh"].kind, found["run.sh"].size, found["train.py"].kind) == (PROGRAM, 0, "file")
    assert found["link"] == Entry("link", LINK, 0, "train.py")


def test_an_environment_depends_on_the_file_that_a_symlink_leads_to(job: Path) -> None:
    (job / "requirements.txt").symlink_to("base.txt")

    def environment(packages: str) -> str:
        write(job, {"base.txt": packages})
        setup = snapshot.with_tree(spec_of(job, setup="uv")).setup
        assert setup
        return Environment("/", Setup("uv", "", setup.files, str(job), "", {}, 1.0)).path

    assert len({*map(environment, ["numpy==1\n", "numpy==2\n", "numpy==1\n"])}) == 2


def test_further_files_come_beside_the_job_file(job: Path) -> None:
    write(job.parent, {"conf/a.yaml": "a", "conf/b.yaml": "b", "two/a.yaml": "other"})
    (job.parent / "link.yaml").symlink_to("conf/b.yaml")
    write(job, {"exp/train.py": ""})
    found = taken(job / "exp", files=["../../conf/a.yaml", "../../link.yaml", "train.py"])
    assert found["exp/a.yaml"].content == digest_of(b"a")
    assert found["exp/link.yaml"] == Entry("exp/link.yaml", "file", 1, digest_of(b"b"))
    both = f"files: {job.parent}/two/a.yaml and {job.parent}/conf/a.yaml would both be a.yaml on the nodes"
    assert refused(job, files=["../conf/a.yaml", "../two/a.yaml"]).endswith(f"{both}; rename one")
    write(job.parent, {"conf/train.py": ""})
    assert "would both be train.py" in refused(job, files=["../conf/train.py"])
    assert "conf is not a file" in refused(job, files=["../conf"])
    write(job.parent, {"two/exp": ""})
    assert "two/exp would be exp on the nodes, but that is a directory" in refused(job, files=["../two/exp"])


def test_runs_are_left_out_behind_symlinks_too(job: Path) -> None:
    write(job, {"out/train-1/plan.json": ""})
    (job.parent / "shown").symlink_to(job)
    assert names(job, logs={"dir": str(job.parent / "shown/out")}) == ["train.py"]
    (job / "runs").symlink_to(job.parent / "scratch")
    assert "runs" not in names(job, logs={"dir": str(job / "runs")})


def _too_large(job: Path) -> None:
    write(job, {f"{number}.bin": "x" * 1024 * number for number in range(1, 9)})
    with (job / "model.bin").open("wb") as file:
        file.truncate(300 << 20)


def _not_ours(job: Path) -> None:
    if os.geteuid():
        pytest.skip("root is missing: only root can give files away")
    os.chown(job / ".git", 12345, 12345)
    os.chown(job, 12345, 12345)


def _without_its_repository(job: Path) -> None:
    place = job / ".git"
    (place if place.is_file() else place / "HEAD").unlink()


def _moved(job: Path) -> None:
    """The directory that a worktree or a submodule has its commits in."""
    (job / ".git").rename(job / "gone.pt")
    (job / ".git").write_text("gitdir: gone\n")


def _submodule(job: Path, change: Callable[[Path], None]) -> None:
    _repositories(job)
    change(job / "mod")


LARGEST = "its largest files are model.bin (300 MiB), 8.bin (8 KiB), "
OUTSIDE = "{job}/data is a symlink to ../data, which is not a relative path inside the code; correct it, or"
A_RUN = "job-20260101-120000-0a1b2c3d/a.py"
PATTERN = "sync: a pattern in .distlaunchignore, sync.include or"
WRONG: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "size": (_too_large, {}, f"more than 256 MiB (sync.limit); {LARGEST}"),
    "depth": (lambda job: write(job, {"d/" * 200 + "x": ""}), {}, "is more than 200 directories deep"),
    "link": (lambda job: (job / "data").symlink_to("../data"), {}, OUTSIDE),
    "owner": (_not_ours, {}, "git can't read {job}: fatal: detected dubious ownership in repository at"),
    "damaged": (_without_its_repository, {}, "git can't read {job}: fatal: not a git repository"),
    "moved": (_moved, {}, "git can't read {job}: fatal: not a git repository: "),
    "submodule without .git": (
        lambda job: _submodule(job, _without_its_repository),
        {},
        "{job}/mod is a submodule with files, but without .git; run `git submodule update --init`, or",
    ),
    "moved submodule": (
        lambda job: _submodule(job, _moved),
        {},
        "git can't read {job}/mod: fatal: not a git repository: ",
    ),
    "pattern": (lambda job: None, {"sync": {"exclude": ["!"]}}, PATTERN),
    "range": (lambda job: None, {"sync": {"exclude": ["[z-a]"]}}, f"{PATTERN} sync.exclude is invalid: "),
    "run": (lambda job: write(job, {A_RUN: ""}), {"script": A_RUN}, "0a1b2c3d looks like a run dir"),
    "logs": (
        lambda job: write(job, {"o/a.py": ""}),
        {"script": "o/a.py", "logs": {"dir": "o"}},
        "in logs.dir",
    ),
    "program": (lambda job: None, {"script": "nonesuch.py"}, "{job}/nonesuch.py does not exist"),
    "ignored": (lambda job: write(job, {"a.pt": ""}), {"script": "a.pt"}, "list it in sync.include"),
}


@pytest.mark.parametrize("what", WRONG)
def test_says_what_can_not_be_brought(job: Path, what: str) -> None:
    change, keys, words = WRONG[what]
    change(job)
    assert words.format(job=job) in refused(job, **keys)


def when_read(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], Any]) -> None:
    """Do something whenever a file of this name is about to be read; nothing more after it returns True."""
    opened, done = os.open, list[Any]()

    def opening(path: Any, *words: Any, **keys: Any) -> int:
        if os.path.basename(path) == name and True not in done:
            done.append(act())
        return opened(path, *words, **keys)

    monkeypatch.setattr(os, "open", opening)


def test_all_files_are_from_the_same_commit_although_another_is_checked_out_meanwhile(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(job, {"a.py": "1", "b.py": "1", "gone.py": ""})
    commit(job)
    (job / "gone.py").unlink()
    write(job, {"a.py": "2", "b.py": "2", "new.py": ""})
    commit(job)
    git(job, "branch", "new")
    git(job, "checkout", "-q", "HEAD~1")
    when_read(monkeypatch, "b.py", lambda: git(job, "checkout", "-q", "new"))
    _, tree, entries = snapshot.take(spec_of(job))
    found = {each.path: each.content for each in entries}
    assert found["a.py"] == found["b.py"] == digest_of(b"2")
    assert sorted(found) == [".gitignore", "a.py", "b.py", "new.py", "train.py"]
    assert tree.commit == completed([*GIT, "rev-parse", "new"], cwd=job).stdout.strip()
    assert not tree.dirty


def test_a_file_that_always_changes_is_an_error_if_git_tracks_it(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = job / "log"
    log.touch()
    when_read(monkeypatch, "log", lambda: log.write_text(log.read_text() + "line\n"))
    assert taken(job)["log"].size > 0  # a log that is being written
    commit(job)
    words = "keeps changing while it is being read; try again, or leave it out with sync.exclude"
    assert refused(job).startswith(f"{log} {words}")


def test_a_file_that_becomes_executable_meanwhile_is_a_program(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["chmod", "755", str(job / "train.py")]
    when_read(monkeypatch, "train.py", lambda: subprocess.run(argv, check=True).returncode == 0)
    assert taken(job)["train.py"].kind == PROGRAM


def test_the_recorded_changes_are_those_of_the_snapshot(job: Path, tmp_path: Path) -> None:
    write(job, {"train.py": "print(2)\n"})
    _, tree, _ = snapshot.take(spec_of(job))
    write(job, {"train.py": "print(3)\n"})
    with closing(RunDirectory(str(tmp_path), "run")) as directory:
        snapshot.record(tree, directory, "run").release()
    assert "+print(2)" in (tmp_path / "run/code.diff").read_text()


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT])
def test_names_a_file_that_can_not_be_read(job: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:  # root may read everything, and nobody can say when a file is deleted
        raise OSError(number, os.strerror(number), str(job / "train.py"))

    when_read(monkeypatch, "train.py", refuse)
    assert refused(job) == f"can't save the code for the nodes: {job}/train.py: {os.strerror(number)}"


ORDINARY = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
"""Root can read everything; this command removes that ability."""


@pytest.mark.parametrize("in_git", [True, False])
def test_a_directory_that_can_not_be_read_is_an_error(job: Path, in_git: bool) -> None:
    spec_of(job)
    argv = [*(() if os.geteuid() else ORDINARY), *distlaunch_argv("dry-run", "job.yaml")]
    write(job, {"secret/x": "", "ignored.pt/x": ""})
    if not in_git:
        shutil.rmtree(job / ".git")
        write(job, {".distlaunchignore": "ignored.pt/\n"})
    for name in ("secret", "ignored.pt"):
        (job / name).chmod(0)
    done = completed(argv, cwd=job, status=1)
    words = f"git can't read {job}: warning: could not open directory 'secret/'"
    words = words if in_git else f"can't read {job}/secret/"
    assert f"{words}: Permission denied; make it readable, or " in done.stderr
    (job / "secret").chmod(0o700)
    completed(argv, cwd=job, status=0)


def test_a_file_that_grows_is_brought_as_it_was_at_some_moment_or_is_an_error(job: Path) -> None:
    stop, lines = threading.Event(), b"".join(b"%d\n" % number for number in range(1_000_000))

    def grow() -> None:
        with (job / "log").open("wb", buffering=0) as log:
            at = 0
            while not stop.is_set() and at < len(lines):
                at += log.write(lines[at : at + 10_000])

    with ThreadPoolExecutor(1) as threads:
        threads.submit(grow)
        try:
            found = taken(job)["log"] if (job / "log").exists() else None
            assert found is None or digest_of(lines[: found.size]) == found.content
        except DistlaunchError as error:
            words = "keeps changing while it is being read; try again, or leave it out with sync.exclude"
            assert str(error).startswith(f"{job}/log {words}")
        finally:
            stop.set()


def test_a_full_disk_here_is_told_with_its_place(job: Path) -> None:
    taken(job)
    write(job, {"new.py": "print(2)\n"})
    spec = spec_of(job)
    told = "^can't save the code for the nodes: ~/.cache/distlaunch/sync: File too large$"
    with longest_file(4), pytest.raises(DistlaunchError, match=told):
        snapshot.take(spec)
    assert os.listdir(job.parent / "home/.cache/distlaunch/sync/new") == []


def sender(job: Path, name: str) -> Callable[[], bytes]:
    """What sends the content of a file."""
    entries = sorted(taken(job).values())
    manifest, number = digest_of(manifest_text(entries)), [each.path for each in entries].index(name)
    return lambda: zlib.decompress(b"".join(snapshot.contents(manifest, [number])))


def test_a_content_that_was_changed_here_is_not_sent_and_is_replaced_by_the_next_snapshot(job: Path) -> None:
    path, sent = Path(snapshot.local_store().path_of(taken(job)["train.py"])), sender(job, "train.py")
    assert sent() == b"print(1)\n"
    path.chmod(0o600)
    path.write_bytes(b"print(2)\n")
    with pytest.raises(DistlaunchError, match=f"{path} was changed; to replace it, start the job again"):
        sent()
    taken(job)
    assert path.read_bytes() == b"print(1)\n"


def test_the_code_is_kept_although_another_run_tidies_the_store_at_this_moment(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the new file of the run for one that a killed agent has left."""

    def overtaken(fd: int, how: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.endswith(".origin.tree") and not removed:
            removed.append(path)
            os.unlink(path)
        flock(fd, how)

    flock, removed = fcntl.flock, list[str]()
    _, tree, _ = snapshot.take(spec_of(job))
    monkeypatch.setattr(fcntl, "flock", overtaken)
    with closing(RunDirectory(str(tmp_path), "run")) as directory:
        store = snapshot.record(tree, directory, "run")
    assert os.path.exists(removed[0])
    store.release()


def test_contents_that_another_run_has_removed_are_an_error_with_advice(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(job, {"large": "x" * 5000})
    sent, other = sender(job, "large"), snapshot.local_store()
    monkeypatch.setattr(tree, "MAX_STORE", 4000)
    for wait_s in other.hold("other.origin"):
        pytest.fail(f"waits {wait_s} s")
    other.grown = True
    other.release()
    with pytest.raises(DistlaunchError, match="on this machine no longer has the code; start the job again"):
        sent()


def test_only_files_are_sent(job: Path) -> None:
    write(job, {"etc/passwd": "", "a/b": ""})
    (job / "a/link").symlink_to("../etc/passwd")
    with pytest.raises(DistlaunchError, match="a/link: a symlink has no content"):
        sender(job, "a/link")()


def test_untracked_files_are_changes_if_they_are_copied(job: Path) -> None:
    def dirty(**sync: Any) -> bool:
        return snapshot.take(spec_of(job, sync=sync or True))[1].dirty

    write(job, {"left.pt": ""})
    assert not dirty()
    assert dirty(include=["left.pt"])
    write(job, {"new.py": ""})
    assert dirty()
    assert not dirty(exclude=["new.py"])
    (job / "new.py").unlink()
    write(job, {"inner/x.py": ""})
    git(job / "inner", "init", "-q")
    commit(job / "inner")
    assert dirty()


def test_checked_out_code_has_the_modes_that_new_files_have(job: Path) -> None:
    write(job, {"run.sh": "", "exp/key": ""})
    (job / "run.sh").chmod(0o755)
    spec_of(job, procs_per_node=1)
    distlaunch("run", "job.yaml", cwd=job, status=0)
    (run,) = (job / "runs").iterdir()
    distlaunch("checkout", run.name, str(job.parent / "private"), cwd=job, status=0, umask=0o077)
    distlaunch("checkout", run.name, str(job.parent / "shared"), cwd=job, status=0, umask=0o002)
    modes = {
        f"{at}/{name}": (job.parent / at / name).stat().st_mode & 0o777
        for at in ("private", "shared")
        for name in ("run.sh", "exp/key")
    }
    path = Path(snapshot.local_store().path_of(Entry("", "file", 0, digest_of(b""))))
    path.chmod(0o600)
    path.write_text("changed")
    done = distlaunch("checkout", run.name, str(job.parent / "other"), cwd=job, status=1)
    assert f"was changed, so {job.parent}/other lacks exp/key; if plan.json" in done.stderr
    assert modes == {
        "private/run.sh": 0o700,
        "private/exp/key": 0o600,
        "shared/run.sh": 0o775,
        "shared/exp/key": 0o664,
    }


def test_git_does_not_lock_the_index(job: Path) -> None:
    (job / ".git/index.lock").touch()
    os.utime(job / "train.py")
    assert names(job) == ["train.py"]
    completed(["git", "status"], cwd=job, status=0)


def test_git_can_apply_the_recorded_changes_whatever_its_settings_are(job: Path) -> None:
    settings = "[color]\nui = always\n[diff]\nnoprefix = true\nexternal = echo\n"
    write(job.parent, {"home/.gitconfig": settings, "job/train.py": "print(2)\n"})
    spec_of(job, procs_per_node=1)
    distlaunch("run", "job.yaml", cwd=job, status=0)
    (diff,) = (job / "runs").glob("*/code.diff")
    git(job, "apply", "--check", "--reverse", diff)


def test_why_names_the_files_that_have_changed_since_the_last_good_run(job: Path) -> None:
    spec_of(job, procs_per_node=1)
    distlaunch("run", "job.yaml", cwd=job, status=0)
    write(job, {"train.py": "raise ValueError", "new.py": ""})
    distlaunch("run", "job.yaml", cwd=job, status=1)
    assert "code: 2 files → 3 files (new.py, train.py differ)" in distlaunch("why", cwd=job, status=0).stdout
    for path in (job / "runs").glob("*/code.json"):
        path.write_text("[[1], 2]")
    assert "changed)" not in distlaunch("why", cwd=job, status=0).stdout


def test_a_setup_that_takes_too_long_ends_the_job_and_leaves_no_environment(
    job: Path, tmp_path: Path
) -> None:
    """With the status of time limits."""
    spec_of(job, setup={"run": "sleep 1000"}, timeouts={"setup": "1s"})
    done = distlaunch("run", "job.yaml", cwd=job, status=124)
    assert "not finished within 1 s (timeouts.setup)" in done.stderr
    (lock,) = (tmp_path / "home/.cache/distlaunch/sync/envs").iterdir()
    assert lock.suffix == ".lock"


def test_all_output_of_a_setup_is_kept_however_long_its_lines_are(job: Path) -> None:
    """A frame, and the text in an event, have limits."""
    size = 2 * MAX_REPORT
    (job / "long").write_text("€" * size)
    spec_of(job, setup={"run": "seq 20000; head -c 1 /dev/zero; sleep 0.5; cat long; echo end; exit 3"})
    done = distlaunch("run", "job.yaml", cwd=job, status=1)
    assert "setup.run ended with status 3; all output is in setup-node0.log" in done.stderr
    [log] = job.glob("runs/*/setup-node0.log")
    lines = "\n".join(map(str, range(1, 20001)))
    assert f"\n{lines}\n\0{'€' * size}end\n" in log.read_text()


FILLS = 'mkdir -p "$5/bin"\nprintf "#!/bin/sh\\necho {}\\n" > "$5/bin/python"\nchmod +x "$5/bin/python"\n'
"""Commands of a stand-in for uv or conda. Its environment's Python prints no versions."""


def test_the_python_of_an_environment_may_be_in_the_home(job: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    program(tmp_path / "home/python", f'exec {sys.executable} "$@"')
    program(tmp_path / "uv", f'[ "$1" = pip ] && exit\n"$4" -c pass || exit\n{FILLS}')
    write(job, {"requirements.txt": ""})
    spec_of(job, setup="uv", python="~/python", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert "] {}\n" in distlaunch("run", "job.yaml", cwd=job, status=0).stdout


def test_a_command_is_found_in_the_environment(job: Path, tmp_path: Path) -> None:
    echo = "printf '#!/bin/sh\\necho runs in $VIRTUAL_ENV\\n' > $5/bin/tool; chmod +x $5/bin/tool"
    program(tmp_path / "conda", f"{FILLS}\n{echo}")
    program(tmp_path / "tool", "echo wrong")
    write(job, {"environment.yml": ""})
    keys = {"command": ["tool"], "gpus_per_node": 0, "sync": True, "setup": "conda"}
    (job / "job.yaml").write_text(json.dumps(keys | {"env": {"PATH": f"{tmp_path}:{os.environ['PATH']}"}}))
    done = distlaunch("run", "job.yaml", cwd=job, status=0)
    assert f"] runs in {tmp_path}/home/.cache/distlaunch/sync/envs/" in done.stdout


def test_what_a_setup_leaves_running_is_ended_and_not_waited_for(job: Path, tmp_path: Path) -> None:
    program(tmp_path / "conda", f"{FILLS}\nsleep 1000 & echo $! >{tmp_path}/left")
    write(job, {"environment.yml": ""})
    keys = {"command": ["true"], "gpus_per_node": 0, "sync": True, "setup": "conda"}
    (job / "job.yaml").write_text(json.dumps(keys | {"env": {"PATH": f"{tmp_path}:{os.environ['PATH']}"}}))
    distlaunch("run", "job.yaml", cwd=job, status=0)
    wait_gone([int((tmp_path / "left").read_text())], PATIENCE_S)


def test_files_that_take_long_to_remove_do_not_hold_up_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "rm", "exec sleep 1000")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("distlaunch.agent.setup.REMOVE_S", 0.1)
    Environment(str(tmp_path), Setup("run", "true", (), ".", "", {}, 60.0)).stop()


def test_a_builder_that_has_just_been_forked_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    monkeypatch.setattr(os, "setsid", lambda: os._exit(len(os.read(read, 1))))
    poller = Poller()
    environment = Environment(str(tmp_path), Setup("run", "true", (), ".", "", {}, 60.0))
    environment.build(poller, lambda text: None, lambda: None)
    with ThreadPoolExecutor(1) as threads:
        try:
            threads.submit(environment.stop).result(timeout=PATIENCE_S / 10)
        finally:
            os.write(write, b"x")
    os.close(read)
    os.close(write)
    while environment.builder:
        poller.turn()


BACKEND = """
import zipfile

def build_wheel(directory, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(directory + "/mylib-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in (("METADATA", "Metadata-Version: 2.1\\nName: mylib\\nVersion: 1.0\\n"),
                           ("WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n"), ("RECORD", "")):
            wheel.writestr("mylib-1.0.dist-info/" + name, text)
    return "mylib-1.0-py3-none-any.whl"

build_editable = build_wheel
"""
"""A build backend that needs no other packages."""
FINDS = """
from importlib.metadata import distributions
print("mylib:", any(each.metadata["Name"] == "mylib" for each in distributions()))
"""
MYLIB = """
[project]
name = "mylib"
version = "1.0"
requires-python = ">=3.8"
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


def with_uv() -> dict[str, str]:
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return {"PATH": path, "UV_OFFLINE": "1", "UV_PYTHON_DOWNLOADS": "never"}


@pytest.mark.parametrize(
    ("requirement", "setup", "advice"),
    [
        (".", "uv", "remove it from requirements.txt, and set PYTHONPATH"),
        ("-e .", "uv", "remove it from requirements.txt, and set PYTHONPATH"),
        ("-e .", {"run": "pip install --no-index -r requirements.txt", "key": ["backend.py"]}, "without -e"),
        (".", {"run": "pip install --no-index ."}, "list in setup.key the files"),
        ("mylib @ file://{job}", {"from": "controller"}, "requirements.txt contains /"),
        ("-e .", {"from": "controller"}, "requirements.txt contains ., whose code may change"),
    ],
)
def test_code_that_later_runs_would_import_is_not_installed(
    job: Path, requirement: str, setup: Any, advice: str
) -> None:
    write(job, {"backend.py": BACKEND, "pyproject.toml": MYLIB})
    write(job, {"requirements.txt": "# -e .\n-r more.txt\n", "more.txt": requirement.format(job=job)})
    spec_of(job, setup=setup, env=with_uv())
    assert advice in distlaunch("run", "job.yaml", cwd=job, status=1).stderr


def test_code_may_be_installed_if_its_files_are_in_the_key(job: Path) -> None:
    write(job, {"backend.py": BACKEND, "pyproject.toml": MYLIB})
    spec_of(job, setup={"run": "pip install --no-index .", "key": ["pyproject.toml", "backend.py"]})
    distlaunch("run", "job.yaml", cwd=job, status=0)


def test_packages_of_a_workspace_are_not_installed(job: Path) -> None:
    """They would be imported from the copy of the code of the run that builds the environment."""
    write(job, {"libs/mylib/backend.py": BACKEND, "libs/mylib/pyproject.toml": MYLIB})
    sources = "[tool.uv.sources]\nmylib = {workspace = true}\n[tool.uv.workspace]\nmembers = ['libs/mylib']\n"
    project = MYLIB.partition("[build")[0].replace("mylib", "app") + "dependencies = ['mylib']\n"
    write(job, {"pyproject.toml": project + sources, "train.py": FINDS})
    completed(["uv", "lock"], 0, cwd=job, env={**os.environ, **with_uv()})
    spec_of(job, setup="uv", env=with_uv())
    assert "] mylib: False\n" in distlaunch("run", "job.yaml", cwd=job, status=0).stdout


def test_packages_from_this_machine_are_those_of_one_workdir(job: Path) -> None:
    write(job, {"requirements.txt": "nonesuch", "other/train.py": "", "other/requirements.txt": ""})
    nodes = [{"host": "a"}, {"host": "b", "workdir": "other"}]
    with pytest.raises(DistlaunchError, match=r":1:\d+: nodes\[1\].workdir: from: controller gets the"):
        snapshot.with_tree(spec_of(job, setup={"from": "controller"}, nodes=nodes))


def _python_is(directory: Path, name: str) -> None:
    program(directory / name, f'exec {sys.executable} "$@"')
    (directory / "python").unlink(missing_ok=True)
    (directory / "python").symlink_to(name)


@pytest.mark.parametrize(
    ("node", "change"),
    [
        pytest.param({"env": {"PIP_INDEX_URL": "http://b"}}, lambda job: None, id="variable"),
        pytest.param({}, lambda job: write(job, {"more/limits.txt": "numpy<2"}), id="included file"),
        pytest.param(
            {"workdir": "other"}, lambda job: write(job, {"other/environment.yml": "b"}), id="workdir"
        ),
        pytest.param({"python": sys.executable}, lambda job: None, id="python"),
        pytest.param({}, lambda job: _python_is(job.parent, "second"), id="python behind a symlink"),
    ],
)
def test_an_environment_is_built_again_for_other_packages_or_another_python(
    job: Path, tmp_path: Path, node: dict[str, Any], change: Callable[[Path], Any]
) -> None:
    """Also if a node has other settings than the job."""
    program(tmp_path / "conda", FILLS)
    _python_is(tmp_path, "first")
    included = {"base.txt": "-c more/limits.txt\n", "more/limits.txt": "numpy<1"}
    write(job, included | {"environment.yml": "- pip:\n  - -r base.txt", "other/environment.yml": "a"})
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PIP_INDEX_URL": "http://a"}
    keys = {"script": str(job / "train.py"), "setup": "conda", "python": str(tmp_path / "python"), "env": env}

    def builds(**node: Any) -> int:
        spec_of(job, **keys, nodes=[{"host": "localhost", **node}])
        return distlaunch("run", "job.yaml", cwd=job, status=0).stderr.count(": + conda env create ")

    first = {"workdir": node["workdir"]} if "workdir" in node else {}
    assert [builds(**first), builds(**first)] == [1, 0]
    change(job)
    assert builds(**node) == 1


def test_an_environment_is_built_again_if_a_variable_changes_that_its_command_mentions() -> None:
    run = ("run", "make CUDA=$CUDA")
    assert key_of(run, "/py", {"CUDA": "11"}, ()) != key_of(run, "/py", {"CUDA": "12"}, ())
    assert key_of(run, "/py", {"LR": "1"}, ()) == key_of(run, "/py", {"LR": "2"}, ())
    keys = {key_of((), "/py", {"LR": number}, [b"tiny==${LR}"]) for number in "12"}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("-c 'a b.txt'", "a b.txt"),
        ("-c a\\ b.txt", "a b.txt"),
        ("-r ${WHERE}/c.txt", "sub/c.txt"),
        ("--requirement=sub/c.txt # all", "sub/c.txt"),
    ],
)
def test_finds_the_files_that_a_list_of_packages_includes(line: str, name: str, tmp_path: Path) -> None:
    write(tmp_path, {"requirements.txt": f"{line}\n", name: "tiny"})
    found = read_lists(str(tmp_path), ["requirements.txt"], {"WHERE": "sub"})
    assert found == {"requirements.txt": f"{line}\n".encode(), name: b"tiny"}


def test_an_environment_whose_torch_can_not_be_imported_is_an_error(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell script stands in for conda: its environment's Python only prints and fails."""
    python = "printf '#!/bin/sh\\necho no libcudart >&2; exit 3\\n' > \"$5/bin/python\""
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin/conda", f'mkdir -p "$5/bin"\n{python}\nchmod +x "$5/bin/python"\n')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    write(job, {"environment.yml": ""})
    spec_of(job, setup="conda")
    done = distlaunch("run", "job.yaml", cwd=job, status=1)
    assert re.search("\n.*no libcudart\n.*`import torch` in the new env.* ended with status 3", done.stderr)


def test_a_command_that_builds_an_environment_is_not_printed(job: Path) -> None:
    """It may contain a secret."""
    spec_of(job, setup={"run": "false --token canary || exit 3"})
    done = distlaunch("run", "job.yaml", cwd=job, status=1)
    assert "setup.run ended with status 3" in done.stderr
    files = [path for path in (job / "runs").rglob("*") if path.is_file()]
    assert files and not [path for path in files if b"canary" in path.read_bytes()]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("kill -9 $PPID", "the process that was building it was killed"),
        ("kill -9 $$", "was killed by signal 9"),
    ],
)
def test_a_process_killed_while_it_builds_an_environment_is_named(
    job: Path, command: str, words: str
) -> None:
    spec_of(job, setup={"run": command})
    assert f"{words}; all output" in distlaunch("run", "job.yaml", cwd=job, status=1).stderr


def test_check_finds_a_missing_package_although_the_code_is_not_on_the_node_yet(job: Path) -> None:
    spec_of(job)
    write(job, {"train.py": "import not_installed, helper", "helper.py": ""})
    done = distlaunch("check", "job.yaml", cwd=job, status=1)
    assert "lacks not_installed " in " ".join(done.stdout.split())


def test_check_refuses_what_run_would_refuse(job: Path) -> None:
    spec_of(job, setup="uv")
    write(job, {".python-version": "3.12"})
    words = "has none of uv.lock, requirements.txt, pyproject.toml: create one there, set workdir to"
    assert words in distlaunch("check", "job.yaml", cwd=job, status=2).stderr
    write(job, {"requirements.txt": ""})
    done = distlaunch("check", "job.yaml", cwd=job)
    assert "packages of the environment that setup builds when the job starts" in done.stdout


def test_nodes_install_packages_from_this_machine(job: Path, tmp_path: Path) -> None:
    name = tmp_path / "only_here" / "tiny-1.0-py3-none-any.whl"
    name.parent.mkdir()
    with zipfile.ZipFile(name, "w") as wheel:
        wheel.writestr("tiny.py", "ANSWER = 41\n")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    keys = {"gpus_per_node": 0, "script": "train.py", "sync": True, "setup": {"from": "controller"}}
    (job / "job.yaml").write_text(json.dumps(keys | {"nodes": 2}))
    (job / "train.py").write_text("import sys, tiny\nprint(tiny.ANSWER, sys.prefix != sys.base_prefix)\n")
    (job / "requirements.txt").write_text(f"--no-index\n--find-links {name.parent}\ntiny\n")
    for times in (1, 0):  # the second run has both the package and the environment
        done = distlaunch("run", str(job / "job.yaml"))
        assert done.stdout.count("] 41 True\n") == 2
        assert done.stderr.count("+ pip wheel ") == times
        # Both nodes share this home, and either may come first. Only the first node's output is shown.
        logs = "".join(path.read_text() for path in (job / "runs").glob("*/setup-node*.log"))
        assert logs.count("+ pip install ") == 1
        name.unlink(missing_ok=True)
    (job / "requirements.txt").write_text("--no-index\nnonesuch\n")
    done = distlaunch("run", str(job / "job.yaml"), status=1)
    assert re.search(r"\ndistlaunch: pip wheel .* ended with status 1\n", done.stderr)
    assert len([*(tmp_path / "home/.cache/distlaunch/sync/wheels").iterdir()]) == 1  # no half
