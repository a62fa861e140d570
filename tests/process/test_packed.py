"""The modules of a command in one file: used once it is there, never instead of what has changed."""

import marshal
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import PATIENCE_S, ROOT

COMMAND = "ps"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of distlaunch that nobody has started yet."""
    ignored = shutil.ignore_patterns("*.packed")
    return Path(shutil.copytree(ROOT / "distlaunch", tmp_path / "distlaunch", ignore=ignored))


def start(copy: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the copy; Python says on stderr where it has its modules from."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [sys.executable, "-v", "-m", "distlaunch", *words],
        env={**kept, "PYTHONPATH": str(copy.parent), **variables},
        cwd=copy.parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def taken(done: subprocess.CompletedProcess[str]) -> int:
    """How many modules were taken from the file."""
    assert done.returncode == 0, done.stderr
    return done.stderr.count("<distlaunch.packed.Loader object")


def packed(copy: Path) -> list[Path]:
    """The files that there are."""
    return list((copy / "__pycache__").glob("*.packed*"))


def test_the_first_start_writes_what_the_others_use(copy: Path) -> None:
    assert taken(start(copy, COMMAND)) == 0
    (file,) = packed(copy)
    before = file.stat().st_ino
    assert taken(start(copy, COMMAND)) > 50
    assert file.stat().st_ino == before


@pytest.mark.parametrize("times", [None, (1, 1)], ids=["now", "long ago"])
def test_a_module_that_has_changed_is_read_again(copy: Path, times: tuple[int, int] | None) -> None:
    start(copy, COMMAND)
    module = copy / "catalog" / "listing.py"
    module.write_text(module.read_text() + "\nraise SystemExit(77)\n")
    if times:
        os.utime(module, times)
    assert start(copy, COMMAND).returncode == 77


def test_a_package_that_moves_takes_nothing_along(copy: Path) -> None:
    start(copy, COMMAND)
    moved = copy.parent / "elsewhere" / "distlaunch"
    shutil.copytree(copy, moved)
    (moved / "catalog" / "listing.py").write_text("raise SystemExit(78)\n")
    assert start(moved, COMMAND).returncode == 78


OLDER = marshal.dumps({"distlaunch.errors": ("errors.py", 1, 2, compile("", "errors.py", "exec"))})


@pytest.mark.parametrize("junk", [b"", b"junk", b"\xe3\x02", marshal.dumps([]), OLDER])
def test_a_broken_file_is_written_anew(copy: Path, junk: bytes) -> None:
    start(copy, COMMAND)
    (file,) = packed(copy)
    file.write_bytes(junk)
    assert taken(start(copy, COMMAND)) == 0
    assert taken(start(copy, COMMAND)) > 50


def test_where_it_can_not_be_written_all_goes_on(copy: Path) -> None:
    start(copy, COMMAND)
    (file,) = packed(copy)
    file.unlink()
    (file / "in the way").mkdir(parents=True)
    assert taken(start(copy, COMMAND)) == 0
    assert packed(copy) == [file]


def test_nothing_is_written_where_python_writes_nothing(copy: Path) -> None:
    assert taken(start(copy, COMMAND, PYTHONDONTWRITEBYTECODE="1")) == 0
    assert packed(copy) == []


@pytest.mark.parametrize("words", [["nonsense"], ["../x"], ["--version"], []])
def test_what_is_no_command_leaves_no_file(copy: Path, words: list[str]) -> None:
    start(copy, *words)
    assert packed(copy) == []


def test_a_traceback_has_its_lines(copy: Path) -> None:
    module = copy / "catalog" / "listing.py"
    module.write_text(module.read_text() + "\nif 'FAIL' in __import__('os').environ: 1 / 0  # here\n")
    start(copy, COMMAND)
    assert "1 / 0  # here" in start(copy, COMMAND, FAIL="1").stderr


def test_an_agent_that_has_changed_is_shipped_as_it_is_now(copy: Path) -> None:
    job = copy.parent / "job.yaml"
    job.write_text("command: ['true']\ngpus_per_node: 0\n")
    for _ in range(2):
        assert start(copy, "run", str(job)).returncode == 0
    (kept,) = (copy / "links" / "__pycache__").glob("*.packed*")
    before = kept.read_bytes()
    module = copy / "agent" / "serve.py"
    module.write_text(module.read_text() + "\nos._exit(9)\n")
    assert start(copy, "run", str(job)).returncode != 0
    assert kept.read_bytes() != before
    kept.write_bytes(before[:-1])
    assert start(copy, "run", str(job)).returncode != 0


def test_where_the_agents_modules_can_not_be_kept_they_are_not_compiled_each_time(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import builtins, sys; sys.path[0:0] = [sys.argv[1]]\n"
        "from distlaunch.links import bundle\n"
        "bundle.bundle_for(False)\n"  # now there are .pyc files of all
        "made, real = [], compile\n"
        "builtins.compile = lambda *words, **more: made.append(words[1]) or real(*words, **more)\n"
        "bundle.bundle_for.cache_clear()\n"
        "sys.dont_write_bytecode = True\n"
        "__import__('os').unlink(bundle.kept_beside(bundle.__file__, 'agent'))\n"
        "bundle.bundle_for(False)\n"
        "print(*made)"
    )
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(copy)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", code, str(copy.parent)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "distlaunch\n"  # which has no file
