"""Jobs in a real Grid Engine: from its queue to their ends, over `qrsh -inherit`, and when something dies."""

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import GONE_S, Bed, bed_up, missing, parent_of, program_of
from tests.cluster.hosts import why_not as why_no_hosts
from tests.harness import (
    PATIENCE_S,
    completed,
    cookie_holders,
    descendants_of,
    distlaunch,
    distlaunch_argv,
    on_time,
    program,
    wait_gone,
    wait_until,
)
from tests.queued import NODES, Queue, rows

pytestmark = pytest.mark.together("grid engine")
PLACES = 'import os; print("rank", os.environ["RANK"], "on", os.uname().nodename, flush=True)'
LONG = """
    import os, signal
    def noted(signum, frame):
        print("got", signal.Signals(signum).name, flush=True)
        raise SystemExit
    for signum in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(signum, noted)
    print("rank", os.environ["RANK"], "runs as", os.getpid(), "on", os.uname().nodename, flush=True)
    signal.pause()
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
        listed = f"<JB_job_number>{job}<"
        wait_until(lambda: listed not in self.tool("qstat", "-xml"), lambda: self.tool("qstat"))


class GridEngineQueue(Queue):
    """Jobs have two ranks on each node."""

    def __init__(self, engine: GridEngine, directory: Path) -> None:
        super().__init__(directory, "grid-engine", "procs_per_node: 2")
        self.engine = engine

    def section(self, pe: str = "mpi", *extra: str) -> str:
        """A job's keys; `extra` are options of qsub's."""
        # A job has the environment of a login, not ours, and would note its runs among the user's own.
        extras = [f"-v XDG_STATE_HOME={os.environ['XDG_STATE_HOME']}", *extra]
        return f"grid_engine: {{pe: {pe}, extra: {json.dumps(extras)}}}\n"

    def going(self, *extra: str, keys: str = "") -> "Going":
        """Submit a job, and wait until all its ranks run."""
        job = self.submit(LONG, self.section("mpi", *extra) + keys)
        self.wait_for(job, "runs as", 2 * NODES)
        found = re.findall(r"rank (\d) runs as (\d+) on (\w+)", self.output(job))
        return Going(self, job, {int(rank): (int(pid), host) for rank, pid, host in found})


class Going:
    """A job whose ranks run: by rank, its process and its host."""

    def __init__(self, queue: GridEngineQueue, job: str, ranks: dict[int, tuple[int, str]]) -> None:
        self.queue, self.job, self.ranks = queue, job, ranks
        (self.run,) = {row["run"] for row in rows()}

    def wait_gone(self) -> None:
        """All its processes are soon."""
        on_time("gone", wait_gone(cookie_holders(self.run), 60.0), GONE_S)


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
    said = dict(re.findall(r"rank (\d) on (host\d)", distlaunch("logs", job).stdout))
    hosts = [said[rank] for rank in "024"]
    assert said == dict(zip("012345", [host for host in hosts for _ in range(2)], strict=True))
    assert sorted(hosts) == ["host1", "host2", "host3"]
    assert f"{NODES} nodes from Grid Engine job {job}: {', '.join(hosts)}" in queue.output(job)
    (row,) = rows("--all")
    assert (row["state"], row["where"]) == ("SUCCEEDED", f"Grid Engine job {job}: {', '.join(hosts)}")


def test_names_the_setting_of_a_parallel_environment_that_starts_no_tasks(queue: GridEngineQueue) -> None:
    job = queue.submit(LONG, queue.section(pe="loose"))
    assert distlaunch("wait", job).returncode == 69
    assert "task refused; is control_slaves TRUE in `qconf -sp $PE`?" in queue.output(job)


def test_stops_a_job_that_runs(queue: GridEngineQueue) -> None:
    going = queue.going()
    wait_until(
        lambda: [(row["state"], row["ranks"]) for row in rows()] == [("RUNNING", 6)], lambda: f"{rows()}"
    )
    for pid, _ in going.ranks.values():  # `stop` sends SIGUSR2 to all processes of a job, except root's
        ignored = re.findall(r"(?m)^SigIgn:\t(.*)", Path(f"/proc/{pid}/status").read_text())
        assert int(ignored[0], 16) & 1 << (signal.SIGUSR2 - 1)
    stopped = distlaunch("stop", going.job, status=0)
    assert queue.output(going.job).count("got SIGTERM") == 2 * NODES
    assert f"CANCELLED, exit status 143: Grid Engine job {going.job} was cancelled" in stopped.stderr
    assert distlaunch("wait", going.job).returncode == 143
    going.wait_gone()
    assert rows() == []


def test_what_ones_own_script_does_after_its_run_is_unknown(
    queue: GridEngineQueue, engine: GridEngine
) -> None:
    run = shlex.join(distlaunch_argv("run", str(queue.job("pass")), "-q"))
    state = f"XDG_STATE_HOME={shlex.quote(os.environ['XDG_STATE_HOME'])}"
    (queue.directory / "own.sh").write_text(
        f"#!/bin/sh\n{state} {run}\nread go <{queue.directory}/go\nexit 5\n"
    )
    os.mkfifo(queue.directory / "go")
    submit = ("qsub", "-terse", "-cwd", "-S", "/bin/sh", "-pe", "mpi", "6", str(queue.directory / "own.sh"))
    job = completed(submit, 0).stdout.strip()
    queue.known.append(job)
    wait_until(lambda: [row["state"] for row in rows("-a")] == ["SUCCEEDED"], lambda: str(rows("-a")))
    with subprocess.Popen(distlaunch_argv("wait", job), stderr=subprocess.PIPE, text=True) as waiting:
        (queue.directory / "go").write_text("\n")
        _, told = waiting.communicate(timeout=PATIENCE_S)
    assert (waiting.returncode, "whether its script failed after the run is unknown" in told) == (0, True)


def test_ranks_get_the_signal_that_on_warning_names(queue: GridEngineQueue) -> None:
    # Counted from the start of the job's script: time enough for the ranks to start.
    going = queue.going("-l s_rt=0:0:12", keys="on_warning: USR1")
    queue.wait_for(going.job, "got SIGUSR1", 2 * NODES)
    assert distlaunch("wait", going.job).returncode == 0


@pytest.mark.parametrize("victim", ["rank", "agent", "guardian", "controller", "qrsh"])
def test_nothing_is_left_whatever_is_killed(queue: GridEngineQueue, victim: str) -> None:
    """The last rank's agent is on another host than the job's script, from where qrsh has started it."""
    going, engine = queue.going(), queue.engine
    controller, agent = going.ranks[0][0], parent_of(going.ranks[5][0])
    for _ in range(3):  # by the agent and the guardian of the first node
        controller = parent_of(controller)
    clients = [pid for pid in descendants_of(controller) if program_of(pid) == "qrsh"]
    assert len(clients) == NODES - 1
    pids = {"rank": going.ranks[3][0], "agent": agent, "guardian": parent_of(agent), "controller": controller}
    os.kill(pids.get(victim, clients[-1]), signal.SIGKILL)
    going.wait_gone()
    if victim == "controller":
        engine.wait_over(going.job)
    status = distlaunch("wait", going.job).returncode
    assert status == 137 if victim == "rank" else status != 0
    summary = queue.directory / "runs" / going.run / "summary.json"
    if victim == "rank":
        assert json.loads(summary.read_text())["cause"]["rank"] == 3
        # Its tasks on other hosts have accounts before it.
        accounts = ("qacct", "-j", going.job)
        ended = re.compile(r"^exit_status +137\b", re.MULTILINE)
        wait_until(lambda: bool(ended.search(engine.tool(*accounts))), lambda: engine.tool(*accounts))
    elif victim in ("agent", "guardian"):
        assert going.ranks[max(going.ranks)][1] in json.loads(summary.read_text())["cause"]["text"]
