"""Fixtures: the reference runs of torchrun, shared by all test processes, and a directory with a worker."""

import fcntl
import os
from pathlib import Path

import pytest

from tests.process.commands import SLEEPER
from tests.process.torchruns import Torchruns, ended_reference, run_references, script


@pytest.fixture(scope="session")
def torchruns(tmp_path_factory: pytest.TempPathFactory) -> Torchruns:
    """How torchrun went, by the name of one of `REFERENCES`: whoever asks first runs them all."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "torchruns"
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            place.mkdir()
            run_references(place)
    return lambda name: ended_reference(place, name)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a worker that says its place and waits."""
    script(tmp_path, SLEEPER)
    return tmp_path
