"""The guardian: the agent's parent, which sweeps what the agent leaves if it dies.

A sweep ends with its subreaper's life, hence a second one above the agent. The guardian keeps the
link's output open until it has swept, so that the end of the link means: this node is clean.
"""

from __future__ import annotations

import os
import select
import signal
import time

from distlaunch.agent import scratch, sweep, wire
from distlaunch.agent.frozen import Frozen

SWEEP_S = 5.0
STOP_S = 600.0
"""Seconds after which an agent that was told to stop is killed: longer than a grace for checkpoints."""
LOOK_S = 5.0
"""How often to look at the link: no signal announces that its other end was closed."""

_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_WATCHED = (signal.SIGCHLD, *_STOPS, *wire.NOTICES)


def main(nonce: str, place: int | tuple[str, dict[str, int]]) -> None:
    """Fork the agent, wait for its end, sweep, exit. Called by the boot; never returns.

    `place` is the node's index; or, where several nodes share one link, the variable that names the node, and
    their indices: what each writes are then lines, as `distlaunch.agent.wire` has them.
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
    ended = watch(agent)
    status = wire.NOT_CLEAN if ended.unswept else wire.AGENT_DIED if ended.exited is None else ended.exited
    if not alone:
        wire.say_gone(1, status)
    folder.remove_left()
    os._exit(status)


class Ended(Frozen):
    """How an agent has ended: the status that it `exited` with, None = it was killed.

    `unswept`: some of its descendants resisted.
    """

    exited: int | None
    unswept: bool


def watch(agent: int, link: int = 0, passed_on: dict[int, int] | None = None) -> Ended:
    """Wait for the agent's end, and sweep; once told to stop, make sure that it does, even if it is stuck.

    `link` is the descriptor of the link's input. Of the signals in `passed_on`, which are blocked, the agent
    gets another each, and knows what to do; without any, those that stop processes are taken as just that.
    """
    status: int | None = None
    deadline: float | None = None
    watched = (signal.SIGCHLD, *passed_on) if passed_on else _WATCHED
    passed = passed_on or {signum: signum for signum in wire.NOTICES}
    stops = () if passed_on else _STOPS
    while status is None:
        wait_s = LOOK_S if deadline is None else max(0.0, min(LOOK_S, deadline - time.monotonic()))
        received = signal.sigtimedwait(watched, wait_s)
        # A wait that a stop and a continuation outlast ends with no signal, and not with None (CPython 3.11).
        signum = 0 if received is None else received.si_signo
        if deadline is None and (signum in stops or _hung_up(link)):
            deadline = time.monotonic() + STOP_S
            if not passed_on:
                os.kill(agent, signal.SIGTERM)
            os.kill(agent, signal.SIGCONT)  # to a stopped process SIGTERM stays pending
        if signum in passed:
            os.kill(agent, passed[signum])
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(agent, signal.SIGKILL)
        for pid, ended in sweep.reap():
            if pid == agent:
                status = ended
    unswept = not _sweep_rest()
    return Ended(os.WEXITSTATUS(status) if os.WIFEXITED(status) else None, unswept)


def _hung_up(link: int) -> bool:
    """Whether the link's other end is closed; the agent, which reads it, may be in no state to notice."""
    looks = select.poll()
    looks.register(link, select.POLLRDHUP)
    return bool(looks.poll(0))


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
