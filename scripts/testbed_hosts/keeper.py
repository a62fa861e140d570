"""A host's keeper: the process inside the host's namespaces that starts its sshd and keeps the host alive.

The protocol consists of lines: the keeper writes `ready` and waits for its orders, a line of JSON `{"setup":
[ARGV, …], "sshd": ARGV}`. It runs the setup, starts the sshd, and writes `up`. If the sshd ends later, it
writes `sshd ended`. If the setup fails, it writes `failed: …` and exits.

If its input ends before the orders, `up` has died, possibly before it recorded this process. The keeper then
exits at once, which also removes the namespaces. Nothing else could remove them.

It runs as a separate file and uses only the standard library. Its only argument, the host's name, identifies
it in the list of processes.
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
    """Follow the protocol above until killed."""
    os.umask(0o022)
    # Not SIG_IGN, because the sshd and every process in the host would inherit it.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    # Orphaned processes of the host become children of the keeper, which reaps them. `down` finds them there
    # if there is no namespace.
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
    # No child is left, and none will follow. Only the namespaces must be kept.
    while True:
        signal.pause()


def _say(line: str) -> None:
    # Once `up` has ended, no process reads this.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
