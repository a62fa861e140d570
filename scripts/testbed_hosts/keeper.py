"""A host's keeper: the process inside the host's namespaces that starts its sshd and keeps the host alive.

Conversation, in lines: it says `ready` and waits for its orders, a line of JSON
`{"setup": [ARGV, …], "sshd": ARGV}`. It runs the setup, starts the sshd, says `up`, and from then on only
`sshd ended`, if that happens. Should the setup fail, it says `failed: …` and leaves.

The end of its input instead of orders means that `up` died, perhaps before it had written down that this
process exists. Then it leaves at once and takes the namespaces with it: nobody else could.

It runs as a file of its own, on the standard library alone. Its one argument, the host's name, is for
those who look at the list of processes.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys

PR_SET_CHILD_SUBREAPER = 36  # see prctl(2)
SETUP_LIMIT_S = 10.0


def main() -> None:
    """Do what the module's first lines say, until killed."""
    os.umask(0o022)
    # Not SIG_IGN, which the sshd and every process in the host would inherit.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    # Whatever the host's processes leave behind becomes a child of the keeper: that is how it is reaped,
    # and how `down` finds it where there is no namespace to find it by.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _say("ready")
    line = sys.stdin.readline()
    if line.endswith("\n"):
        _serve(**json.loads(line))


def _serve(setup: list[list[str]], sshd: list[str]) -> None:
    for argv in setup:
        finished = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SETUP_LIMIT_S, check=False
        )
        if finished.returncode:
            _say(f"failed: {finished.stderr.strip() or argv}".replace("\n", " "))
            return
    started = subprocess.Popen(sshd, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _say("up")
    _reap(started.pid)


def _reap(sshd: int) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.wait()
            if pid == sshd:
                _say("sshd ended")
    # No child is left, and with none there will never be one: the namespaces alone need keeping.
    while True:
        signal.pause()


def _say(line: str) -> None:
    # Once `up` has ended, nobody listens.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
