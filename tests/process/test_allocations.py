"""Runs inside made-up jobs of Grid Engine, PBS, LSF and Flux, with stand-ins for their commands."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from distlaunch.errors import UsageError
from distlaunch.schedulers import allocation_in
from tests.harness import PATIENCE_S, distlaunch, distlaunch_argv, program, write_job
from tests.process.commands import run_one
from tests.process.stand_in_shell import WITHOUT_OPTIONS

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
    told = (
        f"2 nodes from {name}: {HERE}, host2 (launcher: auto; `--set launcher=local` uses only this machine)"
    )
    assert told in done.stderr
    if tool != "flux":
        started = (tmp_path / "started").read_text().splitlines()
        assert [line for line in started if line != "ssh -G"] == [f"{tool} host2"]


def test_a_termination_warning_of_lsf_does_not_end_its_links(tmp_path: Path) -> None:
    """LSF sends it to all processes of the job: here each blaunch sends it to itself."""
    env = environment(tmp_path, LSF, "")
    tool = tmp_path / "bin/blaunch"
    tool.write_text(tool.read_text().replace("exec sh", "kill -USR2 $$ && kill -USR1 $$ && exec sh"))
    assert run_one(tmp_path, WORKER, env=env).returncode == 0


def test_a_dry_run_shows_the_hosts_of_the_allocation(tmp_path: Path) -> None:
    env = environment(tmp_path, LSF, "")
    done = distlaunch("dry-run", str(write_job(tmp_path, WORKER, "gpus_per_node: 0")), env=env)
    assert (done.returncode, "host2" in done.stdout) == (0, True), done.stderr
    assert not (tmp_path / "started").exists()


def test_says_what_to_do_where_flux_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(tmp_path, {"FLUX_JOB_ID": "f2Cm"}, "").items():
        monkeypatch.setenv(name, value)
    tool, instead = tmp_path / "bin/flux", "; list the hosts in nodes, or use `--set launcher=local`"
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


def test_the_tasks_of_flux_run_are_the_ranks(tmp_path: Path) -> None:
    env = environment(tmp_path, {"FLUX_JOB_ID": "f2Cm", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "2"}, "")
    show = "echo $RANK $WORLD_SIZE $LOCAL_RANK $GROUP_RANK $MASTER_ADDR $MASTER_PORT"
    tasks = [
        subprocess.Popen(
            distlaunch_argv("exec", "--", "sh", "-c", show),
            env=env | {"FLUX_TASK_RANK": str(rank), "FLUX_TASK_LOCAL_ID": "0"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [task.communicate(timeout=PATIENCE_S)[0].split() for task in tasks]
    assert [words[:5] for words in said] == [[str(rank), "2", "0", str(rank), HERE] for rank in (0, 1)]
    assert said[0][5] == said[1][5]
