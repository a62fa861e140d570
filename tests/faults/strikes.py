"""One random kill, or two at once: a run that is hit as planned, after which everything must be clean."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from tests.cluster.hosts import Bed
from tests.faults.grounds import Ground
from tests.faults.memory import peak_mib
from tests.faults.victims import CUT_LIMIT_S, LEASE_S, PROCS, STOP_S, Kind, Scene
from tests.harness import Run, distlaunch, holders_of, wait_gone, wait_until, write_job

MARK = "CHAOS"
"""A variable that the command has, and so its links, which no run's cookie tells."""

WORKER = """
    import os, signal, subprocess, sys
    if os.environ["LOCAL_RANK"] == "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        daemon = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
        subprocess.Popen([sys.executable, "-S", "-c", daemon], start_new_session=True)
    os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
    while True:
        signal.pause()
"""


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
    ports: set[tuple[str, str]]
    steps: set[str]


Struck = list[tuple[Kind, Scene]]


def strike(ground: Ground, folder: Path, plan: Plan) -> Outcome:
    """Run a job, do what `plan` says to it, and see that everything is clean in time, and the cause told."""
    before = Before(ground.bed.processes(), listening(ground.bed), ground.steps())
    run = Run(_job(ground, folder, plan), "--quiet", env={**os.environ, MARK: str(folder)})
    struck: Struck = []
    try:
        run.wait_ready(plan.moment)
        peak = peak_mib(run.process.pid)
        struck = _struck(run, ground, plan)
        hit_at = time.monotonic()
        _hit(ground.bed, struck)
        ended_at = _end_what_restarts(run, struck, plan, plan.moment == ground.ranks)
        run.wait()
        _heal(ground.bed, struck)
        _clean(run, ground, before, struck)
        clean_s = time.monotonic() - (ended_at or hit_at)
        assert listening(ground.bed) == before.ports, "a port is left"
        _check_told(run, struck, plan, ended_at is not None)
        _check_next(ground, folder)
        return Outcome(clean_s, peak)
    finally:
        _heal(ground.bed, struck)
        run.kill()


def _job(ground: Ground, folder: Path, plan: Plan) -> Path:
    times = f"stop: {STOP_S:g}s, lease: {LEASE_S:g}s, connect: 15s, rejoin: 1s"
    keys = f"procs_per_node: {PROCS}\ntimeouts: {{{times}}}\nrestarts: {{max: {plan.restarts}}}\n"
    return write_job(folder, WORKER, ground.keys + keys)


def _struck(run: Run, ground: Ground, plan: Plan) -> Struck:
    """The plan's hits; a rank that is not ready yet has another one stand in."""
    ready = run.worker_pids()
    ranks = [hit.rank if hit.rank in ready else min(ready, default=hit.rank) for hit in plan.hits]
    return [(ground.kinds[hit.kind], Scene(run, rank)) for hit, rank in zip(plan.hits, ranks, strict=True)]


def _hit(bed: Bed, struck: Struck) -> None:
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


def _heal(bed: Bed, struck: Struck) -> None:
    for kind, scene in struck:
        if kind.victim is None:
            bed.call("heal", scene.host)


def _kill(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was faster
        os.kill(pid, signum)


def _end_what_restarts(run: Run, struck: Struck, plan: Plan, started: bool) -> float | None:
    """A job that may restart is let do so, and then ended; the time of that."""
    if not plan.restarts or any(kind.ends_run for kind, _ in struck):
        return None
    surely = started and all(kind.is_worker for kind, _ in struck)  # one that had not started ends at once
    with contextlib.nullcontext() if surely else contextlib.suppress(AssertionError):
        run.wait_for("restart 1 of 1")
        _kill(run.process.pid, signal.SIGTERM)
        return time.monotonic()
    return None


def _clean(run: Run, ground: Ground, before: Before, struck: Struck) -> None:
    """Wait until nothing of the run is left, here or on any host, but steps that Slurm goes on listing."""
    holders = run.holders if any(run.folder.glob("runs/*")) else list[int]
    ours = f"{MARK}={run.folder}"
    _wait_gone(lambda: {*(ground.bed.processes() - before.processes), *holders(), *holders_of(ours)})
    kept = tuple(f" {scene.host}" for kind, scene in struck if kind.loses_step)

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


def _check_next(ground: Ground, folder: Path) -> None:
    """The next job runs on all hosts."""
    job = folder / "next.yaml"
    job.write_text(f"command: ['true']\n{ground.keys}")
    done = distlaunch("run", str(job), "--quiet")
    assert done.returncode == 0, f"the next run: {done.stderr}"


def listening(bed: Bed) -> set[tuple[str, str]]:
    """Every listening TCP socket of every host."""
    found = set()
    for host in bed.hosts.values():
        for table in ("tcp", "tcp6"):
            rows = Path(f"/proc/{host.pid}/net/{table}").read_text().splitlines()[1:]
            found |= {(host.name, row.split()[1]) for row in rows if row.split()[3] == "0A"}
    return found
