"""Dumps of torch's flight recorder, which show the rank that missed a collective."""

import pickle
from pathlib import Path

from distlaunch.observers.recording import lagging_words
from tests.harness import distlaunch, write_job

# Gloo stands for nccl, which can't run here: the same recorder, but only NCCL's watchdog dumps by itself.
WORKER = """
    import os, pathlib, torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace

    dist.init_process_group("gloo")
    rank, x = dist.get_rank(), torch.ones(4)
    dist.all_reduce(x)
    dist.barrier()
    if rank != 1:
        dist.all_reduce(x, async_op=True)  # the one to which rank 1 never comes
    pathlib.Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}").write_bytes(_dump_fr_trace())
    store = dist.distributed_c10d._get_default_store()
    store.set(f"dumped{rank}", "")
    store.wait([f"dumped{other}" for other in range(3)])
    os._exit(9 if rank == 0 else 0)
"""
JOB = "backend: nccl\ngpus_per_node: 3\nenv: {CUDA_VISIBLE_DEVICES: ''}\n"


def test_names_the_rank_that_missed_the_last_collective(tmp_path: Path) -> None:
    done = distlaunch("run", str(write_job(tmp_path, WORKER, JOB)))
    assert done.returncode == 9, done.stderr
    assert "never reached all_reduce #3 of default_pg, called at worker.py:" in done.stderr
    assert ": rank 1 (last in " in done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in folder.glob("*.flight")) == [f"rank{i}.flight" for i in range(3)]


def test_keeps_the_users_variables(tmp_path: Path) -> None:
    worker = "import os; print([os.environ[f'TORCH_FR_{x}'] for x in ('BUFFER_SIZE', 'DUMP_TEMP_FILE')])"
    env = "env: {TORCH_FR_BUFFER_SIZE: 7, TORCH_FR_DUMP_TEMP_FILE: /mine}\n"
    done = distlaunch("run", str(write_job(tmp_path, worker, f"backend: nccl\ngpus_per_node: 1\n{env}")))
    assert "['7', '/mine']" in done.stdout


class Evil:
    """Pickles to a call."""

    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("ran",))


def test_ignores_a_file_that_is_no_dump_and_runs_nothing_in_it(tmp_path: Path) -> None:
    (tmp_path / "rank0.flight").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "rank1.flight").write_bytes(b"\x80garbage")
    (tmp_path / "rank2.flight").write_bytes(pickle.dumps({"entries": [1, {"process_group": 3}]}))
    assert lagging_words(str(tmp_path), 3) == []
