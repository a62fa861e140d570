"""How much memory a run's controller takes at its peak, over a bare interpreter, and how much CPU time."""

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.harness import PATIENCE_S

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

    def __init__(self, folder: Path) -> None:
        self.result = folder / "peak"
        self.program = folder / "measure"
        self.program.write_text(_MEASURE.format(python=sys.executable, result=str(self.result)))
        self.program.chmod(0o755)

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
    with TemporaryDirectory() as folder:
        meter = Meter(Path(folder))
        argv = [sys.executable, "-c", "pass"]
        subprocess.run(argv, executable=meter.program, check=True, timeout=PATIENCE_S)
        return meter.peak_mib
