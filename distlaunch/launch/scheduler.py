"""Asks the scheduler what becomes of our allocation."""

import os
import signal
import subprocess
import time

from distlaunch.allocation.allocation import Allocation
from distlaunch.launch.slurm_fate import fate_argv, job_fate
from distlaunch.supervisor.events import AllocationTold


class Question:
    """One question, under way; `fd` is readable when there is something of the answer."""

    def __init__(self, allocation: Allocation) -> None:
        self._heard, self._starts = b"", allocation.starts
        self._process: subprocess.Popen[bytes] | None = None
        read, write = os.pipe()
        self.fd = read
        # Inherited: a scheduler may end all processes of a job at once, and so the one that asks it why.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            self._process = subprocess.Popen(
                fate_argv(allocation.job),
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            pass  # not installed here: the end of the pipe is the answer
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(write)
        os.set_blocking(read, False)

    def answer(self) -> AllocationTold | None:
        """What it said; None while more is to come."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return None
        self._heard += data
        return None if data else _told(self._heard.decode(errors="replace"), self._starts)

    def close(self) -> None:
        """Leave nothing behind, whether it has answered or not."""
        os.close(self.fd)
        if self._process:
            self._process.kill()
            self._process.wait()


def _told(text: str, starts: int) -> AllocationTold:
    fate = job_fate(text, starts)
    left_s = None if fate.end is None else round(fate.end - time.time(), 3)
    return AllocationTold(fate.ends, fate.why, left_s, fate.final)
