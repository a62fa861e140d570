"""A memory cgroup of the test's own, below the one that the test runs in."""

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.harness import wait_until

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def _parents() -> Iterator[tuple[Path, str]]:
    """(folder, name of its limit) of each hierarchy in which we have a memory cgroup."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _V1 / path.lstrip("/"), "memory.limit_in_bytes"
            yield _V1, "memory.limit_in_bytes"  # in a container the path is the host's
        elif number == "0":
            yield _V2 / path.lstrip("/"), "memory.max"


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Callable[[], None]]:
    """A group with `limit` bytes; what is yielded makes its caller join. Skips where none can be made."""
    name = f"distlaunch-{uuid.uuid4().hex[:12]}"
    for parent, limit_file in _parents():
        group = parent / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit_file).write_text(str(limit))
        except OSError:
            group.rmdir()
            continue
        try:
            yield lambda group=group: _join(group)  # type: ignore[misc]
        finally:
            # Its processes have ended, but the kernel may count them for a moment longer.
            wait_until(partial(_removed, group), (group / "cgroup.procs").read_text)
        return
    pytest.skip("no memory cgroup can be made here: it needs root, or one that is delegated to us")


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))
