"""The guardian: the agent's parent, which sweeps what the agent leaves if it dies.

A sweep ends with its subreaper's life, hence a second one above the agent. The guardian keeps the
link's output open until it has swept, so that the end of the link means: this node is clean.
"""

import os
import signal
import time

from distlaunch.agent import scratch, sweep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

AGENT_DIED = 70
"""Exit status when the agent was killed and the guardian swept in its place."""
NOT_CLEAN = 71
"""Exit status when processes resisted the sweep."""
SWEEP_S = 5.0

_WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


def main(nonce: str, node: int) -> None:
    """Fork the agent, wait for its end, sweep, exit. Called by the boot; never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    sweep.become_subreaper()
    guardian, folder = os.getpid(), scratch.folder_name()
    agent = os.fork()
    if agent == 0:
        # The agent learns of the guardian's death as a SIGTERM: it stops its workers and leaves.
        sweep.become_subreaper()
        sweep.die_with_parent(signal.SIGTERM, guardian)
        from distlaunch.agent import serve  # not before the fork: the guardian stays small

        serve.main(nonce, node, folder)
    os.close(0)
    status = _watch(agent)
    scratch.remove(folder)
    os._exit(status)


def _watch(agent: int) -> int:
    status: "Optional[int]" = None
    while status is None:
        received = signal.sigwait(_WATCHED)
        if received != signal.SIGCHLD:
            os.kill(agent, signal.SIGTERM)
        for pid, ended in sweep.reap():
            if pid == agent:
                status = ended
    clean = _sweep_rest()
    if not clean:
        return NOT_CLEAN
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else AGENT_DIED


def _sweep_rest() -> bool:
    """End all that is left below us; True when nothing is."""
    cleaner = sweep.Sweep()
    deadline = time.monotonic() + SWEEP_S
    while sweep.has_children():
        cleaner.strike()
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        if not any(True for _ in sweep.reap()):
            signal.sigtimedwait((signal.SIGCHLD,), left_s)
    return True
