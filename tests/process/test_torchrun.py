"""`distlaunch torchrun` next to torchrun: what scripts see, what users see, and how it ends.

The first part holds what PyTorch's own launcher tests hold (test/distributed/launcher), in our words.
Left out:

* test_launch_shutdown, test_launch_elastic_agent_raise_exception, the tests of `launch_agent`,
  `elastic_launch` and the rendezvous handler: they mock parts of torch's agent; there is none here.
* test_launch_function and the like: functions are `torch.distributed.launcher.api`'s, not the command line's.
* what needs an etcd server: etcd is handed over to torch as --nnodes MIN:MAX is, and that is tested.
* test_nproc_gpu_launch_configurations, test_nproc_xpu_launch_configurations: they mock GPUs; with given
  numbers of GPUs tests/unit/test_torchrun_flags.py has them.
* test_virtual_local_rank compiles on two GPUs; here the variables are compared.
* test_script_local_rank: torch.distributed.launch is another command.
* test_run_supervisor: its backend was never released.
* plug-ins for logs, variables as defaults: tests/unit/test_torchrun_flags.py has them.
"""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Going, ended_well, on_time
from tests.process.commands import Done
from tests.process.torchruns import (
    BOTH,
    NEEDS_TORCH,
    OURS,
    TORCHRUN,
    TOUCH,
    assert_fine,
    free_port,
    launch,
    logs_of,
    our_lines,
    ours,
    script,
    touched,
)

pytestmark = NEEDS_TORCH


# What PyTorch's own tests hold


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder with a script that touches out/RANK."""
    (tmp_path / "out").mkdir()
    script(tmp_path, TOUCH)
    shell = tmp_path / "worker.sh"
    shell.write_text('#!/bin/sh\necho "rank $RANK"\n: > "$1/$RANK"\n')
    shell.chmod(0o755)
    return tmp_path


ALL_FOUR = {"0", "1", "2", "3"}
FOUR_WAYS = {
    "plain": ["--rdzv-id=17", "--nnodes=1"],
    "as torch.distributed.launch had it": ["--master-addr=localhost", "--node-rank=0"],
    "standalone": ["--standalone"],
    "run-path": ["--run-path"],
    "underscores": ["--max_restarts=0", "--rdzv_id", "3"],
}


@pytest.mark.parametrize("words", FOUR_WAYS.values(), ids=FOUR_WAYS)
def test_every_worker_runs(out: Path, words: list[str]) -> None:
    port = [f"--master-port={free_port()}"] if "--node-rank=0" in words else []
    done = ours(out, *words, *port, "--nproc-per-node=4", "worker.py", "--touch-file-dir=out")
    assert_fine(done)
    assert touched(out) == ALL_FOUR


@pytest.mark.parametrize("procs", [1, 4])
def test_a_command_that_is_not_python(out: Path, procs: int) -> None:
    assert_fine(ours(out, "--no-python", f"--nproc-per-node={procs}", "./worker.sh", "out"))
    assert touched(out) == {str(rank) for rank in range(procs)}


@pytest.mark.parametrize("word", ["auto", "cpu"])
def test_as_many_workers_as_torch_counts_cores(out: Path, word: str) -> None:
    count = "import torch; print(torch._utils.cpu_count())"
    cores = int(launch([sys.executable, "-c"], out, count).stdout)
    assert_fine(ours(out, f"--nproc-per-node={word}", "--no-python", "./worker.sh", "out"))
    assert len(touched(out)) == cores


def elastic_words(nodes: str, store: str = "") -> list[str]:
    """With a `store` in a file it is left to torch."""
    conf = ",store_type=file" if store else ""
    return [
        f"--nnodes={nodes}",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={store or f'localhost:{free_port()}'}",
        f"--rdzv-conf=join_timeout=30,last_call_timeout=1{conf}",
        "--rdzv-id=9",
        "worker.py",
        "--touch-file-dir=out",
    ]


def handed_over(done: Done | Going) -> bool:
    (line,) = our_lines(done)
    return line.endswith("-m torch.distributed.run") and "needs torch's elastic agent; handing over" in line


def test_an_elastic_job_starts_on_the_fewest_nodes(out: Path) -> None:
    done = ours(out, *elastic_words("1:2"))
    assert (done.returncode, touched(out)) == (0, {"0", "1"}), done.stderr
    assert our_lines(done)[-1] == "distlaunch: starting on 1 node, without node 1"


@pytest.mark.parametrize(("words", "status"), [([], 0), (["--fail"], 1)], ids=["works", "fails"])
def test_hands_over_to_torch_what_only_its_agent_can_do(out: Path, words: list[str], status: int) -> None:
    done = ours(out, *elastic_words("1:2", str(out / "store")), *words)
    assert (done.returncode, touched(out)) == (status, set() if words else {"0", "1"}), done.stderr
    assert handed_over(done)
    assert ("ChildFailedError" in done.stderr) == bool(words)


@pytest.mark.parametrize("launcher", [OURS, [*OURS, "--run-path"], [sys.executable]])
def test_torch_knows_its_launcher(tmp_path: Path, launcher: list[str]) -> None:
    script(tmp_path, "import torch.distributed; print(torch.distributed.is_torchelastic_launched())")
    assert launch(launcher, tmp_path, "worker.py").stdout == f"{launcher != [sys.executable]}\n"


@pytest.mark.parametrize("scheme", ["tcp", "env"])
def test_process_groups(tmp_path: Path, scheme: str) -> None:
    script(
        tmp_path,
        """
        import os, sys, torch, torch.distributed as dist
        whole = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        dist.init_process_group("gloo", init_method=sys.argv[1], **(whole if "tcp" in sys.argv[1] else {}))
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total)
        print(f"sum {total.item()}\\n", end="")
        dist.destroy_process_group()
        """,
    )
    port = free_port()
    method = f"tcp://localhost:{port}" if scheme == "tcp" else "env://"
    flags = ("--run-path", "--nproc-per-node=2", "--master-addr=localhost", f"--master-port={port}")
    done = ours(tmp_path, *flags, "worker.py", method)
    ended_well(done.returncode, done.stdout, done.stderr, last="sum 1\n", times=2)
    assert_fine(done)
    assert done.stdout == "sum 1\n" * 2


def test_captured_output_has_the_prefix_of_the_variable(out: Path) -> None:
    done = ours(
        out,
        *("--redirect=3", "--tee=3", "--nproc-per-node=4", "--no-python", "./worker.sh", "out"),
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[rank${rank}]: ",
    )
    assert_fine(done)
    assert sorted(done.stdout.splitlines()) == [f"[rank{rank}]: rank {rank}" for rank in range(4)]


def test_names_a_missing_interpreter_in_one_line(out: Path) -> None:
    for nodes in ("1:2", "2"):
        done = ours(out, *elastic_words(nodes), PYTHON_EXEC="/nowhere/python")
        line = "distlaunch: PYTHON_EXEC: /nowhere/python: No such file or directory"
        assert (done.returncode, our_lines(done)) == (127, [line])
        assert "Traceback" not in done.stderr


# How fast it is, and scripts that others wrote


def seconds(launcher: list[str], folder: Path) -> float:
    began = time.monotonic()
    done = launch(launcher, folder, "--nproc-per-node=4", "--no-python", "true")
    assert done.returncode == 0, done.stderr
    return time.monotonic() - began


@pytest.mark.quiet
def test_it_starts_ten_times_faster_than_torchrun(tmp_path: Path, record_property: Any) -> None:
    """In pairs, of which the best of each counts: what else the machine does only adds to it."""
    pairs = [(seconds(TORCHRUN, tmp_path), seconds(OURS, tmp_path)) for _ in range(2)]
    theirs, mine = (min(column) for column in zip(*pairs, strict=True))
    record_property("seconds", [theirs, mine])
    on_time(f"a tenth of torchrun's {theirs:.3f} s", mine, theirs / 10)


def test_accelerates_own_tests(tmp_path: Path) -> None:
    """test_ops takes the CPU only from a state that was made for it before."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    text = """
        import runpy
        from accelerate import PartialState
        PartialState(cpu=True)
        runpy.run_module("accelerate.test_utils.scripts.test_ops", run_name="__main__")
    """
    kept = {}
    for name, launcher in zip(("torchrun", "ours"), BOTH, strict=True):
        script(tmp_path / name, text)
        flags = ("--nproc-per-node=2", "--redirects=1", "--log-dir=logs")
        done = launch(launcher, tmp_path / name, *flags, "worker.py", ACCELERATE_USE_CPU="true")
        assert done.returncode == 0, done.stderr
        kept[name] = {(path, said) for path, said in logs_of(tmp_path / name) if said}
    assert kept["ours"] == kept["torchrun"]
    said = dict(kept["ours"])["attempt_0/0/stdout.log"]
    assert "Num processes: 2" in said
