"""One job file, unchanged, wherever ranks can run: the same weights everywhere."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.cluster.containers import Podman, why_no_podman
from tests.cluster.hosts import Bed
from tests.harness import distlaunch
from tests.process.torchruns import NEEDS_TORCH

pytestmark = NEEDS_TORCH
TRAINS = """
import hashlib, os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
torch.manual_seed(1 + dist.get_rank())  # each rank has data of its own
for _ in range(25):
    model.zero_grad()
    model(torch.randn(32, 16)).square().mean().backward()
    for weights in model.parameters():
        dist.all_reduce(weights.grad)
        weights.data -= 0.1 * weights.grad / dist.get_world_size()
digest = hashlib.sha256(b"".join(weights.detach().numpy().tobytes() for weights in model.parameters()))
where = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or "-"
inside = os.path.exists("/run/.containerenv")
row = f"{dist.get_rank()} {digest.hexdigest()[:16]} {where} {inside}\\n"
print(row, end="", flush=True)  # one write, also under python -u: mpirun's ranks share a pipe
dist.destroy_process_group()
"""


def test_the_same_job_file_gives_the_same_weights_everywhere(
    bed: Bed, allocation: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    job = tmp_path / "job.yaml"
    job.write_text(
        f"""
script: train.py
nodes: [host1, host2]
procs_per_node: 1
gpus_per_node: 0
python: {sys.executable}
env: {{OMP_NUM_THREADS: 1}}
ssh: {{config: {bed.directory}/ssh_config}}
"""
    )
    places = {
        "here": ["launcher=local"],
        "ssh": ["launcher=ssh"],
        "Slurm": ["launcher=slurm"],
        "Open MPI": ["launcher=mpirun", "mpirun=mpirun.openmpi"],
        "MPICH": ["launcher=mpirun", "mpirun=mpirun.mpich"],
    }
    found = {place: _rows(job, sets) for place, sets in places.items() if _is_there(sets)}
    if not why_no_podman():
        podman: Podman = request.getfixturevalue("podman")
        with bed.emptied():
            found["podman"] = _rows(job, [f"container={podman.section().partition(':')[2].strip()}"])
        assert {row[3] for row in found["podman"]} == {"True"}
        assert podman.tool("ps", "--all", "--quiet") == ""
    assert len({row[1] for rows in found.values() for row in rows}) == 1
    for place, rows in found.items():
        assert [row[0] for row in rows] == ["0", "1"]
        assert [row[2] for row in rows] == (["0", "1"] if "MPI" in place else ["-"] * 2), place


def _is_there(sets: list[str]) -> bool:
    """Whether the MPI that is asked for, if any, is installed."""
    return all(shutil.which(word.partition("=")[2]) for word in sets if word.startswith("mpirun="))


def _rows(job: Path, sets: list[str]) -> list[list[str]]:
    """What each rank tells: rank, weights, MPI's rank, whether it is in a container."""
    done = distlaunch("run", str(job), *(word for each in sets for word in ("--set", each)), status=0)
    rows = [line.partition("] ")[2].split() for line in done.stdout.splitlines()]
    assert len(rows) == 2, done.stdout + done.stderr
    return sorted(rows)
