"""The sdist and the wheel: what they contain, and that the installed program knows its version."""

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.harness import ROOT, completed

pytest.importorskip("hatch_vcs", reason="hatch-vcs is not installed")
FILES = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).split()
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")


def checkout(to: Path, tag: str = "") -> Path:
    """A copy of this checkout in a repository of its own: the build writes into it, and asks git for tags."""
    for name in FILES:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_bytes((ROOT / name).read_bytes())
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"], *([["tag", tag]] if tag else [])):
        subprocess.run([*GIT, *words], cwd=to, check=True)
    return to


def built(source: Path, target: str) -> Path:
    """What hatchling makes of a directory of sources: its sdist, or its wheel."""
    completed([sys.executable, "-m", "hatchling", "build", "-t", target], cwd=source, status=0)
    return next((source / "dist").iterdir())


def unpack(archive: Path, place: Path) -> None:
    """Unpack it, also where Python is older than the argument `filter`."""
    with tarfile.open(archive) as opened:
        opened.extraction_filter = lambda member, _: member
        opened.extractall(place)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of version 9.8.7, built of its sdist, as installers do that can't use the wheel."""
    place = tmp_path_factory.mktemp("package")
    unpack(built(checkout(place / "checkout", "v9.8.7"), "sdist"), place)
    return zipfile.ZipFile(built(place / "distlaunch-9.8.7", "wheel"))


def test_the_wheel_contains_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """The version comes with it; `py.typed` is among the files."""
    package = {name for name in FILES if name.startswith("distlaunch/") and (ROOT / name).is_file()}
    names = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    info = {f"distlaunch-9.8.7.dist-info/{name}" for name in names}
    manual = {"distlaunch-9.8.7.data/data/share/man/man1/distlaunch.1"}  # where man looks, next to bin/
    assert set(wheel.namelist()) == package | {"distlaunch/_version.py"} | info | manual
    assert "distlaunch/py.typed" in package


def test_the_metadata_is_complete(wheel: zipfile.ZipFile) -> None:
    told = email.message_from_bytes(wheel.read("distlaunch-9.8.7.dist-info/METADATA"))
    expected = {"Version": "9.8.7", "License-Expression": "Apache-2.0", "Requires-Python": ">=3.10"}
    assert (expected | {"Description-Content-Type": "text/markdown"}).items() <= dict(told.items()).items()
    assert str(told.get_payload()).startswith("# distlaunch")
    classifiers = set(told.get_all("Classifier", []))
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.10"} <= classifiers


def test_the_program_and_its_copies_know_the_version(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """The copies for `--on` and Kubernetes run with nothing else installed."""
    wheel.extractall(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    write = (
        "from distlaunch.cli.own_archive import *; from pathlib import Path;"
        "Path('on.zip').write_bytes(payload()); Path('pod.tar.xz').write_bytes(torchrun_payload())"
    )
    completed([sys.executable, "-c", write], cwd=tmp_path, env=env, status=0)
    zipfile.ZipFile(tmp_path / "on.zip").extractall(tmp_path / "on")
    assert (tmp_path / "on" / "distlaunch/runs/report.css").is_file()
    unpack(tmp_path / "pod.tar.xz", tmp_path / "pod")
    for program in (["-m", "distlaunch"], ["-IS", "on"]):
        done = completed([sys.executable, *program, "--version"], cwd=tmp_path, env=env, status=0)
        assert done.stdout == "distlaunch 9.8.7\n"
    assert (tmp_path / "pod/distlaunch/_version.py").read_text().strip() == "__version__ = '9.8.7'"


def test_a_checkout_without_tags_has_a_version(tmp_path: Path) -> None:
    assert built(checkout(tmp_path), "wheel").name.startswith("distlaunch-0.1.dev1+g")
