"""Gives the PID of a worker that has ended to a foreign process, then ends the job: run in a PID namespace.

Prints how the run ended and how many signals the foreign process got; it blocks all, so that they stay
pending. SIGKILL can't be blocked: it would show as a death.
"""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from tests.cluster.workers import worker
from tests.faults.scenes import CPU
from tests.harness import PATIENCE_S, held, kill, open_gate, running, write_job

ENDS = worker("""
    resist()
    ready()
    if RANK == "1":
        open("gate").read()
    else:
        wait()
""")


def main(directory: Path) -> None:
    """Run the job, and print what came of it."""
    os.mkfifo(directory / "gate")
    with running(write_job(directory, ENDS, CPU), "--set", "timeouts.stop=1s") as run:
        pids = run.wait_ready(4)
        with held([pids[1]]) as ended:
            open_gate(directory / "gate")
            ended.wait_ends(ended.pids, time.monotonic() + PATIENCE_S)
            ended.wait_reaped(time.monotonic() + PATIENCE_S)
        foreign = start_as(pids[1])
        kill(pids[3])
        status = run.wait()
    if os.waitpid(foreign, os.WNOHANG)[0]:
        signals = 1  # SIGKILL
    else:
        pending = re.findall(r"(?:SigPnd|ShdPnd):\s+(\w+)", Path(f"/proc/{foreign}/status").read_text())
        signals = sum(int(mask, 16).bit_count() for mask in pending)
    print(json.dumps({"status": status, "signals": signals}))


def start_as(wanted: int) -> int:
    """Fork a process with this PID, in a session of its own, that blocks all signals."""
    for _ in range(1000):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(wanted - 1))
        up, tell = os.pipe()
        if (pid := os.fork()) == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
            os.setsid()
            os.write(tell, b"up")
            signal.pause()
        if pid == wanted:
            os.read(up, 2)
            return pid
        os.kill(pid, signal.SIGKILL)  # another process was faster
        os.waitpid(pid, 0)
    raise AssertionError(f"PID {wanted} was not to be had")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
