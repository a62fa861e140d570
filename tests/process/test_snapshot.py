"""Which files a job brings to its nodes, with git, without it, and with odd files in its directory."""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from distlaunch.agent.tree import LINK, PROGRAM, Entry, digest_of, manifest_text
from distlaunch.cli.job_file import load_job
from distlaunch.errors import DistlaunchError
from distlaunch.launch import snapshot
from tests.harness import completed, distlaunch
from tests.unit.samples import longest_file

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "protocol.file.allow=always"]
SCRIPT = {"train.py": "print(1)\n"}


def git(directory: Path, *words: str | Path) -> None:
    completed([*GIT, *words], cwd=directory, status=0)


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
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", "first")
    return directory


def taken(directory: Path, **keys: Any) -> dict[str, Entry]:
    """The files of the snapshot, of which each is in the store."""
    job = {"gpus_per_node": 0, "script": "train.py", "sync": True} | keys
    (directory / "job.yaml").write_text(json.dumps(job))
    entries = snapshot.take(load_job(str(directory / "job.yaml"), (), ()))[1]
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


def _a_directory_in_place_of_a_file(job: Path) -> None:
    write(job, {"was/file": "", "is": ""})
    git(job, "add", "-A")
    shutil.rmtree(job / "was")
    (job / "is").unlink()
    write(job, {"was": "", "is/file": ""})


def _another_repository(job: Path) -> Path:
    write(job.parent / "other", {"sub.py": "", "more/x.py": "", "left.pt": "", ".gitignore": "*.pt\n"})
    git(job.parent / "other", "init", "-q")
    git(job.parent / "other", "add", "-A")
    git(job.parent / "other", "commit", "-qm", "first")
    return job.parent / "other"


def _a_submodule(job: Path) -> None:
    git(job, "submodule", "add", "-q", _another_repository(job), "mod")
    write(job, {"mod/new.py": ""})


def _a_submodule_that_is_not_checked_out(job: Path) -> None:
    _a_submodule(job)
    git(job, "submodule", "--quiet", "deinit", "-f", "mod")


def _a_repository_inside(job: Path) -> None:
    _another_repository(job).rename(job / "inner")


def _special_files(job: Path) -> None:
    write(job, {"pipe": "", "b": ""})
    git(job, "add", "pipe")
    (job / "pipe").unlink()
    os.mkfifo(job / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(job / "socket"))


def _odd_names(job: Path) -> None:
    write(
        job,
        {"a\nb": "", 'it\'s "$(x)"': "", os.fsdecode(b"\xff"): "", "é": "", "e\u0301": "", " ": "", "#": ""},
    )


def _runs(job: Path) -> None:
    write(job, {"runs/train-1/plan.json": "", "lib/runs/x.py": ""})
    run = "train-20261126-010203-0123abcd"
    write(job, {f"{run}.{kind}": "" for kind in ("html", "tar.gz")})
    write(job, {f"lib/runs/{run}/plan.json": ""})


FOUND: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "changes": (_changed, ["a/b/c.py", "new.py"]),
    "files and directories in each other's place": (_a_directory_in_place_of_a_file, ["is/file", "was"]),
    "a submodule": (_a_submodule, ["mod/.gitignore", "mod/more/x.py", "mod/new.py", "mod/sub.py"]),
    "no submodule": (_a_submodule_that_is_not_checked_out, []),
    "a repository inside": (_a_repository_inside, ["inner/.gitignore", "inner/more/x.py", "inner/sub.py"]),
    "special files": (_special_files, ["b"]),
    "odd names": (_odd_names, ["a\nb", 'it\'s "$(x)"', "\udcff", "é", "e\u0301", " ", "#"]),
    "runs": (_runs, ["lib/runs/x.py"]),
}


@pytest.mark.parametrize(("change", "found"), FOUND.values(), ids=FOUND)
def test_brings_what_git_does_not_ignore(job: Path, change: Callable[[Path], Any], found: list[str]) -> None:
    change(job)
    assert names(job) == sorted([*SCRIPT, *found])


def test_brings_the_repository_of_a_worktree_and_of_a_job_in_a_subdirectory(job: Path) -> None:
    write(job, {"exp/train.py": ""})
    git(job, "add", "-A")
    git(job, "commit", "-qm", "second")
    git(job, "worktree", "add", "-q", job.parent / "tree")
    write(job, {"later.py": ""})
    assert names(job.parent / "tree/exp") == ["exp/job.yaml", "exp/train.py", "train.py"]
    assert names(job.parent / "tree") == ["exp/job.yaml", "exp/train.py", "train.py"]


def test_without_git_brings_all_but_what_is_made_again(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(job, {"lib/x.py": "", "lib/__pycache__/x.pyc": "", ".venv/bin/python": "", "model.pt": ""})
    (job / "link").symlink_to("lib")
    found = [".gitignore", "job.yaml", "lib/x.py", "link", "model.pt", "train.py"]
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(job))
        assert sorted(taken(job)) == found
    shutil.rmtree(job / ".git")
    assert sorted(taken(job)) == found


def test_a_symlink_replaces_the_files_of_a_tracked_directory(job: Path) -> None:
    write(job, {"old/x.py": ""})
    git(job, "add", "old")
    (job / "old").rename(job / "new")
    (job / "old").symlink_to("new")
    assert names(job) == ["new/x.py", "old", "train.py"]


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
    "no UTF-8": ("\udcff\n*.bin\n", {}, ["lib/a.py"]),
}


@pytest.mark.parametrize(("ignored", "sync", "found"), CHOSEN.values(), ids=CHOSEN)
def test_patterns_choose_files(job: Path, ignored: str, sync: dict[str, Any], found: list[str]) -> None:
    write(job, {"big.pt": "", "sub/x.pt": "", "lib/a.py": "", "data/a.bin": "", "data/b.bin": ""})
    write(job, {".distlaunchignore": os.fsencode(ignored)})
    assert names(job, sync=sync or True) == sorted([".distlaunchignore", "train.py", *found])


def test_a_program_keeps_its_bit_and_a_link_its_target(job: Path) -> None:
    write(job, {"run.sh": "", "empty": ""})
    (job / "run.sh").chmod(0o755)
    (job / "link").symlink_to("lib/../train.py"[7:])
    found = taken(job)
    assert found["run.sh"].kind == PROGRAM and found["train.py"].kind == "file"
    assert found["link"] == Entry("link", LINK, 0, "train.py")
    assert found["empty"].size == 0


def test_further_files_come_beside_the_job_file(job: Path) -> None:
    write(job.parent, {"conf/a.yaml": "a", "conf/b.yaml": "b", "two/a.yaml": "other"})
    (job.parent / "link.yaml").symlink_to("conf/b.yaml")
    write(job, {"exp/train.py": ""})
    found = taken(job / "exp", files=["../../conf/a.yaml", "../../link.yaml", "train.py"])
    assert found["exp/a.yaml"].content == digest_of(b"a")
    assert found["exp/link.yaml"] == Entry("exp/link.yaml", "file", 1, digest_of(b"b"))
    both = refused(job, files=["../conf/a.yaml", "../two/a.yaml"])
    assert both.endswith(
        f"files: {job.parent}/two/a.yaml and {job.parent}/conf/a.yaml would both be a.yaml on the nodes"
        "; rename one"
    )
    write(job.parent, {"conf/train.py": ""})
    assert "would both be train.py" in refused(job, files=["../conf/train.py"])
    assert "conf is not a file" in refused(job, files=["../conf"])


def test_runs_are_left_out_behind_symlinks_too(job: Path) -> None:
    write(job, {"out/train-1/plan.json": ""})
    (job.parent / "shown").symlink_to(job)
    assert names(job, logs={"dir": str(job.parent / "shown/out")}) == ["train.py"]


def _too_large(job: Path) -> None:
    write(job, {f"{number}.bin": "x" * 1024 * number for number in range(1, 9)})
    with (job / "model.bin").open("wb") as file:
        file.truncate(300 << 20)


def _too_deep(job: Path) -> None:
    write(job, {"d/" * 200 + "x": ""})


def _link_outside(job: Path) -> None:
    (job / "data").symlink_to("../data")


def _not_ours(job: Path) -> None:
    if os.geteuid():
        pytest.skip("root is missing: only root can give files away")
    os.chown(job / ".git", 12345, 12345)
    os.chown(job, 12345, 12345)


WRONG: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "size": (
        _too_large,
        {},
        "more than 256 MiB (sync.limit); its largest files are model.bin (300 MiB), 8.bin (8 KiB), ",
    ),
    "depth": (_too_deep, {}, "is more than 200 directories deep"),
    "link": (
        _link_outside,
        {},
        "{job}/data is a symlink to ../data, outside the code; leave it out with sync.exclude or",
    ),
    "owner": (_not_ours, {}, "git can't read {job}: fatal: detected dubious ownership in repository at"),
    "pattern": (
        lambda job: None,
        {"sync": {"exclude": ["!"]}},
        "sync: a pattern in .distlaunchignore, sync.include or",
    ),
    "program": (lambda job: None, {"script": "nonesuch.py"}, "{job}/nonesuch.py does not exist"),
    "ignored": (lambda job: write(job, {"a.pt": ""}), {"script": "a.pt"}, "list it in sync.include"),
}


@pytest.mark.parametrize(("change", "keys", "words"), WRONG.values(), ids=WRONG)
def test_says_what_can_not_be_brought(
    job: Path, change: Callable[[Path], Any], keys: dict[str, Any], words: str
) -> None:
    change(job)
    assert words.format(job=job) in refused(job, **keys)


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), FileNotFoundError(2, "No such file")]
)
def test_a_file_that_can_not_be_read_is_named(
    job: Path, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open  # root may read everything, and nobody can say when a file is deleted

    def refuse(path: Any, *words: Any, **keys: Any) -> int:
        if str(path).endswith("train.py"):
            error.filename = path
            raise error
        return opened(path, *words, **keys)

    monkeypatch.setattr(os, "open", refuse)
    words = f"can't save the code for the nodes: {job}/train.py: {error.strerror}"
    assert refused(job) == words


def test_a_file_that_grows_is_brought_as_it_was_at_some_moment_or_is_an_error(job: Path) -> None:
    stop, lines = threading.Event(), b"".join(b"%d\n" % number for number in range(1_000_000))

    def grow() -> None:
        with (job / "log").open("wb", buffering=0) as log:
            at = 0
            while not stop.is_set() and at < len(lines):
                at += log.write(lines[at : at + 10_000])

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        found = taken(job)["log"] if (job / "log").exists() else None
        assert found is None or digest_of(lines[: found.size]) == found.content
    except DistlaunchError as error:
        assert str(error).startswith(
            f"{job}/log keeps changing while it is being read; leave it out with sync.exclude"
        )
    finally:
        stop.set()
        writer.join()


def test_a_full_disk_here_is_told_with_its_place(job: Path) -> None:
    taken(job)
    write(job, {"new.py": "print(2)\n"})
    spec = load_job(str(job / "job.yaml"), (), ())
    with longest_file(4), pytest.raises(DistlaunchError) as caught:
        snapshot.take(spec)
    text = str(caught.value)
    assert text == "can't save the code for the nodes: ~/.cache/distlaunch/sync: File too large"
    assert os.listdir(job.parent / "home/.cache/distlaunch/sync/new") == []


def test_a_content_that_was_changed_here_is_not_sent_and_is_replaced_by_the_next_snapshot(job: Path) -> None:
    entries = sorted(taken(job).values())
    manifest = digest_of(manifest_text(entries))
    number = [each.path for each in entries].index("train.py")
    path = Path(snapshot.local_store().path_of(entries[number]))
    assert zlib.decompress(b"".join(snapshot.contents(manifest, [number]))) == b"print(1)\n"
    path.chmod(0o600)
    path.write_bytes(b"print(2)\n")
    with pytest.raises(DistlaunchError, match=f"{path} was changed; to replace it, start the job again"):
        list(snapshot.contents(manifest, [number]))
    taken(job)
    assert path.read_bytes() == b"print(1)\n"


def test_only_files_are_sent(job: Path) -> None:
    write(job, {"etc/passwd": "", "a/b": ""})
    (job / "a/link").symlink_to("../etc/passwd")
    entries = sorted(taken(job).values())
    manifest = digest_of(manifest_text(entries))
    number = [each.path for each in entries].index("a/link")
    with pytest.raises(DistlaunchError, match="a/link: a symlink has no content"):
        list(snapshot.contents(manifest, [number]))


def test_git_does_not_lock_the_index(job: Path) -> None:
    (job / ".git/index.lock").touch()
    os.utime(job / "train.py")
    assert names(job) == ["train.py"]
    assert subprocess.run(["git", "status"], cwd=job, capture_output=True, check=False).returncode == 0


def test_why_names_the_files_that_have_changed_since_the_last_good_run(job: Path) -> None:
    keys = {"gpus_per_node": 0, "procs_per_node": 1, "script": "train.py", "sync": True}
    (job / "job.yaml").write_text(json.dumps(keys))
    distlaunch("run", "job.yaml", cwd=job, status=0)
    write(job, {"train.py": "raise ValueError", "new.py": ""})
    distlaunch("run", "job.yaml", cwd=job, status=1)
    assert "code: 2 files → 3 files (new.py, train.py differ)" in distlaunch("why", cwd=job, status=0).stdout
    for path in (job / "runs").glob("*/code.json"):
        path.write_text("[[1], 2]")
    assert "changed)" not in distlaunch("why", cwd=job, status=0).stdout


def test_a_setup_that_takes_too_long_ends_the_job_with_the_status_of_time_limits(job: Path) -> None:
    keys = {"gpus_per_node": 0, "script": "train.py", "sync": True, "setup": {"run": "sleep 1000"}}
    (job / "job.yaml").write_text(json.dumps(keys | {"timeouts": {"setup": "1s"}}))
    done = distlaunch("run", "job.yaml", cwd=job, status=124)
    assert "not finished within 1 s (timeouts.setup)" in done.stderr


def test_check_refuses_what_run_would_refuse(job: Path) -> None:
    keys = {"gpus_per_node": 0, "script": "train.py", "sync": True, "setup": "uv"}
    (job / "job.yaml").write_text(json.dumps(keys))
    write(job, {".python-version": "3.12"})
    words = "has none of uv.lock, requirements.txt, pyproject.toml: create one or, if it exists, list it in"
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
        assert done.stderr.count(" -m pip wheel ") == done.stderr.count("node0: + pip install ") == times
        name.unlink(missing_ok=True)
    (job / "requirements.txt").write_text("--no-index\nnonesuch\n")
    done = distlaunch("run", str(job / "job.yaml"), status=1)
    assert re.search(r"\ndistlaunch: .* -m pip wheel .* ended with status 1\n", done.stderr)
    assert len([*(tmp_path / "home/.cache/distlaunch/sync/wheels").iterdir()]) == 1  # no half
