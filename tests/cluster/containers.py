"""Containers for tests: a store of podman's of their own, with an image whose files are this machine's."""

import contextlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.cluster.hosts import Bed, missing
from tests.harness import PATIENCE_S, ROOT, completed

IMAGE = "localhost/thin"
MOUNTS = ["/usr:/usr:ro", "/etc:/etc:ro", str(ROOT), sys.base_prefix, sys.prefix]
LIMITS = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"]


class Podman(NamedTuple):
    """podman with images and containers of its own, on all hosts of a testbed."""

    words: tuple[str, ...]

    def tool(self, *words: str) -> str:
        """What podman says to a command that must succeed."""
        return str(completed([*self.words, *words], status=0).stdout)

    def section(self, **keys: object) -> str:
        """A job's `container`: the image has no files of its own, but those of this machine's /usr."""
        made = {"image": IMAGE, "runtime": list(self.words), "mounts": MOUNTS, "options": LIMITS, **keys}
        return f"container: {json.dumps(made)}\n"

    @contextlib.contextmanager
    def running_on(self, bed: Bed, directory: str) -> Iterator[None]:
        """A container on each host, named like it, that has `directory`; their PIDs are this machine's."""
        shared = ["--network=host", "--pid=host", "--ipc=host", *LIMITS]
        mounts = [
            f"--volume={mount if ':' in mount else f'{mount}:{mount}'}" for mount in (*MOUNTS, directory)
        ]
        for host in bed.hosts:
            words = [*self.words, "run", "--detach", "--rm", f"--name={host}", *shared, *mounts, IMAGE]
            bed.call("exec", host, "--", *words, "/bin/sleep", "infinity")
        try:
            yield
        finally:
            self.tool("rm", "--force", "--time=0", *bed.hosts)


def why_no_podman() -> str | None:
    """What is missing for containers, or None."""
    if os.geteuid():
        return "root is missing: only root can run containers in network namespaces"
    return missing("podman", "runc")


@contextlib.contextmanager
def podman_alone() -> Iterator[Podman]:
    """podman with a store of its own, where the thin image is."""
    directory = Path(tempfile.mkdtemp(prefix="podman-"))  # short: its runroot has at most 50 characters
    podman = _podman_in(directory)
    try:
        yield podman
    finally:
        podman.tool("rmi", "--all", "--force")
        podman.tool("system", "migrate")  # which unmounts
        deadline = time.monotonic() + PATIENCE_S
        while directory.exists():  # what cleans up after a container that just ended may still write into it
            assert time.monotonic() < deadline, f"something keeps writing into {directory}"
            shutil.rmtree(directory, ignore_errors=True)


def _podman_in(directory: Path) -> Podman:
    stores = [f"--root={directory}/images", f"--runroot={directory}/run", f"--tmpdir={directory}/tmp"]
    podman, thin = (
        Podman(("podman", *stores, "--cgroup-manager=cgroupfs", "--runtime=runc")),
        directory / "thin",
    )
    for name in ("usr", "etc", "tmp", "proc", "sys", "dev", "run", "root"):
        (thin / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (thin / name).symlink_to(f"usr/{name}")
    (thin / "tmp").chmod(0o1777)
    with tarfile.open(directory / "thin.tar", "w") as tar:
        tar.add(thin, "")
    podman.tool("import", "--quiet", str(directory / "thin.tar"), IMAGE)
    return podman
