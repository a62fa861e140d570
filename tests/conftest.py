"""Checks after every test that nothing is left of it."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import children_of


def _descriptors() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{entry.name} → {os.readlink(entry)}")
        except OSError:
            continue  # the one that reads the folder
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No child, thread or descriptor outlives a test."""
    children, threads, descriptors = set(children_of(os.getpid())), threading.active_count(), _descriptors()
    yield
    assert set(children_of(os.getpid())) <= children, "a child process is left"
    assert threading.active_count() <= threads, "a thread is left"
    left = {entry for entry in _descriptors() - descriptors if "/proc/" not in entry}
    assert not left, "a descriptor is left"
