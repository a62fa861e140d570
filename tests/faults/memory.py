"""The memory and the CPU time that a run takes, and a memory cgroup that limits it."""

import contextlib
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cluster.hosts import parent_of
from tests.faults.figures import Figures
from tests.harness import PATIENCE_S, Run, program, wait_until

_MEASURE = """\
#!{python} -IS
import ctypes, os, sys
pid = os.fork()
if pid == 0:
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG: who ends the measuring, ends the run
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
_, status, usage = os.wait4(pid, 0)
with open({result!r}, "w") as result:
    result.write("%d %f" % (usage.ru_maxrss, usage.ru_utime + usage.ru_stime))
os._exit(abs(os.waitstatus_to_exitcode(status)))
"""


class Meter:
    """A program to run in place of the interpreter, as Popen's `executable`; below it runs the real one."""

    def __init__(self, directory: Path) -> None:
        self.result = directory / "peak"
        self.program = directory / "measure"
        program(self.program, _MEASURE.format(python=sys.executable, result=str(self.result)))

    @property
    def peak_mib(self) -> float:
        """The peak of what has run below, in MiB."""
        return int(self.result.read_text().split()[0]) / 1024

    @property
    def cpu_s(self) -> float:
        """The CPU time of what has run below, seconds: what runs beside it makes no difference."""
        return float(self.result.read_text().split()[1])

    @property
    def over_bare_mib(self) -> float:
        """The same, less what an interpreter takes that does nothing."""
        return self.peak_mib - bare_mib()


@cache
def bare_mib() -> float:
    """The peak of an interpreter that does nothing; call it before threads do, for it writes a program."""
    with TemporaryDirectory() as directory:
        meter = Meter(Path(directory))
        argv = [sys.executable, "-c", "pass"]
        subprocess.run(argv, executable=meter.program, check=True, timeout=PATIENCE_S)
        return meter.peak_mib


def peak_mib(pid: int) -> float:
    """The most memory that a process has had resident so far."""
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return float(kib) / 1024


def memory_figures(run: Run, rank: int, figures: Figures) -> None:
    """The memory of the command, and of the agent and guardian above the process `rank`, keeps its limits."""
    bare, agent = bare_mib(), parent_of(rank)
    node = sum(peak_mib(pid) - bare for pid in (agent, parent_of(agent)))
    figures("command over a bare Python", peak_mib(run.process.pid) - bare, at_most=64.0, unit="MiB")
    figures("agent and guardian over a bare Python", node, at_most=16.0, unit="MiB")


def _parents() -> Iterator[tuple[Path, str]]:
    """(directory, name of its limit) of each hierarchy in which we have a memory cgroup."""
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield root / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
            yield root / "memory", "memory.limit_in_bytes"  # in a container the path is the host's
        elif number == "0":
            yield root / path.lstrip("/"), "memory.max"


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Callable[[], None]]:
    """A group with `limit` bytes; what is yielded makes its caller join. Skips where none can be made."""
    for parent, limit_file in _parents():
        group = parent / f"distlaunch-{uuid.uuid4().hex[:12]}"
        try:
            group.mkdir()
            (group / limit_file).write_text(str(limit))
        except OSError:
            _removed(group)
            continue
        try:
            yield partial(_join, group)
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
