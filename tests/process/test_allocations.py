"""Runs inside made-up jobs of Grid Engine, PBS, LSF and Flux, with stand-ins for their commands.

And a scheduler of another package, added by an entry point, and a transport of a new type.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from distlaunch.errors import UsageError
from distlaunch.schedulers import allocation_in
from distlaunch.transports import TABLE
from tests.harness import PATIENCE_S, ROOT, completed, distlaunch, program, write_job
from tests.process import toy_scheduler
from tests.process.commands import run_one
from tests.process.stand_in_shell import WITHOUT_OPTIONS
from tests.queued import check_stop_before_start, rows
from tests.replays import check_replays

HERE = os.uname().nodename

STAND_IN = f"""#!/bin/sh
# A stand-in for NAME: drops the options, notes the host, and has a shell here take the rest apart.
{WITHOUT_OPTIONS}
echo "NAME $1" >>"$STARTED"
shift
exec sh -c "$*"
"""
FLUX = """#!/bin/sh
# A stand-in for flux: `flux hostlist` of two hosts.
[ "$*" = "hostlist --expand local" ] || exit 3
echo "$HOSTS"
"""
WORKER = """
    import os
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    print(*(os.environ[name] for name in names))
"""
GRID_ENGINE = {"JOB_ID": "4711", "SGE_TASK_ID": "undefined", "HOSTNAME": HERE, "PE_HOSTFILE": "hosts"}
PBS = {"PBS_JOBID": "88.pbs", "PBS_NODEFILE": "hosts"}
LSF = {"LSB_JOBID": "905", "LSB_MCPU_HOSTS": f"{HERE} 2 host2 1"}
PES = f"{HERE} 2 all.q@a UNDEFINED\nhost2 1 all.q@b UNDEFINED\n"
TWO = (f"[{HERE}:0] 0 2 0 1 0", "[host2:1] 1 2 0 1 1")
THREE = (f"[{HERE}:0] 0 3 0 2 0", f"[{HERE}:1] 1 3 1 2 0", "[host2:2] 2 3 0 1 1")
INSIDE = {
    "qrsh": (GRID_ENGINE, PES, "Grid Engine job 4711", THREE),
    "ssh": (PBS, f"{HERE}\nhost2\n{HERE}\n", "PBS job 88.pbs", THREE),
    "blaunch": (LSF, "", "LSF job 905", THREE),
    "flux": ({"FLUX_JOB_ID": "f2Cm"}, "", "Flux job f2Cm", TWO),
}
"""By the command that starts agents: a job's variables and its list of hosts, its name, its ranks."""


def environment(directory: Path, job: Mapping[str, str], listed: str) -> dict[str, str]:
    """That of a process in such a job, in which the stand-ins are found first."""
    tools = directory / "bin"
    tools.mkdir()
    for name in ("qrsh", "ssh", "blaunch", "flux"):
        program(tools / name, FLUX if name == "flux" else STAND_IN.replace("NAME", name))
    (directory / "hosts").write_text(listed)
    own = {name: str(directory / value) if value == "hosts" else value for name, value in job.items()}
    kept = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"}
    path = f"{tools}:{os.environ['PATH']}"
    return kept | own | {"PATH": path, "STARTED": str(directory / "started"), "HOSTS": f"{HERE} host2"}


@pytest.mark.parametrize("tool", INSIDE)
def test_takes_hosts_and_slots_and_starts_agents_as_the_scheduler_does(tool: str, tmp_path: Path) -> None:
    job, listed, name, ranks = INSIDE[tool]
    env = environment(tmp_path, job, listed)
    done = run_one(tmp_path, WORKER, env=env, status=0)
    assert set(done.stdout.splitlines()) == set(ranks)
    how = "launcher: auto; `--set launcher=local` uses only this machine"
    assert f"2 nodes from {name}: {HERE}, host2 ({how})" in done.stderr
    if tool != "flux":
        started = (tmp_path / "started").read_text().splitlines()
        assert [line for line in started if line != "ssh -G"] == [f"{tool} host2"]


def test_a_termination_warning_of_lsf_does_not_end_its_links(tmp_path: Path) -> None:
    """LSF sends it to all processes of the job: here each blaunch sends it to itself."""
    env = environment(tmp_path, LSF, "")
    tool = tmp_path / "bin/blaunch"
    tool.write_text(tool.read_text().replace("exec sh", "kill -USR2 $$ && kill -USR1 $$ && exec sh"))
    shown = distlaunch("dry-run", str(write_job(tmp_path, WORKER, "gpus_per_node: 0")), env=env, status=0)
    assert "host2" in shown.stdout and not (tmp_path / "started").exists()
    run_one(tmp_path, WORKER, env=env, status=0)


def test_says_what_to_do_where_flux_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(tmp_path, {"FLUX_JOB_ID": "f2Cm"}, "").items():
        monkeypatch.setenv(name, value)
    tool = tmp_path / "bin/flux"
    instead = "; use a job file that lists the hosts in nodes, or `distlaunch run --set launcher=local`"
    for does, answer_s, told in (
        ("exec tail -f /dev/null", 0.5, "did not answer within 0.5 s"),
        ("echo 'flux: no such command' >&2; exit 1", PATIENCE_S, "failed: flux: no such command"),
        ("exit 4", PATIENCE_S, "failed: exit status 4"),
    ):
        monkeypatch.setattr("distlaunch.schedulers.queue.HOSTS_S", answer_s)
        tool.write_text(f"#!/bin/sh\n{does}\n")
        with pytest.raises(UsageError) as refused:
            allocation_in(os.environ)
        assert str(refused.value) == f"`flux hostlist --expand local` {told}{instead}"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="can't read the hosts of this Flux job: flux: No such file or dir"):
        allocation_in(os.environ)


# A scheduler and a transport of another package

TOY_WORKER = """
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
    own = {"PYTHONPATH": f"{site}:{ROOT}", "TOY_QUEUE": queue, "XDG_STATE_HOME": tmp_path / "state"}
    for name, value in own.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_job_is_submitted_to_it_and_shown_until_its_end(directory: Path) -> None:
    done = distlaunch("submit", str(write_job(directory, TOY_WORKER, KEYS)), status=0)
    assert done.stdout == "1\n"
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
    distlaunch("wait", "1", status=0)


def test_a_job_that_waits_in_its_queue_is_stopped(directory: Path) -> None:
    distlaunch("submit", "--to", "toy", str(write_job(directory, TOY_WORKER, KEYS)), status=0)
    check_stop_before_start("Toy job 1", "1")


def test_checks_and_suggests_its_section(directory: Path) -> None:
    typos = {"toy: {colr: red}": "toy.colr: unknown key; did you mean color?"}
    typos["toi: {}"] = "toi: unknown key; did you mean toy?"
    for key, told in typos.items():
        assert told in distlaunch("run", str(write_job(directory, TOY_WORKER, key)), status=2).stderr
    assert '"toy"' in distlaunch("schema").stdout
    unknown = distlaunch("submit", "--to", "none", "job.yaml")
    assert "'flux', 'toy'" in " ".join(unknown.stderr.replace("│", " ").split())


def test_a_job_outside_of_any_allocation_loads_no_scheduler(directory: Path) -> None:
    env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = distlaunch("run", str(write_job(directory, TOY_WORKER, "gpus_per_node: 0")), env=env, status=0)
    assert "distlaunch.schedulers\n" in done.stderr
    assert "distlaunch.schedulers." not in done.stderr
    assert "importlib.metadata" not in done.stderr


# A transport: a type of its own is all that it takes


ADDED = """
import sys
from distlaunch.transports import TABLE
TABLE["room"] = "tests.process.toy_transport.Room"
from distlaunch.__main__ import main
sys.argv[1:1] = ["run"]
main()
"""


def test_a_line_of_the_table_makes_it_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, "room", "tests.process.toy_transport.Room")
    keys = "gpus_per_node: 0\nprocs_per_node: 2\nnodes: [kitchen]\nlauncher: room"
    job = str(write_job(tmp_path, "import os\nprint(os.environ['RANK'])", keys))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = completed([sys.executable, "-c", ADDED, job], env=env, status=0)
    assert {*done.stdout.splitlines()} == {"[kitchen:0] 0", "[kitchen:1] 1"}, done.stderr
    check_replays(tmp_path)
    shutil.rmtree(tmp_path / "runs")  # without the line, it can't be replayed
    done = completed([sys.executable, "-c", ADDED, job, "--set", "nodes=[attic]"], env=env)
    assert "attic: connection refused; make a listener" in done.stderr
    shutil.rmtree(tmp_path / "runs")
    assert 'launcher: expected "auto"' in distlaunch("run", job).stderr
