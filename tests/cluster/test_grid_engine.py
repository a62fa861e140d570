"""Jobs in a real Grid Engine: from its queue to their ends, over `qrsh -inherit`, and when something dies."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.cluster.grid_engine import NODES, GridEngine, grid_engine_of, why_not
from tests.cluster.hosts import GONE_S
from tests.harness import (
    PATIENCE_S,
    cookie_holders,
    descendants_of,
    distlaunch,
    kill,
    on_time,
    wait_gone,
    wait_until,
)
from tests.queued import Printed, check_stop_before_start, rows

pytestmark = pytest.mark.together("grid engine")
PLACES = """
    import os
    print("rank", os.environ["RANK"], "on", os.uname().nodename, flush=True)
"""
LONG = """
    import os, time
    print("rank", os.environ["RANK"], "runs as", os.getpid(), "on", os.uname().nodename, flush=True)
    time.sleep(600)
"""
NOTED = """
    import os, signal, sys, time
    def noted(signum, frame):
        print("rank", os.environ["RANK"], "got", signal.Signals(signum).name, flush=True)
        sys.exit(0)
    signal.signal(signal.SIGUSR1, noted)
    print("rank", os.environ["RANK"], "runs as", os.getpid(), "on", os.uname().nodename, flush=True)
    time.sleep(600)
"""


class Queue(Printed):
    """Submits jobs, and looks at them as a user does."""

    def __init__(self, engine: GridEngine, folder: Path) -> None:
        super().__init__(folder, "grid-engine")
        self.engine = engine
        self.known: list[str] = []

    def job(self, worker: str, pe: str = "mpi", keys: str = "", extra: str = "") -> Path:
        """A job file for three nodes with two ranks each; `extra` is an option of qsub's."""
        (self.folder / "worker.py").write_text(dedent(worker))
        path = self.folder / "train.yaml"
        # A job has the environment of a login, not ours, and would note its runs among the user's own.
        extras = [f"-v XDG_STATE_HOME={os.environ['XDG_STATE_HOME']}", *([extra] if extra else [])]
        section = f"grid_engine: {{pe: {pe}, extra: {json.dumps(extras)}}}"
        size = f"gpus_per_node: 0\nnodes: {NODES}\nprocs_per_node: 2"
        path.write_text(f"script: worker.py\n{size}\n{section}\n{keys}\n")
        return path

    def submit(self, worker: str, **more: str) -> str:
        """Submit it; the job's id, which is all that is printed."""
        done = distlaunch("submit", str(self.job(worker, **more)))
        assert (done.returncode, done.stderr) == (0, "")
        assert re.fullmatch(r"\d+\n", done.stdout), done.stdout
        self.known.append(done.stdout.strip())
        return self.known[-1]

    def going(self, worker: str, **more: str) -> "Going":
        """Submit it, and wait until all its ranks run."""
        job = self.submit(worker, **more)
        self.wait_for(job, "runs as", 2 * NODES)
        found = re.findall(r"rank (\d) runs as (\d+) on (\w+)", self.output(job))
        return Going(self, job, {int(rank): (int(pid), host) for rank, pid, host in found})

    def summary(self, job: str) -> dict[str, Any]:
        """How its run has ended."""
        started = (self.folder / "runs" / f"grid-engine-{job}.jsonl").read_text()
        document: dict[str, Any] = json.loads(
            (self.folder / "runs" / json.loads(started)["run"] / "summary.json").read_text()
        )
        return document


class Going:
    """A job whose ranks run: by rank, its process and its host."""

    def __init__(self, queue: Queue, job: str, ranks: dict[int, tuple[int, str]]) -> None:
        self.queue, self.job, self.ranks = queue, job, ranks
        (self.run,) = {row["run"] for row in rows()}

    def elsewhere(self) -> int:
        """A rank on another host than that of the job's script, which comes to its agent by qrsh."""
        return max(self.ranks)

    def above(self, rank: int, times: int) -> int:
        """The process so many generations above a rank: 1 = its agent, 2 = the guardian."""
        pid = self.ranks[rank][0]
        for _ in range(times):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return pid

    @property
    def controller(self) -> int:
        """The `distlaunch run` of the job's script: the guardian of the first node is a child of it."""
        return self.above(0, 3)

    def wait_running(self) -> None:
        """Wait until `ps` says so."""
        running = [("RUNNING", 2 * NODES)]
        wait_until(lambda: [(row["state"], row["ranks"]) for row in rows()] == running, lambda: f"{rows()}")

    def gone_within(self, seconds: float) -> None:
        """All its processes are."""
        on_time("gone", wait_gone(cookie_holders(self.run), PATIENCE_S), seconds)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GridEngine]:
    """Grid Engine on the hosts host1 … host3."""
    if reason := why_not():
        pytest.skip(reason)
    with grid_engine_of(NODES, tmp_path_factory.mktemp("ge") / "bed") as engine:
        yield engine


@pytest.fixture
def queue(engine: GridEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    """A folder to submit from; in the end nothing that was submitted is left on any host."""
    before = engine.processes()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", engine.commands(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    made = Queue(engine, tmp_path)
    yield made
    for job in made.known:
        engine.tool("qdel", job)
        engine.wait_over(job)
    wait_gone(sorted(engine.processes() - before), 10.0)


def test_a_job_from_the_queue_to_its_end(queue: Queue) -> None:
    job = queue.submit(PLACES)
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


def test_a_rank_that_fails_is_named_and_its_status_is_the_jobs(queue: Queue) -> None:
    job = queue.submit('__import__("sys").exit(5 if __import__("os").environ["RANK"] == "4" else 0)')
    assert distlaunch("wait", job).returncode == 5
    assert "rank 4 (host" in queue.output(job)
    queue.engine.wait_over(job)
    queue.engine.wait_accounted(job, "5")


def test_a_job_is_stopped_while_it_waits(queue: Queue) -> None:
    job = queue.submit(LONG, extra="-h")
    (row,) = rows()
    assert (row["run"], row["state"], row["where"]) == (job, "PENDING", "Grid Engine: hqw")
    check_stop_before_start(f"Grid Engine job {job}", job)


def test_a_job_that_can_never_start_is_refused_in_the_engines_words(queue: Queue) -> None:
    done = distlaunch("submit", str(queue.job(LONG, pe="no-such-pe")))
    assert (done.returncode, done.stdout) == (1, "")
    assert 'the requested parallel environment "no-such-pe" does not exist' in done.stderr


def test_a_job_is_stopped_while_it_runs(queue: Queue) -> None:
    going = queue.going(LONG)
    going.wait_running()
    stopped = distlaunch("stop", going.job)
    assert stopped.returncode == 0, stopped.stderr
    assert f"Grid Engine job {going.job} ends soon: sent SIGTERM to all ranks" in stopped.stderr
    assert distlaunch("wait", going.job).returncode == 143
    going.gone_within(GONE_S)
    assert rows() == []


def test_ranks_get_the_signal_that_on_notice_names(queue: Queue) -> None:
    # Counted from the start of the job's script: time enough for the ranks to start.
    going = queue.going(NOTED, keys="on_notice: USR1", extra="-l s_rt=0:0:12")
    queue.wait_for(going.job, "got SIGUSR1", 2 * NODES)
    assert distlaunch("wait", going.job).returncode == 0


def test_a_rank_is_killed(queue: Queue) -> None:
    going = queue.going(LONG)
    kill(going.ranks[3][0])
    going.gone_within(GONE_S)
    assert distlaunch("wait", going.job).returncode == 137
    assert queue.summary(going.job)["cause"]["rank"] == 3


@pytest.mark.parametrize("above", [1, 2], ids=["agent", "guardian"])
def test_an_agent_or_its_guardian_is_killed(queue: Queue, above: int) -> None:
    going = queue.going(LONG)
    rank = going.elsewhere()
    kill(going.above(rank, above))
    going.gone_within(GONE_S)
    assert distlaunch("wait", going.job).returncode != 0
    assert going.ranks[rank][1] in queue.summary(going.job)["cause"]["text"]


def test_the_command_is_killed(queue: Queue) -> None:
    going = queue.going(LONG)
    kill(going.controller)
    going.gone_within(GONE_S)
    queue.engine.wait_over(going.job)
    assert distlaunch("wait", going.job).returncode != 0


def test_a_qrsh_is_killed(queue: Queue) -> None:
    going = queue.going(LONG)
    clients = [pid for pid in descendants_of(going.controller) if _name(pid) == "qrsh"]
    assert len(clients) == NODES - 1
    kill(clients[-1])
    going.gone_within(GONE_S)
    assert distlaunch("wait", going.job).returncode != 0


def test_a_parallel_environment_that_starts_no_tasks_is_told(queue: Queue) -> None:
    job = queue.submit(LONG, pe="loose")
    assert distlaunch("wait", job).returncode == 69
    assert "task refused; is control_slaves TRUE in `qconf -sp $PE`?" in queue.output(job)


def _name(pid: int) -> str:
    """Nothing once it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
