"""Random kills over a testbed; after each, everything must be clean, the cause told, and the next job run.

    python -m tests.faults.chaos --kills 200 --seed 7
    python -m tests.faults.chaos --on slurm --kills 100

The seed is printed, and replays the run: the same victims at the same moments, counted in events.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from distlaunch.agent.guardian import LOOK_S
from tests import harness
from tests.cluster import workers
from tests.cluster.hosts import Bed, bed_of, parent_of
from tests.cluster.slurm import NODES, Slurm, inside, slurm_of
from tests.faults.memory import peak_mib
from tests.faults.networks import listening
from tests.harness import Going, Run, children_of, command_line, on_time, running, wait_gone, wait_until

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
    "agent": Kind(agent, 4, (71,), f"{_LOST}its agent was {KILLED}"),
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
def ground_of(on: str, directory: Path) -> Iterator[Ground]:
    """Hosts over `ssh`, or with `slurm`, in a directory of their own."""
    with contextlib.ExitStack() as stack:
        if on == "ssh":
            yield Ground(stack.enter_context(bed_of(Ground.hosts, directory)))
            return
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        slurm = stack.enter_context(slurm_of(NODES, directory))
        stack.enter_context(inside(slurm, patch, "--no-kill"))
        yield Allocation(slurm)


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


class Plan(NamedTuple):
    """What is hit at once, when so many workers are ready, and how many restarts may be.

    `hits` are who is hit, as the ground names it, and of which rank.
    """

    hits: tuple[tuple[str, int], ...]
    moment: int
    restarts: int

    @property
    def name(self) -> str:
        """What is hit."""
        return " + ".join(kind for kind, _ in self.hits)


Struck = list[tuple[Kind, Scene]]


def strike(ground: Ground, directory: Path, plan: Plan) -> tuple[float, float]:
    """Run a job, do what `plan` says to it, and see that everything is clean in time, and the cause told.

    The seconds until everything was clean, and the controller's peak memory in MiB.
    """
    before, ports, steps = ground.bed.processes(), _ports(ground.bed), ground.steps()
    times = f"stop: {STOP_S:g}s, lease: {LEASE_S:g}s, connect: 15s, rejoin: 1s"
    keys = f"procs_per_node: {PROCS}\ntimeouts: {{{times}}}\nrestarts: {{max: {plan.restarts}}}\n"
    job, struck = harness.write_job(directory, WORKER, ground.keys + keys), Struck()
    with running(job, "--quiet", env={**os.environ, MARK: str(directory)}) as run:
        try:
            ready = run.wait_ready(plan.moment)
            peak = peak_mib(run.process.pid)
            for name, rank in plan.hits:  # if one is not ready yet, another one stands in
                stands_in = rank if rank in ready else min(ready, default=rank)
                struck.append((ground.kinds[name], Scene(run, stands_in)))
            hit_at = time.monotonic()
            hit(ground.bed, struck)
            ended_at = _end_what_restarts(run, struck, plan, plan.moment == ground.ranks)
            run.wait()
        finally:
            heal(ground.bed, struck)
        _clean(run, ground, before, steps, struck)
        clean_s = time.monotonic() - (ended_at or hit_at)
    assert _ports(ground.bed) == ports, "a port is left"
    _check_told(run, struck, plan, ended_at is not None)
    (directory / "next.yaml").write_text(f"command: ['true']\n{ground.keys}")
    harness.distlaunch("run", str(directory / "next.yaml"), "--quiet", status=0)
    return clean_s, peak


def hit(bed: Bed, struck: Struck) -> None:
    # All are found first: who is above a worker can't be told any more when that has ended.
    victims = [(kind, scene, kind.victim(scene) if kind.victim else None) for kind, scene in struck]
    for kind, scene, pid in victims:
        if pid is None:
            bed.call("cut", scene.host)
        else:
            with contextlib.suppress(ProcessLookupError):  # it was faster
                os.kill(pid, kind.signum)
    for kind, scene in struck:
        if kind.must_be_woken:
            _wait_gone(scene.run.holders)
            scene.run.process.send_signal(signal.SIGCONT)


def heal(bed: Bed, struck: Struck) -> None:
    for kind, scene in struck:
        if kind.victim is None:
            bed.call("heal", scene.host)


def _end_what_restarts(run: Run, struck: Struck, plan: Plan, started: bool) -> float | None:
    """A job that may restart is let do so, and then ended; the time of that."""
    if not plan.restarts or any(kind.is_controller and not kind.must_be_woken for kind, _ in struck):
        return None
    # One that had not started ends at once.
    surely = started and all(kind.victim is worker for kind, _ in struck)
    with contextlib.nullcontext() if surely else contextlib.suppress(AssertionError):
        run.wait_for("restart 1 of 1")
        run.process.send_signal(signal.SIGTERM)
        return time.monotonic()
    return None


def _clean(run: Run, ground: Ground, before: set[int], steps: set[str], struck: Struck) -> None:
    """Wait until nothing of the run is left, here or on any host, but steps that Slurm goes on listing."""
    holders = run.holders if any(run.directory.glob("runs/*")) else list[int]
    marked = partial(harness.holders_of, f"{MARK}={run.directory}")
    _wait_gone(lambda: {*(ground.bed.processes() - before), *holders(), *marked()})
    # Slurm goes on listing a step that has lost its slurmstepd, which alone ends it.
    kept = tuple(f" {scene.host}" for kind, scene in struck if kind.victim is slurmstepd)

    def listed() -> list[str]:
        return [step for step in ground.steps() - steps if not step.endswith(kept)]

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


def _ports(bed: Bed) -> dict[str, set[tuple[str, str]]]:
    return {host.name: listening(host, ("tcp", "tcp6")) for host in bed.hosts.values()}


# A series

TWO, EARLY = 0.15, 0.3
"""So many are two kills at once, and of the others so many come before all workers are ready."""
MEMORY_MIB = 64.0
"""What the controller may have over a bare interpreter."""


def plan_of(chance: random.Random, ground: Ground) -> Plan:
    """The next kill, or two; there is one controller, and nobody ends anything while it is stopped."""

    def one_of(kinds: Mapping[str, Kind]) -> str:
        return chance.choices(list(kinds), [kind.weight for kind in kinds.values()])[0]

    name, rank = one_of(ground.kinds), chance.randrange(ground.ranks)
    kind, restarts = ground.kinds[name], chance.choice([0, 0, 0, 1])
    if not kind.must_be_woken and chance.random() < TWO:
        others = {name: each for name, each in ground.kinds.items() if not each.must_be_woken}
        beside = {n: each for n, each in others.items() if not (kind.is_controller and each.is_controller)}
        hosts_on = chance.randrange(0 if ground.together else 1, ground.hosts)
        second = (one_of(beside), (rank + hosts_on * PROCS) % ground.ranks)
        return Plan(((name, rank), second), ground.ranks, restarts)
    early = chance.random() < EARLY
    moment = chance.randrange(0 if kind.early else 1, ground.ranks) if early else ground.ranks
    return Plan(((name, rank),), moment, restarts)


def series(
    ground: Ground, directory: Path, kills: int, seed: int
) -> Iterator[tuple[Plan, float, float, float]]:
    """So many random kills, with a line for each: the seconds until all was clean, the limit, the memory.

    AssertionError when something is left. If two take long, one is noticed only after the other.
    """
    chance = random.Random(seed)
    for number in range(kills):
        plan = plan_of(chance, ground)
        limit_s = LIMIT_S + sum(ground.kinds[kind].limit_s - LIMIT_S for kind, _ in plan.hits)
        this = f"kill {number} of seed {seed}: {plan}"
        place = directory / f"{number}"
        place.mkdir()
        try:
            clean_s, peak_mib = strike(ground, place, plan)
        except AssertionError as error:
            raise type(error)(f"{error}\n{this}") from error
        on_time(this, clean_s, limit_s)
        assert peak_mib <= MEMORY_MIB, f"{this}: {peak_mib} MiB"
        ready = f"{plan.moment}/{ground.ranks} ready"
        print(f"{number:>4} {plan.name}, {ready}: clean after {clean_s:.2f} s", flush=True)
        yield plan, clean_s, limit_s, peak_mib


def main() -> None:
    """Run a series from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--on", choices=("ssh", "slurm"), default="ssh")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory, ground_of(given.on, Path(directory) / "bed") as ground:
        kills = list(series(ground, Path(directory), given.kills, given.seed))
    _, clean_s, _, peak_mib = zip(*kills, strict=True)
    took = f"median {statistics.median(clean_s):.2f} s, at most {max(clean_s):.2f} s"
    print(f"clean after each of {len(kills)}: {took}; controller's peak memory: {max(peak_mib):.0f} MiB")


if __name__ == "__main__":
    main()
