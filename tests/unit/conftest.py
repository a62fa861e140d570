"""No unit test starts a process."""

import os
import subprocess

import pytest

STARTERS = ("execv", "execve", "fork", "forkpty", "posix_spawn", "posix_spawnp", "system")


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would start a process fails."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a unit test starts a process: that belongs in tests/process")

    for name in STARTERS:
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
