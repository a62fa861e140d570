"""A ban on processes in unit tests, and fixtures that load job files or collect their mistakes."""

import os
import subprocess
from pathlib import Path

import pytest

from distlaunch.cli.job_file import load_job
from distlaunch.errors import JobError
from distlaunch.job.spec import JobSpec
from tests.unit.samples import Load, Problems

STARTERS = ("execv", "execve", "fork", "forkpty", "posix_spawn", "posix_spawnp", "system")


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would start a process fails."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a unit test starts a process: that belongs in tests/process")

    for name in STARTERS:
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads a job from text (or bytes) that stands in `tmp_path`/job.yaml."""

    def load_text(text: str | bytes, *overrides: str, extra: tuple[str, ...] = ()) -> JobSpec:
        path = tmp_path / "job.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_job(str(path), overrides, extra)

    return load_text


@pytest.fixture
def problems(load: Load, tmp_path: Path) -> Problems:
    """The problems of a job, one per line, without the file's directory."""

    def refused(text: str | bytes, *overrides: str, extra: tuple[str, ...] = ()) -> list[str]:
        with pytest.raises(JobError) as caught:
            load(text, *overrides, extra=extra)
        return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]

    return refused
