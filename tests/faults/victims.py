"""Who may be hit by a random kill, by which signal, and what the command must then say."""

import signal
from collections.abc import Callable, Mapping
from typing import NamedTuple

from distlaunch.agent.guardian import LOOK_S
from tests.cluster.hosts import parent_of
from tests.harness import Run, children_of, command_line

STOP_S, LEASE_S = 2.0, 6.0
PROCS = 2
"""Ranks of each host."""
LIMIT_S = STOP_S + 2.0
CUT_LIMIT_S = LEASE_S + STOP_S + 2.0


class Scene(NamedTuple):
    """A run, and the rank that is hit, or whose agent, guardian, link or host is."""

    run: Run
    rank: int

    @property
    def host(self) -> str:
        """The rank's host: ranks are dealt out in the order of the hosts."""
        return f"host{self.rank // PROCS + 1}"


def _controller(scene: Scene) -> int:
    return scene.run.process.pid


def _client(scene: Scene) -> int:
    """The process here that is the link to the rank's host: the one whose command line names it."""
    (found,) = [pid for pid in children_of(scene.run.process.pid) if scene.host in names(pid)]
    return found


def names(pid: int) -> list[str]:
    """What the command line of a link's process names, a host among it, which may be an option's value."""
    return [word.rpartition("=")[2] for word in command_line(pid)]


def _worker(scene: Scene) -> int:
    return scene.run.worker_pids()[scene.rank]


def _agent(scene: Scene) -> int:
    return parent_of(_worker(scene))


def _guardian(scene: Scene) -> int:
    return parent_of(_agent(scene))


def _slurmstepd(scene: Scene) -> int:
    return parent_of(_guardian(scene))


class Kind(NamedTuple):
    """Whose process is hit, how often, the statuses that the command may then have, and what it must tell.

    A host's network is no process. `tells` is a pattern for a `Scene`'s host and rank; after `limit_s` all is
    clean. Only who is there before any worker can be hit `early`.
    """

    victim: Callable[[Scene], int] | None
    weight: int
    statuses: tuple[int, ...]
    tells: str
    signum: signal.Signals = signal.SIGKILL
    limit_s: float = LIMIT_S
    early: bool = False

    @property
    def is_controller(self) -> bool:
        """Whether it is the command itself that is hit."""
        return self.victim is _controller

    @property
    def is_worker(self) -> bool:
        """Whether it is a rank, after which no host is lost."""
        return self.victim is _worker

    @property
    def loses_step(self) -> bool:
        """Whether Slurm goes on listing the step: only its slurmstepd ends it, also that of a plain srun."""
        return self.victim is _slurmstepd

    @property
    def must_be_woken(self) -> bool:
        """Whether nobody but us would continue it."""
        return self.is_controller and self.signum == signal.SIGSTOP

    @property
    def ends_run(self) -> bool:
        """Whether no restart can follow."""
        return self.is_controller and not self.must_be_woken

    def told(self, scene: Scene) -> str:
        """The pattern of what is told of this scene."""
        return self.tells.format(host=scene.host, rank=scene.rank)


_LOST, _KILLED = "{host} was lost: ", r"killed by signal 9 \(SIGKILL\)"
_SILENT = f"{_LOST}no heartbeat for {LEASE_S:g} s"
_WOKEN = " was lost: (no heartbeat|its agent exited)"  # the agents have left by then
_STOPPED = f"{_LOST}its agent was stopped by signal 15"
# Over Slurm, slurmstepd kills the agent as soon as its guardian ends: it may not come to tell that.
_ORPHANED = f"{_LOST}(its agent's guardian process was killed|srun: .*task 0: Killed)"
_COMMON = {
    "worker": Kind(_worker, 6, (137,), r"rank {rank} \(\S+\) failed first: " + _KILLED),
    "agent": Kind(_agent, 4, (71,), f"{_LOST}its agent exited"),
    "agent SIGTERM": Kind(_agent, 1, (71,), _STOPPED, signal.SIGTERM),
    "agent SIGSTOP": Kind(_agent, 1, (71,), _SILENT, signal.SIGSTOP, CUT_LIMIT_S + LOOK_S),
    "guardian": Kind(_guardian, 2, (71,), _ORPHANED),
    "controller SIGKILL": Kind(_controller, 4, (-9,), "", early=True),
    "controller SIGTERM": Kind(_controller, 1, (143,), "stopped by SIGTERM", signal.SIGTERM, early=True),
    "controller SIGINT": Kind(_controller, 1, (130,), "stopped by SIGINT", signal.SIGINT, early=True),
    "controller SIGSTOP": Kind(_controller, 1, (71,), _WOKEN, signal.SIGSTOP, CUT_LIMIT_S),
}
OVER_SSH: Mapping[str, Kind] = _COMMON | {
    "ssh client": Kind(_client, 2, (71,), f"{_LOST}ssh on this machine was {_KILLED}"),
    "network": Kind(None, 2, (69, 71), "{host}( was lost)?: ", limit_s=CUT_LIMIT_S, early=True),
}
SRUN_S = 4.0
"""So long a slurmstepd tries to tell a srun that is stopped of its end."""
OVER_SLURM: Mapping[str, Kind] = _COMMON | {
    "srun": Kind(_client, 3, (71,), f"{_LOST}srun on this machine was {_KILLED}"),
    "srun SIGTERM": Kind(_client, 1, (71,), f"{_LOST}slurmstepd.* CANCELLED", signal.SIGTERM),
    "srun SIGSTOP": Kind(_client, 1, (71,), _SILENT, signal.SIGSTOP, CUT_LIMIT_S + SRUN_S),
    "slurmstepd": Kind(_slurmstepd, 3, (71,), _SILENT, limit_s=CUT_LIMIT_S),
}
"""A slurmstepd that is gone, Slurm tells nobody: the lease does."""
