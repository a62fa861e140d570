"""Random kills over a testbed of four hosts; after each, everything must be clean.

    python -m tests.faults.chaos --kills 200 --seed 7

The seed is printed, and replays the run: the same victims at the same moments, counted in events.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.cluster.hosts import Bed, bed_of, parent_of
from tests.faults.report import FOLDER
from tests.harness import Run, children_of, on_time, wait_gone, write_job

STOP_S, LEASE_S = 2.0, 6.0
HOSTS, PROCS = 4, 2
RANKS = HOSTS * PROCS
LIMIT_S = STOP_S + 2.0
CUT_LIMIT_S = LEASE_S + STOP_S + 2.0
MEMORY_KB = 64 << 10
"""What the controller may have over a bare interpreter."""

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


class Plan(NamedTuple):
    """One kill: what, of which rank or host, once so many workers are ready, and how many restarts may be."""

    kind: str
    victim: int
    moment: int
    restarts: int


class Outcome(NamedTuple):
    """What came of it: seconds until everything was clean, the status, the controller's peak memory."""

    clean_s: float
    status: int
    peak_kb: int


def plan_of(chance: random.Random) -> Plan:
    """The next kill."""
    kind = chance.choices(list(KINDS), [each.weight for each in KINDS.values()])[0]
    earliest = 0 if kind in EARLY else 1
    moment = RANKS if chance.random() < 0.7 else chance.randrange(earliest, RANKS)
    return Plan(kind, chance.randrange(RANKS), moment, chance.choice([0, 0, 0, 1]))


def _worker(run: Run, bed: Bed, plan: Plan) -> None:
    pids = run.worker_pids()
    _kill(pids.get(plan.victim, min(pids.values())))


def _guardians(run: Run) -> list[int]:
    """The guardians of ssh's sessions: parents of parents of the workers that are ready."""
    return sorted({parent_of(parent_of(pid)) for pid in run.worker_pids().values() if _alive(pid)})


def _agent(run: Run, bed: Bed, plan: Plan) -> None:
    found = _guardians(run)
    for agent in children_of(found[plan.victim % len(found)]):
        _kill(agent)


def _guardian(run: Run, bed: Bed, plan: Plan) -> None:
    found = _guardians(run)
    _kill(found[plan.victim % len(found)])


def _client(run: Run, bed: Bed, plan: Plan) -> None:
    found = children_of(run.process.pid)
    _kill(found[plan.victim % len(found)])


def _controller(signum: int) -> Callable[[Run, Bed, Plan], None]:
    return lambda run, bed, plan: _kill(run.process.pid, signum)


def _network(run: Run, bed: Bed, plan: Plan) -> None:
    bed.call("cut", f"host{plan.victim % HOSTS + 1}")


class Kind(NamedTuple):
    """Who is hit, how often, and the statuses that the command may then have."""

    hit: Callable[[Run, Bed, Plan], None]
    weight: int
    statuses: tuple[int, ...]


KINDS = {
    "worker": Kind(_worker, 6, (137,)),
    "agent": Kind(_agent, 4, (71,)),
    "guardian": Kind(_guardian, 2, (71,)),
    "ssh client": Kind(_client, 2, (69, 71)),
    "controller SIGKILL": Kind(_controller(signal.SIGKILL), 4, (-9,)),
    "controller SIGTERM": Kind(_controller(signal.SIGTERM), 1, (143,)),
    "controller SIGINT": Kind(_controller(signal.SIGINT), 1, (130,)),
    "network": Kind(_network, 2, (69, 71)),
}
EARLY = [kind for kind in KINDS if kind.startswith(("controller", "network"))]
"""Those that can be hit before a worker is ready."""


def _kill(pid: int, signum: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was faster
        os.kill(pid, signum)


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def strike(bed: Bed, folder: Path, plan: Plan) -> Outcome:
    """Run a job, do what `plan` says to it, and see that everything is clean in time."""
    keys = f"""
        nodes: [{", ".join(f"host{i + 1}" for i in range(HOSTS))}]
        procs_per_node: {PROCS}
        gpus_per_node: 0
        ssh: {{config: {bed.folder}/ssh_config}}
        timeouts: {{stop: {STOP_S:g}s, lease: {LEASE_S:g}s, connect: 15s, rejoin: 1s}}
        restarts: {{max: {plan.restarts}}}
    """
    processes, ports = bed.processes(), listening(bed)
    run = Run(write_job(folder, WORKER, keys), "--quiet")
    try:
        run.wait_ready(plan.moment)
        peak_kb = _peak_kb(run)
        hit_at = time.monotonic()
        KINDS[plan.kind].hit(run, bed, plan)
        ended_at = _end_what_restarts(run, plan)
        status = run.wait()
        if plan.kind == "network":
            bed.call("heal", f"host{plan.victim % HOSTS + 1}")
        clean_s = _clean(run, bed, processes, ended_at or hit_at)
        assert listening(bed) == ports, "a port is left"
        assert "Traceback" not in run.stderr or status == -signal.SIGINT, run.stderr  # Python's own
        assert status in _statuses(plan, ended_at is not None), (status, run.stderr)
        return Outcome(clean_s, status, peak_kb)
    finally:
        bed.call("heal", f"host{plan.victim % HOSTS + 1}")
        run.kill()


def _statuses(plan: Plan, ended: bool) -> set[int]:
    """What the command may say: also 143 if it was `ended` after a restart."""
    known = KINDS[plan.kind].statuses
    if plan.kind.startswith("controller") and plan.moment == 0:
        # Before it has handlers a signal ends the interpreter: for a shell that is the same status.
        known = (*known, *(128 - status for status in known if status > 128))
    return {*known, *([143] if ended else [])}


def _end_what_restarts(run: Run, plan: Plan) -> float | None:
    """A job that may restart is let do so, and then ended; the time of that."""
    if not plan.restarts or plan.kind.startswith("controller"):
        return None
    surely = plan.kind == "worker" and plan.moment == RANKS  # a job that had not started yet ends at once
    with contextlib.nullcontext() if surely else contextlib.suppress(AssertionError):
        run.wait_for("restart 1 of 1")
        _kill(run.process.pid, signal.SIGTERM)
        return time.monotonic()
    return None


def _peak_kb(run: Run) -> int:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{run.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0])
    return 0


def _clean(run: Run, bed: Bed, before: set[int], since: float) -> float:
    """Wait until nothing of the run is left on any host; the seconds since `since`."""
    deadline = time.monotonic() + CUT_LIMIT_S
    holders = run.holders if any(run.folder.glob("runs/*")) else list[int]
    while left := sorted(bed.processes() - before | set(holders())):
        wait_gone(left, max(0.0, deadline - time.monotonic()))
    return time.monotonic() - since


def listening(bed: Bed) -> set[tuple[str, str]]:
    """Every listening TCP socket of every host."""
    found = set()
    for host in bed.hosts.values():
        for table in ("tcp", "tcp6"):
            rows = Path(f"/proc/{host.pid}/net/{table}").read_text().splitlines()[1:]
            found |= {(host.name, row.split()[1]) for row in rows if row.split()[3] == "0A"}
    return found


class Tally:
    """What a series of kills came to, by kind."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[Outcome]] = {}

    def add(self, plan: Plan, outcome: Outcome) -> None:
        """Note one."""
        self.rounds.setdefault(plan.kind, []).append(outcome)

    @property
    def peak_kb(self) -> int:
        """The most memory that any controller had."""
        return max(outcome.peak_kb for outcomes in self.rounds.values() for outcome in outcomes)

    def table(self) -> str:
        """For people: kind, number, median and longest seconds until clean."""
        lines = ["| killed | times | clean after, median | at most |", "|---|---|---|---|"]
        for kind, outcomes in sorted(self.rounds.items()):
            times = sorted(outcome.clean_s for outcome in outcomes)
            middle, most = times[len(times) // 2], times[-1]
            lines.append(f"| {kind} | {len(times)} | {middle:.2f} s | {most:.2f} s |")
        return "\n".join([*lines, f"\ncontroller's peak memory: {self.peak_kb >> 10} MiB"])


def series(bed: Bed, folder: Path, kills: int, seed: int, tell: Callable[[str], object]) -> Tally:
    """So many random kills; `tell` gets a line for each. AssertionError when something is left."""
    chance, tally = random.Random(seed), Tally()
    for number in range(kills):
        plan = plan_of(chance)
        place = folder / f"{number}"
        place.mkdir()
        try:
            outcome = strike(bed, place, plan)
        except AssertionError as error:
            raise type(error)(f"{error}\nkill {number} of seed {seed}: {plan}") from error
        limit_s = CUT_LIMIT_S if plan.kind == "network" else LIMIT_S
        on_time(f"kill {number} of seed {seed}: {plan}", outcome.clean_s, limit_s)
        assert outcome.peak_kb <= MEMORY_KB, f"kill {number} of seed {seed}: {outcome.peak_kb} KiB"
        tally.add(plan, outcome)
        tell(f"{number:>4} {plan.kind}, {plan.moment}/{RANKS} ready: clean after {outcome.clean_s:.2f} s")
    return tally


def main() -> int:
    """Run a series from the command line; the table goes to stdout and is kept with the reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder, bed_of(HOSTS, Path(folder) / "bed") as bed:
        tally = series(bed, Path(folder), given.kills, given.seed, lambda line: print(line, flush=True))
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "chaos.md").write_text(f"seed {given.seed}\n\n{tally.table()}\n")
    print(tally.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
