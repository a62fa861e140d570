"""Jobs in a real Grid Engine: from its queue to their ends, over `qrsh -inherit`, and when something dies."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import GONE_S, Bed, bed_up, missing, parent_of
from tests.cluster.hosts import why_not as why_no_hosts
from tests.cluster.queues import NODES, Queue
from tests.harness import (
    PATIENCE_S,
    cookie_holders,
    descendants_of,
    distlaunch,
    kill,
    on_time,
    program,
    wait_gone,
    wait_until,
)
from tests.queued import check_stop_before_start, rows

pytestmark = pytest.mark.together("grid engine")
PLACES = """
    import os
    print("rank", os.environ["RANK"], "on", os.uname().nodename, flush=True)
"""
LONG = """
    import os, signal, sys, time
    def noted(signum, frame):
        print("rank", os.environ["RANK"], "got", signal.Signals(signum).name, flush=True)
        sys.exit(0)
    signal.signal(signal.SIGUSR1, noted)
    print("rank", os.environ["RANK"], "runs as", os.getpid(), "on", os.uname().nodename, flush=True)
    time.sleep(600)
"""


class GridEngine(Bed):
    """A testbed with Grid Engine: its qmaster, and an execd per host."""

    def commands(self, directory: Path) -> str:
        """A PATH by which its commands are found here, as on a login node; they run on its first host."""
        directory.mkdir()
        for name in ("qdel", "qstat", "qsub"):
            call = " ".join(self.argv("exec", "host1", "--", f"/usr/bin/{name}"))
            program(directory / name, f'exec {call} "$@"')
        return f"{directory}:{os.environ['PATH']}"

    def tool(self, *argv: str) -> str:
        """What a command has printed on the first host, whatever its status."""
        done = self.inside("host1", *argv)
        return done.stdout + done.stderr

    def wait_over(self, job: str) -> None:
        """Wait until the queue lists it no more."""
        wait_until(
            lambda: f"<JB_job_number>{job}<" not in self.tool("qstat", "-xml"),
            lambda: f"job {job} does not end: {self.tool('qstat')}",
        )

    def wait_accounted(self, job: str, status: str) -> None:
        """Wait until its accounts have that exit status; those of its tasks on other hosts come before."""
        ended = re.compile(rf"^exit_status +{status}\b", re.MULTILINE)
        asks = ("qacct", "-j", job)
        wait_until(
            lambda: bool(ended.search(self.tool(*asks))),
            lambda: f"job {job} has another status: {self.tool(*asks)}",
        )


class GridEngineQueue(Queue):
    """Jobs have two ranks on each node."""

    def __init__(self, engine: GridEngine, directory: Path) -> None:
        super().__init__(directory, "grid-engine", "procs_per_node: 2")
        self.engine = engine

    def section(self, pe: str = "mpi", extra: str = "") -> str:
        """A job's keys; `extra` is an option of qsub's."""
        # A job has the environment of a login, not ours, and would note its runs among the user's own.
        extras = [f"-v XDG_STATE_HOME={os.environ['XDG_STATE_HOME']}", *([extra] if extra else [])]
        return f"grid_engine: {{pe: {pe}, extra: {json.dumps(extras)}}}\n"

    def going(self, keys: str = "") -> "Going":
        """Submit a job, and wait until all its ranks run."""
        job = self.submit(LONG, keys or self.section())
        self.wait_for(job, "runs as", 2 * NODES)
        found = re.findall(r"rank (\d) runs as (\d+) on (\w+)", self.output(job))
        return Going(self, job, {int(rank): (int(pid), host) for rank, pid, host in found})


class Going:
    """A job whose ranks run: by rank, its process and its host."""

    def __init__(self, queue: GridEngineQueue, job: str, ranks: dict[int, tuple[int, str]]) -> None:
        self.queue, self.job, self.ranks = queue, job, ranks
        (self.run,) = {row["run"] for row in rows()}

    def agent(self) -> int:
        """That of the last rank, on another host than that of the job's script, which comes to it by qrsh."""
        return parent_of(self.ranks[max(self.ranks)][0])

    def controller(self) -> int:
        """The `distlaunch run` of the job's script: above agent and guardian of the first node."""
        return parent_of(parent_of(parent_of(self.ranks[0][0])))

    def qrsh(self) -> int:
        clients = [pid for pid in descendants_of(self.controller()) if _name(pid) == "qrsh"]
        assert len(clients) == NODES - 1
        return clients[-1]

    def gone_within(self, seconds: float) -> None:
        """All its processes are."""
        on_time("gone", wait_gone(cookie_holders(self.run), PATIENCE_S), seconds)

    def cause(self) -> dict[str, Any]:
        """Why its run has ended."""
        (run,) = self.queue.starts(self.job)
        document = json.loads((self.queue.directory / "runs" / run / "summary.json").read_text())
        return dict(document["cause"])


def _name(pid: int) -> str:
    """Nothing once it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GridEngine]:
    """Grid Engine on the hosts host1 … host3."""
    programs = ("sge_qmaster", "sge_execd", "qrsh")
    if reason := why_no_hosts() or missing(*(f"/usr/lib/gridengine/{name}" for name in programs)):
        pytest.skip(reason)
    with bed_up(GridEngine, NODES, tmp_path_factory.mktemp("ge") / "bed", "--grid-engine") as engine:
        yield engine


@pytest.fixture
def queue(engine: GridEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GridEngineQueue]:
    """A directory to submit from; in the end nothing that was submitted is left on any host."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", engine.commands(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    made = GridEngineQueue(engine, tmp_path)
    with engine.emptied():
        yield made
        for job in made.known:
            engine.tool("qdel", job)
            engine.wait_over(job)


def test_a_job_from_the_queue_to_its_end(queue: GridEngineQueue) -> None:
    job = queue.submit(PLACES, queue.section())
    attached = distlaunch("attach", job)
    assert attached.returncode == 0, attached.stderr + queue.output(job)
    said = re.findall(r"rank (\d) on (host\d)", distlaunch("logs", job).stdout)
    ranks = {int(rank): host for rank, host in said}
    assert sorted(ranks) == list(range(2 * NODES))
    hosts = [ranks[2 * node] for node in range(NODES)]
    assert sorted(hosts) == ["host1", "host2", "host3"]
    assert all(ranks[2 * node + 1] == host for node, host in enumerate(hosts))
    assert f"{NODES} nodes from Grid Engine job {job}: {', '.join(hosts)}" in queue.output(job)
    (row,) = rows("--all")
    assert (row["state"], row["where"]) == ("SUCCEEDED", f"Grid Engine job {job}: {', '.join(hosts)}")


def test_stops_a_job_that_waits(queue: GridEngineQueue) -> None:
    job = queue.submit(LONG, queue.section(extra="-h"))
    (row,) = rows()
    assert (row["run"], row["state"], row["where"]) == (job, "PENDING", "Grid Engine: hqw")
    check_stop_before_start(f"Grid Engine job {job}", job)


def test_names_the_setting_of_a_parallel_environment_that_starts_no_tasks(queue: GridEngineQueue) -> None:
    job = queue.submit(LONG, queue.section(pe="loose"))
    assert distlaunch("wait", job).returncode == 69
    assert "task refused; is control_slaves TRUE in `qconf -sp $PE`?" in queue.output(job)


def test_stops_a_job_that_runs(queue: GridEngineQueue) -> None:
    going = queue.going()
    running = [("RUNNING", 2 * NODES)]
    wait_until(lambda: [(row["state"], row["ranks"]) for row in rows()] == running, lambda: f"{rows()}")
    stopped = distlaunch("stop", going.job, status=0)
    assert f"CANCELLED, exit status 143: Grid Engine job {going.job} was cancelled" in stopped.stderr
    assert distlaunch("wait", going.job).returncode == 143
    going.gone_within(GONE_S)
    assert rows() == []


def test_ranks_get_the_signal_that_on_warning_names(queue: GridEngineQueue) -> None:
    # Counted from the start of the job's script: time enough for the ranks to start.
    going = queue.going(f"{queue.section(extra='-l s_rt=0:0:12')}on_warning: USR1")
    queue.wait_for(going.job, "got SIGUSR1", 2 * NODES)
    assert distlaunch("wait", going.job).returncode == 0


VICTIMS: dict[str, Callable[[Going], int]] = {
    "rank": lambda going: going.ranks[3][0],
    "agent": Going.agent,
    "guardian": lambda going: parent_of(going.agent()),
    "controller": Going.controller,
    "qrsh": Going.qrsh,
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_nothing_is_left_whatever_is_killed(queue: GridEngineQueue, victim: str) -> None:
    going = queue.going()
    kill(VICTIMS[victim](going))
    going.gone_within(GONE_S)
    if victim == "controller":
        queue.engine.wait_over(going.job)
    status = distlaunch("wait", going.job).returncode
    assert status == 137 if victim == "rank" else status != 0
    if victim == "rank":
        assert going.cause()["rank"] == 3
        queue.engine.wait_accounted(going.job, "137")
    elif victim in ("agent", "guardian"):
        assert going.ranks[max(going.ranks)][1] in going.cause()["text"]
