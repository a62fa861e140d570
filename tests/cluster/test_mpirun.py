"""`launcher: mpirun`: Open MPI's and MPICH's launchers run `distlaunch exec` as each rank."""

import json
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cluster.hosts import GONE_S, Bed
from tests.cluster.test_containers import named
from tests.harness import children_of, distlaunch, kill, running, wait_gone, write_job

RANKS = 4
LINGERS_S = 5.0
"""Seconds that Open MPI itself may stay after the last rank."""


class Mpi(NamedTuple):
    """One MPI: its launcher, and its library."""

    launcher: str
    library: str


KINDS = {
    "open-mpi": Mpi("mpirun.openmpi", "libmpi.so.40"),
    "mpich": Mpi("mpirun.mpich", "libmpich.so.12"),
}
INITS = """
import ctypes, json, os, signal, sys
mpi = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
class Names:
    if "mpich" in sys.argv[1]:
        world, whole, added = 0x44000000, 0x4C000405, 0x58000003
    else:
        world, whole, added = (
            ctypes.byref(ctypes.c_void_p.in_dll(mpi, f"ompi_{name}"))
            for name in ("mpi_comm_world", "mpi_int", "mpi_op_sum")
        )
assert mpi.MPI_Init(None, None) == 0
number, total = ctypes.c_int(), ctypes.c_int()
mpi.MPI_Comm_rank(Names.world, ctypes.byref(number))
own = ctypes.c_int(number.value + 1)
mpi.MPI_Allreduce(ctypes.byref(own), ctypes.byref(total), 1, Names.whole, Names.added, Names.world)
"""
TELLS = """
told = {name: os.environ[name] for name in os.environ if name.endswith(("RANK", "WORLD_SIZE"))}
os.write(1, (json.dumps({**told, "mpi": number.value, "sum": total.value}) + "\\n").encode())
mpi.MPI_Finalize()
"""
WAITS = """
os.write(1, f"ready {number.value} {os.getpid()}\\n".encode())
signal.pause()
"""
ABORTS = """
if number.value == 2:
    mpi.MPI_Abort(Names.world, 7)
signal.pause()
"""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Mpi:
    found = KINDS[request.param]
    if shutil.which(found.launcher) is None:
        pytest.skip(f"missing: {found.launcher}")
    return found


def job_of(bed: Bed, kind: Mpi, more: str = "") -> str:
    """A job on three hosts, of which the first has two ranks."""
    return f"""
launcher: mpirun
mpirun: {kind.launcher}
args: [{kind.library}]
nodes: [{{host: host1, procs: 2}}, host2, host3]
procs_per_node: 1
gpus_per_node: 0
python: {sys.executable}
ssh: {{config: {bed.folder}/ssh_config}}
{more}"""


def rows_of(stdout: str) -> list[dict[str, Any]]:
    """What each rank has told, in the order of ranks."""
    found = [json.loads(line.partition("] ")[2]) for line in stdout.splitlines() if '"sum"' in line]
    return sorted(found, key=lambda row: int(row["RANK"]))


def test_ranks_are_mpis_and_torchs(bed: Bed, tmp_path: Path, kind: Mpi) -> None:
    before = bed.processes()
    done = distlaunch("run", str(write_job(tmp_path, INITS + TELLS, job_of(bed, kind))))
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert [(row["RANK"], row["mpi"], row["sum"], row["WORLD_SIZE"]) for row in rows] == [
        (str(rank), rank, 10, "4") for rank in range(4)
    ]
    assert [row["LOCAL_RANK"] for row in rows] == ["0", "1", "0", "0"]
    wait_gone(sorted(bed.processes() - before), GONE_S)


@pytest.mark.parametrize("victim", ["rank", "mpirun", "agent", "controller"])
def test_kills_end_all_ranks_and_are_named(bed: Bed, tmp_path: Path, kind: Mpi, victim: str) -> None:
    before = bed.processes()
    with running(write_job(tmp_path, INITS + WAITS, job_of(bed, kind))) as run:
        ranks = run.wait_ready(RANKS)
        there = bed.processes() - before
        pids = {
            "rank": lambda: ranks[2],
            "mpirun": lambda: named(there, kind.launcher)[0],
            "agent": lambda: next(pid for pid in there if ranks[2] in children_of(pid)),
            "controller": lambda: run.process.pid,
        }
        kill(pids[victim]())
        wait_gone(sorted(ranks.values()), GONE_S)
        wait_gone(sorted(there), LINGERS_S)
        status = run.wait()
    words = {
        "rank": r"rank 2 \(host2\) failed first: killed by signal 9 \(SIGKILL\)",
        "mpirun": r"mpirun 0 \(host1\) failed first: killed by signal 9 \(SIGKILL\)",
        "agent": "host2 was lost",
        "controller": "",
    }[victim]
    assert re.search(words, run.stderr + run.stdout), run.stderr + run.stdout
    assert (status == -signal.SIGKILL) == (victim == "controller")
    assert status != 0
    assert "Traceback" not in run.stderr


def test_an_abort_names_its_rank(bed: Bed, tmp_path: Path, kind: Mpi) -> None:
    done = distlaunch("run", str(write_job(tmp_path, INITS + ABORTS, job_of(bed, kind))))
    assert done.returncode == 7, done.stderr
    assert "mpirun 0 (host1) failed first: exit status 7" in done.stderr
    if (
        "openmpi" in kind.launcher
    ):  # Hydra kills what is left at once, and with it what has not been passed on
        assert "MPI_ABORT was invoked on rank 2" in done.stdout + done.stderr


def test_a_restart_starts_mpirun_again(bed: Bed, tmp_path: Path, kind: Mpi) -> None:
    fails_once = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and number.value == 1: os._exit(3)\n"
    job = write_job(
        tmp_path, INITS + fails_once + TELLS, job_of(bed, kind, "restarts: {max: 1, backoff: 0s}")
    )
    done = distlaunch("run", str(job))
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert {row["mpi"] for row in rows} == {0, 1, 2, 3} and all(row["sum"] == 10 for row in rows[-4:])
    assert "rank 1 (host1) failed first: exit status 3" in done.stderr + done.stdout


def test_the_jobs_environment_reaches_every_rank_and_no_argv(bed: Bed, tmp_path: Path, kind: Mpi) -> None:
    tells = "import os, sys\nos.write(1, (os.environ['GIVEN'] + '\\n').encode())\n"
    done = distlaunch("run", str(write_job(tmp_path, tells, job_of(bed, kind, "env: {GIVEN: canary}"))))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("canary") == 4
    shown = distlaunch("dry-run", str(tmp_path / "job.yaml"), "--json")
    plan = json.loads(shown.stdout)
    assert "canary" not in json.dumps(
        [worker["argv"] for node in plan["nodes"] for worker in node["workers"]]
    )


def test_an_mpirun_that_is_missing_or_refuses_is_reported(tmp_path: Path, kind: Mpi) -> None:
    small = "launcher: mpirun\ngpus_per_node: 0\nprocs_per_node: 2\n"
    done = distlaunch("run", str(write_job(tmp_path, "pass", small + "mpirun: no-such-mpirun\n")))
    assert done.returncode == 127, done.stderr
    assert "no-such-mpirun: No such file or directory" in done.stderr
    job = write_job(tmp_path, "pass", f"{small}mpirun: [{kind.launcher}, --no-such-option]\n")
    done = distlaunch("run", str(job))
    assert done.returncode not in (0, 127), done.stderr
    assert "no-such-option" in done.stderr or "unrecognized" in done.stderr, done.stderr
