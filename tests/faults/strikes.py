"""Random kills: where they happen, who may be hit, and one or two at once, after which all must be clean."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from distlaunch.agent.guardian import LOOK_S
from tests.cluster import workers
from tests.cluster.hosts import Bed, bed_of, parent_of
from tests.cluster.slurm import NODES, Slurm, inside, slurm_of
from tests.faults.memory import peak_mib
from tests.faults.networks import listening
from tests.harness import (
    Going,
    Run,
    children_of,
    command_line,
    distlaunch,
    holders_of,
    wait_gone,
    wait_until,
    write_job,
)

STOP_S, LEASE_S = 2.0, 6.0
PROCS = 2
"""Ranks of each host."""
LIMIT_S = STOP_S + 2.0
CUT_LIMIT_S = LEASE_S + STOP_S + 2.0


class Scene(NamedTuple):
    """A run, and the rank that is hit, or whose agent, guardian, link or host is."""

    run: Going
    rank: int

    @property
    def host(self) -> str:
        """The rank's host: ranks are dealt out in the order of the hosts."""
        return f"host{self.rank // PROCS + 1}"


def controller(scene: Scene) -> int:
    return scene.run.process.pid


def client(scene: Scene) -> int:
    """The process here that is the link to the rank's host: the one whose command line names it."""
    (found,) = [pid for pid in children_of(scene.run.process.pid) if scene.host in names(pid)]
    return found


def names(pid: int) -> list[str]:
    """What the command line of a link's process names, a host among it, which may be an option's value."""
    return [word.rpartition("=")[2] for word in command_line(pid)]


def worker(scene: Scene) -> int:
    return scene.run.worker_pids()[scene.rank]


def agent(scene: Scene) -> int:
    return parent_of(worker(scene))


def guardian(scene: Scene) -> int:
    return parent_of(agent(scene))


def slurmstepd(scene: Scene) -> int:
    return parent_of(guardian(scene))


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
        return self.victim is controller

    @property
    def must_be_woken(self) -> bool:
        """Whether nobody but us would continue it."""
        return self.is_controller and self.signum == signal.SIGSTOP

    def told(self, scene: Scene) -> str:
        """The pattern of what is told of this scene."""
        return self.tells.format(host=scene.host, rank=scene.rank)


_LOST, KILLED = "{host} was lost: ", r"killed by signal 9 \(SIGKILL\)"
_SILENT = rf"{_LOST}no heartbeat for [\d.]+ s"
_WOKEN = " was lost: (no heartbeat|its agent exited)"  # the agents have left by then
_STOPPED = f"{_LOST}its agent was stopped by signal 15"
# Over Slurm, slurmstepd kills the agent as soon as its guardian ends: it may not come to tell that.
_ORPHANED = f"{_LOST}(its agent's guardian process was killed|srun: .*task 0: Killed)"
_COMMON = {
    "worker": Kind(worker, 6, (137,), r"rank {rank} \(\S+\) failed first: " + KILLED),
    "agent": Kind(agent, 4, (71,), f"{_LOST}its agent exited"),
    "agent SIGTERM": Kind(agent, 1, (71,), _STOPPED, signal.SIGTERM),
    "agent SIGSTOP": Kind(agent, 1, (71,), _SILENT, signal.SIGSTOP, CUT_LIMIT_S + LOOK_S),
    "guardian": Kind(guardian, 2, (71,), _ORPHANED),
    "controller SIGKILL": Kind(controller, 4, (-9,), "", early=True),
    "controller SIGTERM": Kind(controller, 1, (143,), "stopped by SIGTERM", signal.SIGTERM, early=True),
    "controller SIGINT": Kind(controller, 1, (130,), "stopped by SIGINT", signal.SIGINT, early=True),
    "controller SIGSTOP": Kind(controller, 1, (71,), _WOKEN, signal.SIGSTOP, CUT_LIMIT_S),
}
OVER_SSH: Mapping[str, Kind] = _COMMON | {
    "ssh client": Kind(client, 2, (71,), f"{_LOST}ssh on this machine was {KILLED}"),
    "network": Kind(None, 2, (69, 71), "{host}( was lost)?: ", limit_s=CUT_LIMIT_S, early=True),
}
SRUN_S = 4.0
"""So long a slurmstepd tries to tell a srun that is stopped of its end."""
OVER_SLURM: Mapping[str, Kind] = _COMMON | {
    "srun": Kind(client, 3, (71,), f"{_LOST}srun on this machine was {KILLED}"),
    "srun SIGTERM": Kind(client, 1, (71,), f"{_LOST}slurmstepd.* CANCELLED", signal.SIGTERM),
    "srun SIGSTOP": Kind(client, 1, (71,), _SILENT, signal.SIGSTOP, CUT_LIMIT_S + SRUN_S),
    "slurmstepd": Kind(slurmstepd, 3, (71,), _SILENT, limit_s=CUT_LIMIT_S),
}
"""A slurmstepd that is gone, Slurm tells nobody: the lease does."""


class Ground:
    """Hosts over ssh: who may be hit there, how a job reaches them, and what else may be left of it."""

    hosts = 4
    kinds: Mapping[str, Kind] = OVER_SSH
    together = False
    """Whether two may be hit at once on one host: somebody is left there who ends the rest."""

    def __init__(self, bed: Bed) -> None:
        self.bed, self.ranks = bed, self.hosts * PROCS

    @property
    def keys(self) -> str:
        """What a job file says to reach the hosts."""
        how = self.bed.launcher or {"ssh": {"config": f"{self.bed.directory}/ssh_config"}}
        names = [f"host{i + 1}" for i in range(self.hosts)]
        keys = {"nodes": names, "gpus_per_node": 0} | how
        return "".join(f"{name}: {json.dumps(value)}\n" for name, value in keys.items())

    def steps(self) -> set[str]:
        """What a scheduler takes to be running, each with its host."""
        return set()


class Allocation(Ground):
    """The nodes of a Slurm allocation, inside of which this process is."""

    hosts, kinds, together = NODES, OVER_SLURM, True

    def __init__(self, slurm: Slurm) -> None:
        super().__init__(slurm)
        self._slurm = slurm

    def steps(self) -> set[str]:
        """The steps that slurmctld lists."""
        return set(self._slurm.tool("squeue", "--steps", "--noheader", "--format=%i %N").splitlines())


@contextlib.contextmanager
def _over_ssh(directory: Path) -> Iterator[Ground]:
    with bed_of(Ground.hosts, directory) as bed:
        yield Ground(bed)


@contextlib.contextmanager
def _over_slurm(directory: Path) -> Iterator[Ground]:
    patch = pytest.MonkeyPatch.context()
    with patch as patched, slurm_of(NODES, directory) as slurm, inside(slurm, patched, "--no-kill"):
        yield Allocation(slurm)


GROUNDS = {"ssh": _over_ssh, "slurm": _over_slurm}
"""How each is made, in a directory of its own."""


MARK = "CHAOS"
"""A variable that the command has, and so its links, which no run's cookie tells."""

WORKER = workers.worker("""
    if os.environ["LOCAL_RANK"] == "1":
        resist()
    else:
        daemon(says=str)
    ready()
    wait()
""")


class Hit(NamedTuple):
    """Who is hit, as the ground names it, and of which rank."""

    kind: str
    rank: int


class Plan(NamedTuple):
    """What is hit at once, when so many workers are ready, and how many restarts may be."""

    hits: tuple[Hit, ...]
    moment: int
    restarts: int

    @property
    def name(self) -> str:
        """What is hit."""
        return " + ".join(hit.kind for hit in self.hits)


class Outcome(NamedTuple):
    """What came of it: seconds until everything was clean, the controller's peak memory."""

    clean_s: float
    peak_mib: float


class Before(NamedTuple):
    """What was there before a run: processes and listening sockets on the hosts, steps."""

    processes: set[int]
    ports: dict[str, set[tuple[str, str]]]
    steps: set[str]


Struck = list[tuple[Kind, Scene]]


def strike(ground: Ground, directory: Path, plan: Plan) -> Outcome:
    """Run a job, do what `plan` says to it, and see that everything is clean in time, and the cause told."""
    before = Before(ground.bed.processes(), _ports(ground.bed), ground.steps())
    run = Run(_job(ground, directory, plan), "--quiet", env={**os.environ, MARK: str(directory)})
    struck: Struck = []
    try:
        run.wait_ready(plan.moment)
        peak = peak_mib(run.process.pid)
        struck = _struck(run, ground, plan)
        hit_at = time.monotonic()
        hit(ground.bed, struck)
        ended_at = _end_what_restarts(run, struck, plan, plan.moment == ground.ranks)
        run.wait()
        heal(ground.bed, struck)
        _clean(run, ground, before, struck)
        clean_s = time.monotonic() - (ended_at or hit_at)
        assert _ports(ground.bed) == before.ports, "a port is left"
        _check_told(run, struck, plan, ended_at is not None)
        _check_next(ground, directory)
        return Outcome(clean_s, peak)
    finally:
        heal(ground.bed, struck)
        run.kill()


def _job(ground: Ground, directory: Path, plan: Plan) -> Path:
    times = f"stop: {STOP_S:g}s, lease: {LEASE_S:g}s, connect: 15s, rejoin: 1s"
    keys = f"procs_per_node: {PROCS}\ntimeouts: {{{times}}}\nrestarts: {{max: {plan.restarts}}}\n"
    return write_job(directory, WORKER, ground.keys + keys)


def _struck(run: Run, ground: Ground, plan: Plan) -> Struck:
    """The plan's hits; a rank that is not ready yet has another one stand in."""
    ready = run.worker_pids()
    ranks = [hit.rank if hit.rank in ready else min(ready, default=hit.rank) for hit in plan.hits]
    return [(ground.kinds[hit.kind], Scene(run, rank)) for hit, rank in zip(plan.hits, ranks, strict=True)]


def hit(bed: Bed, struck: Struck) -> None:
    # All are found first: who is above a worker can't be told any more when that has ended.
    victims = [(kind, scene, kind.victim(scene) if kind.victim else None) for kind, scene in struck]
    for kind, scene, pid in victims:
        if pid is None:
            bed.call("cut", scene.host)
        else:
            _kill(pid, kind.signum)
    for kind, scene in struck:
        if kind.must_be_woken:
            _wait_gone(scene.run.holders)
            _kill(scene.run.process.pid, signal.SIGCONT)


def heal(bed: Bed, struck: Struck) -> None:
    for kind, scene in struck:
        if kind.victim is None:
            bed.call("heal", scene.host)


def _kill(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was faster
        os.kill(pid, signum)


def _end_what_restarts(run: Run, struck: Struck, plan: Plan, started: bool) -> float | None:
    """A job that may restart is let do so, and then ended; the time of that."""
    if not plan.restarts or any(kind.is_controller and not kind.must_be_woken for kind, _ in struck):
        return None
    # One that had not started ends at once.
    surely = started and all(kind.victim is worker for kind, _ in struck)
    with contextlib.nullcontext() if surely else contextlib.suppress(AssertionError):
        run.wait_for("restart 1 of 1")
        _kill(run.process.pid, signal.SIGTERM)
        return time.monotonic()
    return None


def _clean(run: Run, ground: Ground, before: Before, struck: Struck) -> None:
    """Wait until nothing of the run is left, here or on any host, but steps that Slurm goes on listing."""
    holders = run.holders if any(run.directory.glob("runs/*")) else list[int]
    ours = f"{MARK}={run.directory}"
    _wait_gone(lambda: {*(ground.bed.processes() - before.processes), *holders(), *holders_of(ours)})
    # Slurm goes on listing a step that has lost its slurmstepd, which alone ends it.
    kept = tuple(f" {scene.host}" for kind, scene in struck if kind.victim is slurmstepd)

    def listed() -> list[str]:
        return [step for step in ground.steps() - before.steps if not step.endswith(kept)]

    wait_until(lambda: not listed(), lambda: f"Slurm still lists {listed()}")


def _wait_gone(find: Callable[[], Collection[int]]) -> None:
    """Wait until no such process is left; `LateError` if that takes long."""
    deadline = time.monotonic() + CUT_LIMIT_S
    while left := sorted(find()):
        wait_gone(left, max(0.0, deadline - time.monotonic()))


def _check_told(run: Run, struck: Struck, plan: Plan, ended: bool) -> None:
    """The status, and the cause: one of them, if there are two; and 143 if it was `ended` after a restart."""
    status, stderr = run.process.returncode, run.stderr
    assert "Traceback" not in stderr or status == -signal.SIGINT, stderr  # Python's own
    known = {status for kind, _ in struck for status in kind.statuses}
    if -signal.SIGKILL in known:
        known = {-signal.SIGKILL}
    if plan.moment == 0:
        # Before it has handlers a signal ends the interpreter: for a shell that is the same status.
        known |= {128 - status for status in known if status > 128}
    assert status in known | ({143} if ended else set()), (status, stderr)
    causes = [kind.told(scene) for kind, scene in struck] + (["stopped by SIGTERM"] if ended else [])
    assert status < 0 or re.search("|".join(causes), stderr), f"{causes} not told: {stderr}"


def _check_next(ground: Ground, directory: Path) -> None:
    """The next job runs on all hosts."""
    job = directory / "next.yaml"
    job.write_text(f"command: ['true']\n{ground.keys}")
    done = distlaunch("run", str(job), "--quiet")
    assert done.returncode == 0, f"the next run: {done.stderr}"


def _ports(bed: Bed) -> dict[str, set[tuple[str, str]]]:
    return {host.name: listening(host, ("tcp", "tcp6")) for host in bed.hosts.values()}
