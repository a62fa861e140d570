"""Disks of a test's own: one that can be frozen or fail, one that has little room."""

import contextlib
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import find
from tests.harness import PATIENCE_S


@contextlib.contextmanager
def _mounted(directory: Path, *words: str | Path) -> Iterator[Path]:
    """What is mounted at `directory` by these words of mount; skips where that can't be."""
    if os.geteuid():
        pytest.skip("root is missing: only root can mount a disk")
    directory.mkdir()
    tried = subprocess.run(["mount", *words, directory], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no disk can be mounted: {tried.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True, timeout=PATIENCE_S)


def small_disk(directory: Path, limit: str) -> contextlib.AbstractContextManager[Path]:
    """A filesystem in memory at `directory` that has only so much room."""
    return _mounted(directory, "-t", "tmpfs", "-o", limit, "tmpfs")


@contextlib.contextmanager
def freezable_disk(directory: Path) -> Iterator[Path]:
    """An ext4 at `directory`."""
    makes = find("mkfs.ext4")
    if makes is None or find("fsfreeze") is None:
        pytest.skip("missing: mkfs.ext4 or fsfreeze")
    image = directory.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run([makes, "-q", image], check=True, timeout=PATIENCE_S)
    with _mounted(directory, "-o", "loop", image):
        yield directory


@contextlib.contextmanager
def frozen(mounted: Path) -> Iterator[None]:
    """Whoever writes to this disk waits; it thaws at the end of the block, and also if we are killed."""
    script = '"$0" -f "$1" && echo frozen && read _; "$0" -u "$1"'
    argv = ["/bin/sh", "-c", script, str(find("fsfreeze")), str(mounted)]
    freezer = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert freezer.stdout and freezer.stdout.readline() == b"frozen\n"
        yield
    finally:
        freezer.communicate(timeout=PATIENCE_S)


def fail(mounted: Path) -> None:
    """Shut an ext4 down: from now on, as on broken hardware, it can't be read or written."""
    fd = os.open(mounted, os.O_RDONLY)
    fcntl.ioctl(fd, 0x8004587D, struct.pack("I", 2))  # EXT4_IOC_SHUTDOWN, without flushing
    os.close(fd)
