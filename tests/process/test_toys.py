"""A scheduler of another package, added by an entry point, and a transport of a new type."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from distlaunch.agent.messages import FindRoute, RouteFound
from distlaunch.job.spec import JobSpec, Logs, NodeSpec, Program
from distlaunch.launch.agents import Agents
from distlaunch.transports import TABLE
from distlaunch.transports.failure import Kind
from tests.harness import ROOT, completed, distlaunch, write_job
from tests.process import toy_scheduler
from tests.process.toy_transport import Room
from tests.queued import check_stop_before_start, rows
from tests.replays import check_replays

HERE = os.uname().nodename
WORKER = """
    import os
    print(*(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "NODE_RANK", "TOY_HOST")))
"""
KEYS = "gpus_per_node: 0\ntoy: {color: red}"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to submit from, with the scheduler installed in a place of its own."""
    site, queue = tmp_path / "site", tmp_path / "queue"
    info = site / "toy_scheduler-1.0.dist-info"
    info.mkdir(parents=True)
    queue.mkdir()
    (site / "toy_scheduler.py").write_text(Path(toy_scheduler.__file__).read_text())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-scheduler\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[distlaunch.schedulers]\ntoy = toy_scheduler:scheduler\n")
    monkeypatch.setenv("PYTHONPATH", f"{site}:{ROOT}")
    monkeypatch.setenv("TOY_QUEUE", str(queue))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_job_is_submitted_to_it_and_shown_until_its_end(directory: Path) -> None:
    job = str(write_job(directory, WORKER, KEYS))
    done = distlaunch("submit", job)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert (directory / "queue" / "1").read_text().startswith("#!/bin/sh\n# color: red\n")
    (row,) = rows()
    assert (row["run"], row["state"], row["where"]) == ("1", "PENDING", "Toy: in line")
    script = (directory / "queue" / "1").rename(directory / "begun.sh")
    env = {**os.environ, "TOY_JOB": "1", "TOY_HOSTS": f"{HERE} host2"}
    ran = completed(["sh", script], env=env, status=0)
    assert set(ran.stdout.splitlines()) == {f"[{HERE}:0] 0 2 0 None", "[host2:1] 1 2 1 host2"}
    assert f"2 nodes from Toy job 1: {HERE}, host2 (" in ran.stderr
    (row,) = rows("--all")
    assert (row["state"], row["where"]) == ("SUCCEEDED", f"Toy job 1: {HERE}, host2")
    assert distlaunch("wait", "1").returncode == 0


def test_a_job_that_waits_in_its_queue_is_stopped(directory: Path) -> None:
    assert distlaunch("submit", "--to", "toy", str(write_job(directory, WORKER, KEYS))).returncode == 0
    check_stop_before_start("Toy job 1", "1")


def test_checks_and_suggests_its_section(directory: Path) -> None:
    done = distlaunch("submit", str(write_job(directory, WORKER, "toy: {colr: red}")))
    assert "toy.colr: unknown key; did you mean color?" in done.stderr
    done = distlaunch("run", str(write_job(directory, WORKER, "toi: {}")))
    assert "toi: unknown key; did you mean toy?" in done.stderr
    assert '"toy"' in distlaunch("schema").stdout
    unknown = distlaunch("submit", "--to", "none", "job.yaml")
    assert "'flux', 'toy'" in " ".join(unknown.stderr.replace("│", " ").split())


@pytest.mark.parametrize("command", ["run", "dry-run"])
def test_a_job_outside_of_any_allocation_loads_no_scheduler(directory: Path, command: str) -> None:
    env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = distlaunch(command, str(write_job(directory, WORKER, "gpus_per_node: 0")), env=env, status=0)
    assert "distlaunch.schedulers\n" in done.stderr
    assert "distlaunch.schedulers." not in done.stderr
    assert "importlib.metadata" not in done.stderr


# A transport: a type of its own is all that it takes


def test_a_toy_transport_reaches_a_node_and_tells_why_it_does_not(tmp_path: Path) -> None:
    rooms = [Room(listener=True), Room(listener=False)]
    nodes = tuple(NodeSpec(f"room{i}", room) for i, room in enumerate(rooms))
    spec = JobSpec("job", nodes, Program("command", ("true",), workdir=str(tmp_path)), Logs(str(tmp_path)))
    with Agents(spec) as agents:
        answers = agents.ask({0: FindRoute("127.0.0.1")}, (RouteFound,))
        assert (answers[0].interface, agents.present) == ("lo", [0])
        assert (agents.failures[1].kind, agents.failures[1].words) == (Kind.REFUSED, "no listener")


ADDED = """
import sys
from distlaunch.transports import TABLE
TABLE["room"] = "tests.process.toy_transport.Room"
from distlaunch.__main__ import main
sys.argv[1:1] = ["run"]
main()
"""


def test_a_line_of_the_table_makes_it_a_launcher_of_job_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE, "room", "tests.process.toy_transport.Room")
    keys = "gpus_per_node: 0\nprocs_per_node: 2\nnodes: [kitchen]\nlauncher: room"
    job = str(write_job(tmp_path, "import os\nprint(os.environ['RANK'])", keys))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = completed([sys.executable, "-c", ADDED, job], env=env)
    assert (done.returncode, {*done.stdout.splitlines()}) == (0, {"[kitchen:0] 0", "[kitchen:1] 1"}), (
        done.stderr
    )
    check_replays(tmp_path)
    shutil.rmtree(tmp_path / "runs")  # without the line, it can't be replayed
    done = completed([sys.executable, "-c", ADDED, job, "--set", "nodes=[attic]"], env=env)
    assert "attic: connection refused; make a listener" in done.stderr
    shutil.rmtree(tmp_path / "runs")
    assert 'launcher: expected "auto"' in distlaunch("run", job).stderr
