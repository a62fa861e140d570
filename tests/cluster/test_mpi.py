"""Open MPI's and MPICH's mpirun, by `launcher: mpirun` or by hand, with `distlaunch exec` as each rank."""

import json
import shutil
import signal
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest

from tests.cluster.hosts import GONE_S, Bed, named, parent_of
from tests.cluster.test_launchers import TRAINS
from tests.harness import distlaunch, distlaunch_argv, kill, program, running, wait_gone, write_job
from tests.process.torchruns import NEEDS_TORCH

RANKS = 4
LINGERS_S = 5.0
"""Seconds that Open MPI itself may stay after the last rank."""


class Mpi(NamedTuple):
    """One MPI: its launcher, its library, and the launcher's options."""

    launcher: str
    library: str
    hosts: str
    ssh: str
    here: tuple[str, ...] = ()


HERE = ("--allow-run-as-root", "--oversubscribe")
KINDS = {
    "open-mpi": Mpi("mpirun.openmpi", "libmpi.so.40", "--host", "--mca plm_rsh_agent ", HERE),
    "mpich": Mpi("mpirun.mpich", "libmpich.so.12", "-hosts", "-launcher ssh -launcher-exec "),
}
INITS = """
import ctypes, json, os, signal, sys
mpi = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
if "mpich" in sys.argv[1]:
    world, whole, added = 0x44000000, 0x4C000405, 0x58000003
else:
    names = ("mpi_comm_world", "mpi_int", "mpi_op_sum")
    world, whole, added = (ctypes.byref(ctypes.c_void_p.in_dll(mpi, f"ompi_{name}")) for name in names)
assert mpi.MPI_Init(None, None) == 0
number, total = ctypes.c_int(), ctypes.c_int()
mpi.MPI_Comm_rank(world, ctypes.byref(number))
own = ctypes.c_int(number.value + 1)
mpi.MPI_Allreduce(ctypes.byref(own), ctypes.byref(total), 1, whole, added, world)
"""
FAILS_ONCE = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and number.value == 1: os._exit(3)\n"
TELLS = """
names = ("RANK", "WORLD_SIZE", "RESTART_COUNT", "GIVEN")
told = {name: os.environ[name] for name in os.environ if name.endswith(names)}
os.write(1, (json.dumps({**told, "mpi": number.value, "sum": total.value}) + "\\n").encode())
mpi.MPI_Finalize()
"""
WAITS = 'os.write(1, f"ready {number.value} {os.getpid()}\\n".encode())\nsignal.pause()\n'
ABORTS = "if number.value == 2: mpi.MPI_Abort(world, 7)\nsignal.pause()\n"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Mpi:
    found = KINDS[request.param]
    if shutil.which(found.launcher) is None:
        pytest.skip(f"missing: {found.launcher}")
    return found


def job_of(bed: Bed, kind: Mpi, more: str = "") -> str:
    """A job on three hosts, of which the first has two ranks."""
    program = f"args: [{kind.library}]\npython: {sys.executable}\ngpus_per_node: 0\nprocs_per_node: 1\n"
    nodes = f"nodes: [{{host: host1, procs: 2}}, host2, host3]\nssh: {{config: {bed.directory}/ssh_config}}\n"
    return f"launcher: mpirun\nmpirun: {kind.launcher}\n{program}{nodes}{more}"


def rows_of(stdout: str) -> list[dict[str, Any]]:
    """What each rank has told, in the order of ranks."""
    found = [json.loads(line[line.index("{") :]) for line in stdout.splitlines() if '"sum"' in line]
    return sorted(found, key=lambda row: int(row["RANK"]))


def assert_agree(rows: list[dict[str, Any]]) -> None:
    """MPI's ranks are torch's."""
    places = [(row["RANK"], row["mpi"], row["sum"], row["WORLD_SIZE"]) for row in rows]
    assert places == [(str(rank), rank, 10, "4") for rank in range(RANKS)]
    assert [row["LOCAL_RANK"] for row in rows] == ["0", "1", "0", "0"]


def test_a_restart_runs_mpirun_again_with_no_secret_in_argv(bed: Bed, tmp_path: Path, kind: Mpi) -> None:
    before = bed.processes()
    keys = job_of(bed, kind, "restarts: {max: 1, backoff: 0s}\nenv: {GIVEN: canary}")
    job = str(write_job(tmp_path, INITS + FAILS_ONCE + TELLS, keys))
    done = distlaunch("run", job, status=0)
    assert "rank 1 (host1) failed first: exit status 3" in done.stderr + done.stdout
    rows = [row for row in rows_of(done.stdout) if row["TORCHELASTIC_RESTART_COUNT"] == "1"]
    assert_agree(rows)
    assert [row["GIVEN"] for row in rows] == ["canary"] * RANKS
    wait_gone(sorted(bed.processes() - before), GONE_S)
    plan = json.loads(distlaunch("dry-run", job, "--json").stdout)
    assert "canary" not in str([worker["argv"] for node in plan["nodes"] for worker in node["workers"]])


KILLED = "failed first: killed by signal 9 (SIGKILL)"
NAMED = {"rank": f"rank 2 (host2) {KILLED}", "mpirun": f"mpirun (host1) {KILLED}", "agent": "host2 was lost"}


@pytest.mark.parametrize("victim", [*NAMED, "controller"])
def test_kills_end_all_ranks_and_are_named(bed: Bed, tmp_path: Path, kind: Mpi, victim: str) -> None:
    before = bed.processes()
    with running(write_job(tmp_path, INITS + WAITS, job_of(bed, kind))) as run:
        ranks = run.wait_ready(RANKS)
        there = bed.processes() - before
        pids = {"rank": ranks[2], "mpirun": named(there, kind.launcher)[0], "agent": parent_of(ranks[2])}
        kill(pids.get(victim, run.process.pid))
        wait_gone(sorted(ranks.values()), GONE_S)
        wait_gone(sorted(there), LINGERS_S)
        status = run.wait()
    assert NAMED.get(victim, "") in run.stderr + run.stdout, run.stderr + run.stdout
    assert (status == -signal.SIGKILL) == (victim == "controller") and status != 0
    assert "Traceback" not in run.stderr


def test_names_the_rank_that_aborts(bed: Bed, tmp_path: Path, kind: Mpi) -> None:
    done = distlaunch("run", str(write_job(tmp_path, INITS + ABORTS, job_of(bed, kind))), status=7)
    assert "mpirun (host1) failed first: exit status 7" in done.stderr
    if "openmpi" in kind.launcher:  # Hydra kills what is left at once, and with it what was not passed on
        assert "MPI_ABORT was invoked on rank 2" in done.stdout + done.stderr


def test_reports_an_mpirun_that_refuses_its_options(tmp_path: Path, kind: Mpi) -> None:
    mpirun = f"mpirun: [{kind.launcher}, --no-such-option]\n"
    keys = f"launcher: mpirun\ngpus_per_node: 0\nprocs_per_node: 2\n{mpirun}"
    done = distlaunch("run", "--json", str(write_job(tmp_path, "pass", keys)))
    assert done.returncode not in (0, 127), done.stderr
    cause = json.loads(done.stdout)["cause"]
    assert (cause["rank"], cause["node"]) == (None, None), "it isn't rank 0 that failed"
    assert "no-such-option" in done.stderr or "unrecognized" in done.stderr, done.stderr


# By hand


@NEEDS_TORCH
def test_ranks_of_mpirun_by_hand_train(bed: Bed, tmp_path: Path, kind: Mpi) -> None:
    ssh = program(tmp_path / "ssh", f'exec ssh -F {bed.directory}/ssh_config "$@"')
    worker = tmp_path / "worker.py"
    worker.write_text(INITS + dedent(TRAINS) + TELLS)
    where = [*kind.here, *f"{kind.hosts} host1:2,host2:1,host3:1 {kind.ssh}{ssh} -n {RANKS}".split()]
    words = [*distlaunch_argv("exec", "--"), sys.executable, "-u", str(worker), kind.library]
    done = bed.inside("host1", kind.launcher, *where, *words, status=0)
    assert done.stdout.count("sum 10\n") == RANKS
    assert_agree(rows := rows_of(done.stdout))
    assert [row["LOCAL_WORLD_SIZE"] for row in rows] == ["2", "2", "1", "1"]
    if "mpich" in kind.launcher:  # Open MPI doesn't expose where ranks are when nodes have unequal numbers
        assert [row["GROUP_RANK"] + row["GROUP_WORLD_SIZE"] for row in rows] == ["03", "03", "13", "23"]
    else:
        assert not any({"GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE"} & {*row} for row in rows)
