"""The guardian: the agent's parent process, which sweeps leftover processes if the agent dies.

Sweeping requires a live subreaper, so the guardian is a second one, above the agent. The guardian keeps the
output of the link open until it has swept. Once the link is closed, nothing from the run is left on the node.
"""

from __future__ import annotations

import os
import select
import signal
import time

from distlaunch.agent import scratch, sweep, wire
from distlaunch.agent.frozen import Frozen

SWEEP_S = 5.0
STOP_S = 7200.0
"""Seconds until an agent that doesn't stop is killed. Longer than any grace period for checkpoints."""
LOOK_S = 1.0
"""Seconds between checks of the link, since no signal announces that its other end was closed."""

_WATCHED = (signal.SIGCHLD, *wire.STOPS, *wire.WARNINGS)


def main(nonce: str, place: int | tuple[str, dict[str, int]]) -> None:
    """Fork the agent, wait until it has exited, sweep, and exit. Called by the boot code. Never returns.

    `place` is the index of the node. If several nodes share a link, `place` is (variable that contains the
    node's name, map of names to indices), and each node writes lines in `distlaunch.agent.wire`'s format.
    """
    alone = isinstance(place, int)  # on its link
    node = place if isinstance(place, int) else place[1][os.environ[place[0]]]
    if mistake := sweep.foreign_proc():
        raise SystemExit(mistake)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    sweep.become_subreaper()
    guardian, directory = os.getpid(), scratch.Directory()
    try:
        agent = os.fork()
    except OSError as error:
        raise SystemExit(
            "can't fork: %s; raise the limit on processes (ulimit -u)" % error.strerror
        ) from None
    if agent == 0:
        # If the guardian dies, the agent receives SIGTERM, stops its workers and exits.
        sweep.become_subreaper()
        sweep.die_with_parent(signal.SIGTERM, guardian)
        from distlaunch.agent import serve  # after the fork, to keep the guardian small

        serve.main(nonce, node, directory, alone)
    ended = watch(agent, directory)
    if ended.killed:
        wire.say_last(2, b"%s\n" % ended.killed.encode())
    status = wire.NOT_CLEAN if ended.unswept else wire.AGENT_DIED if ended.killed else ended.exited
    if not alone:
        wire.say_last(1, b"\n%s%d\n" % (wire.GONE, status))  # a killed agent may have left a partial line
    directory.remove_left()
    os._exit(status)


class Ended(Frozen):
    """The exit of an agent. `exited` is its exit status, or the negative number of the signal that killed it.

    `unswept` is set if some of the agent's descendants survived the sweep.
    """

    exited: int
    unswept: bool

    @property
    def killed(self) -> str:
        """Return which signal killed the agent, as the end of a message; "" = none."""
        name = " (SIGKILL)" if self.exited == -signal.SIGKILL else ""
        return "its agent was killed by signal %d%s" % (-self.exited, name) if self.exited < 0 else ""


def watch(
    agent: int, directory: scratch.Directory, link: int = 0, passed_on: dict[int, int] | None = None
) -> Ended:
    """Wait until the agent has exited, then sweep.

    After a stop signal, or the end of the link, ensure that the agent exits even if it is stuck, for example
    in the driver of a faulty GPU: the next attempt waits only that long for this node's ranks. `link` is the
    descriptor of the link's input. `passed_on` maps blocked signals of this process to the signals that the
    agent is sent instead. Without `passed_on`, a stop signal stops the agent. A launcher that joined also
    calls this, with its connection as `link` (`launch.joined_agent`).
    """
    status: int | None = None
    deadline: float | None = None
    watched = (signal.SIGCHLD, *passed_on) if passed_on else _WATCHED
    passed = passed_on or {signum: signum for signum in wire.WARNINGS}
    stops = () if passed_on else wire.STOPS
    while status is None:
        wait_s = LOOK_S if deadline is None else max(0.0, min(LOOK_S, deadline - time.monotonic()))
        received = signal.sigtimedwait(watched, wait_s)
        # If this process is suspended and resumed during the wait, the signal is 0, not None (CPython 3.11).
        signum = 0 if received is None else received.si_signo
        if deadline is None and (signum in stops or _hung_up(link)):
            limit_s = STOP_S if signum in stops else min(STOP_S, directory.agents_limit_s())
            deadline = time.monotonic() + limit_s
            if not passed_on:
                os.kill(agent, signum if signum in stops else signal.SIGTERM)
            os.kill(agent, signal.SIGCONT)  # SIGTERM stays pending in a suspended process
        if signum in passed:
            os.kill(agent, passed[signum])
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(agent, signal.SIGKILL)
        for pid, ended in sweep.reap():
            if pid == agent:
                status = ended
    return Ended(sweep.exit_status(status), unswept=not _sweep_rest())


def _hung_up(link: int) -> bool:
    """Return whether the other end of the link is closed, in case the agent doesn't notice."""
    looks = select.poll()
    looks.register(link, select.POLLRDHUP)
    return bool(looks.poll(0))


def _sweep_rest() -> bool:
    """Kill all remaining descendants. Return whether none is left."""
    cleaner = sweep.Sweep()
    deadline = time.monotonic() + SWEEP_S
    while sweep.has_children():
        cleaner.kill_descendants()
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        if not any(True for _ in sweep.reap()):
            signal.sigtimedwait((signal.SIGCHLD,), min(left_s, cleaner.settling_s or left_s))
    return True
