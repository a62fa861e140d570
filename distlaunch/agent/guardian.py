"""The guardian: the agent's parent, which sweeps what the agent leaves if it dies.

A sweep ends with its subreaper's life, hence a second one above the agent. The guardian keeps the
link's output open until it has swept, so that the end of the link means: this node is clean.
"""

import os
import select
import time

from distlaunch.agent import lines, scratch, sweep, wire
from distlaunch.agent.lean import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Optional, Tuple, Union

SWEEP_S = 5.0
STOP_S = 600.0
"""Seconds after which an agent that was told to stop is killed: longer than a grace for checkpoints."""
LOOK_S = 5.0
"""How often to look at the link: no signal announces that its other end was closed."""

_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_WATCHED = (signal.SIGCHLD, *_STOPS, *wire.NOTICES)


def main(nonce: str, place: "Union[int, Tuple[str, Dict[str, int]]]") -> None:
    """Fork the agent, wait for its end, sweep, exit. Called by the boot; never returns.

    `place` is the node's index; or, where several nodes share one link, the variable that names the node, and
    their indices: what each writes then has the form of `distlaunch.agent.lines`.
    """
    alone = isinstance(place, int)
    node = place if isinstance(place, int) else place[1][os.environ[place[0]]]
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    sweep.become_subreaper()
    guardian, folder = os.getpid(), scratch.Folder()
    agent = os.fork()
    if agent == 0:
        # The agent learns of the guardian's death as a SIGTERM: it stops its workers and leaves.
        sweep.become_subreaper()
        sweep.die_with_parent(signal.SIGTERM, guardian)
        from distlaunch.agent import serve  # not before the fork: the guardian stays small

        serve.main(nonce, node, folder, alone)
    status = _watch(agent)
    if not alone:
        lines.say_gone(1, status)
    folder.remove_left()
    os._exit(status)


def _watch(agent: int) -> int:
    """Wait for the agent to end; once told to stop, make sure that it does, even if it is stuck."""
    status: "Optional[int]" = None
    deadline: "Optional[float]" = None
    while status is None:
        wait_s = LOOK_S if deadline is None else max(0.0, min(LOOK_S, deadline - time.monotonic()))
        received = signal.sigtimedwait(_WATCHED, wait_s)
        # A wait that a stop and a continuation outlast ends with no signal, and not with None (CPython 3.11).
        told = received is not None and received.si_signo in _STOPS
        if deadline is None and (told or _hung_up()):
            deadline = time.monotonic() + STOP_S
            os.kill(agent, signal.SIGTERM)
            os.kill(agent, signal.SIGCONT)  # to a stopped process SIGTERM stays pending
        if received is not None and received.si_signo in wire.NOTICES:  # the agent knows what to do
            os.kill(agent, received.si_signo)
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(agent, signal.SIGKILL)
        for pid, ended in sweep.reap():
            if pid == agent:
                status = ended
    clean = _sweep_rest()
    if not clean:
        return wire.NOT_CLEAN
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else wire.AGENT_DIED


def _hung_up() -> bool:
    """Whether the link's other end is closed; the agent, which reads it, may be in no state to notice."""
    link = select.poll()
    link.register(0, select.POLLRDHUP)
    return bool(link.poll(0))


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
            signal.sigtimedwait((signal.SIGCHLD,), min(left_s, cleaner.settling_s or left_s))
    return True
