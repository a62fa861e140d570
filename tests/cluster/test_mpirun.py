"""`launcher: mpirun`: Open MPI's and MPICH's launchers have places for ranks that our agents start."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from distlaunch.agent.mpi_hosts import host_of
from tests.cluster.hosts import GONE_S, Bed
from tests.cluster.test_containers import named
from tests.harness import PATIENCE_S, children_of, distlaunch, kill, running, wait_gone, write_job

RANKS = 4


class Mpi(NamedTuple):
    """One MPI: its launcher, its library, and the program of its daemons."""

    launcher: str
    library: str
    daemon: str


KINDS = {
    "open-mpi": Mpi("mpirun.openmpi", "libmpi.so.40", "orted"),
    "mpich": Mpi("mpirun.mpich", "libmpich.so.12", "/usr/bin/hydra_pmi_proxy"),
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


def test_every_rank_has_its_place(bed: Bed, tmp_path: Path, kind: Mpi) -> None:
    job = write_job(tmp_path, INITS + TELLS, job_of(bed, kind))
    before = bed.processes()
    done = distlaunch("run", str(job))
    assert done.returncode == 0, done.stderr
    rows = {}
    for line in done.stdout.splitlines():
        tag, _, row = line.partition(" ")
        rows[tag] = json.loads(row)
    assert sorted(rows) == ["[host1:0]", "[host1:1]", "[host2:2]", "[host3:3]"]
    for rank, row in enumerate(rows[tag] for tag in sorted(rows)):
        assert (row["RANK"], row["mpi"], row["sum"], row["WORLD_SIZE"]) == (str(rank), rank, 10, "4")
        assert (row["LOCAL_RANK"], row["GROUP_RANK"]) == [("0", "0"), ("1", "0"), ("0", "1"), ("0", "2")][
            rank
        ]
    wait_gone(sorted(bed.processes() - before), GONE_S)


@pytest.mark.parametrize("victim", ["rank", "stand-in", "mpirun", "daemon", "agent", "controller"])
def test_whoever_is_killed_all_are_gone_and_it_is_named(
    bed: Bed, tmp_path: Path, kind: Mpi, victim: str
) -> None:
    before = bed.processes()
    with running(write_job(tmp_path, INITS + WAITS, job_of(bed, kind))) as run:
        ranks = run.wait_ready(RANKS)
        there = bed.processes() - before
        places = [pid for pid in there if _stands_in_for(pid) == "2"]
        agent = next(pid for pid in there if ranks[2] in children_of(pid))
        kill(
            {
                "rank": lambda: ranks[2],
                "stand-in": lambda: places[0],
                "mpirun": lambda: named(there, kind.launcher)[0],
                "daemon": lambda: named(there, kind.daemon)[-1],
                "agent": lambda: agent,
                "controller": lambda: run.process.pid,
            }[victim]()
        )
        wait_gone(sorted(there), 5.0)
        status = run.wait()
        words = {
            "rank": r"rank 2 \(host2\) failed first: killed by signal 9 \(SIGKILL\)",
            # MPICH takes all places away within milliseconds, and which is heard first is chance.
            "stand-in": rf"rank {'2' if kind.daemon == 'orted' else '[0-3]'} \(host\d\): its process below",
            "mpirun": rf"{kind.launcher} on host1 ended: killed by signal 9 \(SIGKILL\)",
            "daemon": r"hydra_pmi_proxy on host[123] ended|rank \d \(host[123]\)(?: failed first)?: ",
            "agent": "host2 was lost",
            "controller": "",
        }[victim]
        assert re.search(words, run.stderr), run.stderr
        assert (status == -signal.SIGKILL) == (victim == "controller")
        assert status != 0
    assert "Traceback" not in run.stderr


def _stands_in_for(pid: int) -> str:
    """The rank in whose place a process stands for mpirun, or ""."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_text()
        line = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
    found = re.search(r"\0(?:PMIX|PMI)_RANK=(\d+)\0", environ)
    return found[1] if found and "SOCK_SEQPACKET" in line else ""


def test_an_abort_is_its_ranks(bed: Bed, tmp_path: Path, kind: Mpi) -> None:
    done = distlaunch("run", str(write_job(tmp_path, INITS + ABORTS, job_of(bed, kind))))
    if "mpich" in kind.launcher:  # there the rank itself goes on, and mpirun takes the places of all away
        assert done.returncode in (1, 7), done.stderr
        assert "its process below mpirun was killed" in done.stderr
        assert "MPI_Abort(MPI_COMM_WORLD, 7)" in done.stderr
    else:
        assert done.returncode == 7, done.stderr
        assert "rank 2 (host2) failed first: exit status 7" in done.stderr


def test_restarts_have_new_places(bed: Bed, tmp_path: Path, kind: Mpi) -> None:
    fails_once = "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and number.value == 1: sys.exit(3)\n"
    job = write_job(
        tmp_path, INITS + fails_once + TELLS, job_of(bed, kind, "restarts: {max: 1, backoff: 0s}")
    )
    done = distlaunch("run", str(job))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines() if '"sum"' in line]
    assert {row["mpi"] for row in rows} == {0, 1, 2, 3} and all(row["sum"] == 10 for row in rows)
    assert "rank 1 (host1) failed first: exit status 3; restart 1 of 1" in done.stderr


def test_an_mpirun_that_is_missing_or_refuses_is_told(tmp_path: Path, kind: Mpi) -> None:
    small = "launcher: mpirun\ngpus_per_node: 0\nprocs_per_node: 2\n"
    job = write_job(tmp_path, "pass", small + "mpirun: no-such-mpirun\n")
    done = distlaunch("run", str(job))
    assert done.returncode == 127, done.stderr
    assert "no-such-mpirun: No such file or directory" in done.stderr
    job = write_job(tmp_path, "pass", f"{small}mpirun: [{kind.launcher}, --no-such-option]\n")
    done = distlaunch("run", str(job))
    assert done.returncode not in (0, 127), done.stderr
    assert "ended before all ranks had started (2 had not)" in done.stderr
    assert "no-such-option" in done.stderr or "unrecognized" in done.stderr, done.stderr


def test_nobody_else_can_take_a_place(tmp_path: Path, kind: Mpi) -> None:
    """Another user's process that finds the agent's socket is not heard."""
    if os.geteuid():
        pytest.skip("root is missing: a process of another user is needed")
    small = f"launcher: mpirun\nmpirun: {kind.launcher}\ngpus_per_node: 0\nargs: [{kind.library}]\n"
    with running(write_job(tmp_path, INITS + WAITS, small)) as run:
        run.wait_ready(1)
        sockets = Path("/proc/net/unix").read_text()
        (name,) = re.findall(rf"@(distlaunch-{run.run_folder().name}-\S+-0)$", sockets, re.MULTILINE)[:1]
        assert _told(name, "id", 65534) == b"", "another user was heard"
        assert _told(name, "exit 0", 0) == b"\0", "the way to ask is wrong, so the line above shows nothing"
        assert run.process.poll() is None


def _told(name: str, command: str, uid: int) -> bytes:
    """What an agent answers to a process of that user that asks for a daemon."""
    asks = f"""if True:
        import json, os, socket
        os.setuid({uid})
        try:
            asker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            asker.connect(chr(0) + {name!r})
            asker.send(json.dumps(dict(host={host_of(0)!r}, command={command!r})).encode())
            os.write(1, asker.recv(1))
        except ConnectionError:
            pass
        """
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, timeout=PATIENCE_S, check=True)
    return done.stdout
