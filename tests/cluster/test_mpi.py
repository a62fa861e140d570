"""`mpirun distlaunch exec -- …` by Open MPI and by MPICH, on three hosts over ssh."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import Bed
from tests.harness import PATIENCE_S, distlaunch_argv
from tests.process.torchruns import NEEDS_TORCH

pytestmark = NEEDS_TORCH
TRAINS = """
import ctypes, json, os, sys
import torch, torch.distributed as dist
mpi = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
world = 0x44000000 if "mpich" in sys.argv[1] else ctypes.c_void_p.in_dll(mpi, "ompi_mpi_comm_world")
number = ctypes.c_int()
assert mpi.MPI_Init(None, None) == 0  # the program may use MPI itself
mpi.MPI_Comm_rank(ctypes.byref(world) if "mpich" not in sys.argv[1] else world, ctypes.byref(number))
dist.init_process_group("gloo")
total = torch.full((1,), dist.get_rank() + 1.0)
dist.all_reduce(total)
told = {name: os.environ[name] for name in os.environ if name.endswith(("RANK", "WORLD_SIZE"))}
os.write(1, (json.dumps({**told, "sum": total.item(), "mpi": number.value}) + "\\n").encode())
dist.destroy_process_group()
mpi.MPI_Finalize()
"""


def mpirun(kind: str, ssh: Path, shape: str) -> list[str]:
    """The command line of an MPI's mpirun, which is on host1."""
    if kind == "open-mpi":
        where = ["--allow-run-as-root", "--host", shape, "--mca", "plm_rsh_agent", str(ssh)]
        return ["mpirun.openmpi", *where]
    return ["mpirun.mpich", "-hosts", shape, "-launcher", "ssh", "-launcher-exec", str(ssh)]


@pytest.mark.parametrize(("kind", "library"), [("open-mpi", "libmpi.so.40"), ("mpich", "libmpich.so.12")])
def test_ranks_of_mpirun_train(bed: Bed, tmp_path: Path, kind: str, library: str) -> None:
    ssh, worker = tmp_path / "ssh", tmp_path / "worker.py"
    if shutil.which(mpirun(kind, ssh, "")[0]) is None:
        pytest.skip(f"missing: {mpirun(kind, ssh, '')[0]}")
    ssh.write_text(f'#!/bin/sh\nexec ssh -F {bed.folder}/ssh_config "$@"\n')
    ssh.chmod(0o755)
    worker.write_text(TRAINS)
    words = [*distlaunch_argv("exec", "--"), sys.executable, "-u", str(worker), library]
    command = [*mpirun(kind, ssh, "host1:2,host2:1,host3:1"), "-n", "4", *words]
    done = subprocess.run(
        bed.argv("exec", "host1", "--", *command),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda row: int(row["RANK"]))
    assert [(row["RANK"], row["mpi"], row["sum"], row["WORLD_SIZE"]) for row in rows] == [
        (str(rank), rank, 10.0, "4") for rank in range(4)
    ]
    assert [row["LOCAL_RANK"] + row["LOCAL_WORLD_SIZE"] for row in rows] == ["02", "12", "01", "01"]
    if kind == "mpich":  # Open MPI does not tell where ranks are when nodes have different numbers of them
        assert [row["GROUP_RANK"] + row["GROUP_WORLD_SIZE"] for row in rows] == ["03", "03", "13", "23"]
    else:
        assert not any({"GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE"} & {*row} for row in rows)


@pytest.mark.parametrize("kind", ["open-mpi", "mpich"])
def test_a_failing_rank_ends_all(tmp_path: Path, kind: str) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import os, signal, sys\nif os.environ['RANK'] == '1': sys.exit(7)\nsignal.pause()\n")
    names = {
        "open-mpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"],
        "mpich": ["mpirun.mpich"],
    }
    if shutil.which(names[kind][0]) is None:
        pytest.skip(f"missing: {names[kind][0]}")
    words = [*names[kind], "-n", "2", *distlaunch_argv("exec", "--"), sys.executable, str(worker)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 7
