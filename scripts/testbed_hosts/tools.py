"""Finds the programs that create a testbed, and runs them with a time limit."""

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

COMMAND_LIMIT_S = 60.0  # a database takes seconds to set up, or longer on a busy machine
RETRY_S = 0.05

# The PATH of ordinary users often lacks the directories of sshd and ip.
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"

_PACKAGES = {
    "hostname": "hostname",
    "ip": "iproute2",
    "ip6tables": "iptables",
    "iptables": "iptables",
    "mariadb-install-db": "mariadb-server",
    "mariadbd": "mariadb-server",
    "mount": "mount",
    "munged": "munge",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "sacctmgr": "slurm-wlm",
    "sinfo": "slurm-wlm",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "slurmdbd": "slurmdbd",
    "srun": "slurm-wlm",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "unshare": "util-linux",
}


class TestbedError(Exception):
    """A failure and what to do about it, in one line. The command exits with status 1."""


def find(name: str) -> str | None:
    """Return the absolute path of a program, or None if it isn't installed."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SBIN}")
    return found and str(Path(found).absolute())


def tool(name: str) -> str:
    """Return the absolute path of a program. Raises TestbedError with the name of the package to install."""
    found = find(name)
    if found is None:
        raise TestbedError(f"{name} not found: apt install {_PACKAGES[name]}")
    return found


def attempt(argv: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program with `text` as its input, and return the result, whatever the exit status."""
    try:
        return subprocess.run(
            argv, input=text, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise TestbedError(f"{shlex.join(argv)} did not end within {COMMAND_LIMIT_S:g} s") from None


def run(argv: Sequence[str], text: str = "") -> str:
    """Run a program with `text` as its input, and return its output. Raises TestbedError if it fails."""
    finished = attempt(argv, text)
    _refuse_failure(argv, finished.returncode, finished.stderr)
    return finished.stdout


def retry(argv: Sequence[str], limit_s: float, problem: str) -> str:
    """Run a program until it succeeds, and return its output. Daemons don't announce that they are ready.

    Raises TestbedError with the problem and the last output after `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    while (done := attempt(argv)).returncode:
        if time.monotonic() >= deadline:
            raise TestbedError(f"{problem}: {done.stderr.strip()}")
        time.sleep(RETRY_S)
    return done.stdout


def run_together(argvs: Sequence[Sequence[str]]) -> None:
    """Run programs at the same time. Raises TestbedError if one fails."""
    running = [
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for argv in argvs
    ]
    try:
        for argv, process in zip(argvs, running, strict=True):
            _, errors = process.communicate(timeout=COMMAND_LIMIT_S)
            _refuse_failure(argv, process.returncode, errors.decode(errors="replace"))
    except subprocess.TimeoutExpired:
        raise TestbedError(f"{argvs[0][0]} did not end within {COMMAND_LIMIT_S:g} s") from None
    finally:
        for process in running:
            process.kill()
            process.wait(COMMAND_LIMIT_S)


def _refuse_failure(argv: Sequence[str], status: int, errors: str) -> None:
    if status:
        reason = "; ".join(errors.split("\n")).strip("; ") or f"status {status}"
        raise TestbedError(f"{shlex.join(argv)} failed: {reason}")
