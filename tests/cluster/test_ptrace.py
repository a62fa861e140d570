"""Stacks where Yama lets users trace only their own descendants, as on Ubuntu: on a kernel of its own."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.harness import PATIENCE_S, completed, write_job

WAITS = """
    import signal
    def waits():
        signal.pause()
    waits()
"""
INIT = """\
#!/bin/sh
mount -t proc proc /proc
mount -t tmpfs shm /dev/shm
ip link set lo up
echo 1 >/proc/sys/kernel/yama/ptrace_scope && echo restricted
cd {directory}
HOME={directory} PATH={path} setpriv --bounding-set=-sys_ptrace {python} -m distlaunch run job.yaml
echo o >/proc/sysrq-trigger
"""
"""Root without the capability to trace others is what another user is, but may read this Python."""


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("linux.uml"), reason="missing: linux.uml (user-mode-linux)")
def test_shows_stacks_where_users_may_only_trace_their_descendants(tmp_path: Path) -> None:
    write_job(tmp_path, WAITS, "gpus_per_node: 0\non_stall: stop\ntimeouts: {stall: 2s}\n")
    init = tmp_path / "init"
    places = {"directory": tmp_path, "path": os.environ["PATH"], "python": sys.executable}
    init.write_text(INIT.format(**{name: shlex.quote(str(place)) for name, place in places.items()}))
    init.chmod(0o755)
    kernel = ["linux.uml", "mem=512M", "rootfstype=hostfs", "rootflags=/", "rw", f"init={init}"]
    env = {**os.environ, "HOME": str(tmp_path)}  # where the kernel keeps its own files
    done = completed([*kernel, "con=null", "con0=null,fd:1"], env=env, timeout=2 * PATIENCE_S)
    if "restricted" not in done.stdout.splitlines():
        pytest.skip(f"no kernel with Yama boots here: {(done.stdout + done.stderr).splitlines()[-1:]}")
    assert "rank 0 is blocked in: waits (worker.py:4) < <module> (worker.py:5)" in done.stdout, done.stdout
