"""Containers for tests: a store of podman's of their own, with an image whose files are this machine's."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

from tests.harness import PATIENCE_S, ROOT

_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_FOLDERS = ("usr", "etc", "tmp", "proc", "sys", "dev", "run", "root")
IMAGE = "localhost/thin"


class Podman(NamedTuple):
    """podman with images and containers of its own, on all hosts of a testbed."""

    words: tuple[str, ...]

    def tool(self, *words: str) -> str:
        """What podman says to a command that must succeed."""
        done = subprocess.run(
            [*self.words, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def section(self, **keys: object) -> str:
        """A job's `container`: the image has no files of its own, but those of this machine's /usr."""
        mounts = ["/usr:/usr:ro", "/etc:/etc:ro", str(ROOT), sys.base_prefix, sys.prefix]
        limits = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"]
        made = {"image": IMAGE, "runtime": list(self.words), "mounts": mounts, "options": limits, **keys}
        return f"container: {json.dumps(made)}\n"


def why_no_podman() -> str | None:
    """What is missing for containers, or None."""
    if os.geteuid():
        return "root is missing: only root can run containers in network namespaces"
    missing = [name for name in ("podman", "runc") if shutil.which(name) is None]
    return f"missing: {', '.join(missing)}" if missing else None


def podman_in(folder: Path) -> Podman:
    """podman with its store in `folder`; the thin image is there."""
    stores = [f"--root={folder}/images", f"--runroot={folder}/run", f"--tmpdir={folder}/tmp"]
    podman = Podman(("podman", *stores, "--cgroup-manager=cgroupfs", "--runtime=runc"))
    with tarfile.open(folder / "thin.tar", "w") as tar:
        for name in _FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        for name, target in _LINKS.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    podman.tool("import", "--quiet", str(folder / "thin.tar"), IMAGE)
    return podman
