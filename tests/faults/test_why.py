"""`why` explains jobs that fail in twelve ways."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.faults.why import PATTERNS, failed
from tests.harness import distlaunch, running, wait_until, write_job


@pytest.mark.parametrize("name", PATTERNS)
def test_explains_a_failed_run(name: str, tmp_path: Path) -> None:
    verdict = failed(name, 0, tmp_path, most=2)
    assert verdict.right, verdict.said
    assert not verdict.wrong_fact


def test_names_what_has_changed_since_the_last_good_run(tmp_path: Path) -> None:
    for status in (0, 3):
        script = f"import sys; sys.exit({status // 3} * int(sys.argv[1]))"
        job = write_job(tmp_path, script, f"gpus_per_node: 0\nargs: ['{status}']\n")
        distlaunch("run", str(job), status=status)
    lines = distlaunch("why", cwd=tmp_path, status=0).stdout.splitlines()
    assert any("the last good run: args: 0 → 3" in line for line in lines), lines
    assert len(lines) <= 10
    good, bad = map(
        str, sorted((tmp_path / "runs").iterdir(), key=lambda directory: directory.stat().st_ctime)
    )
    found = json.loads(distlaunch("why", bad, "--diff", good, "--json", status=0).stdout)
    assert found["differs"].pop("checksum of the script")
    assert found["differs"] == {"args": ["0", "3"]}
    assert distlaunch("why", good, status=0).stdout.count("\n") == 1


def test_shows_the_evidence_on_demand(tmp_path: Path) -> None:
    worker = """
        import os, signal, socket
        if os.environ["RANK"] == "1":
            open("gate").read()
            raise SystemExit("\\x1b]0;title\\x07")
        held = socket.create_server(("127.0.0.1", 0))
        open("gate", "w").close()
        signal.pause()
    """
    os.mkfifo(tmp_path / "gate")
    job = write_job(tmp_path, worker, "gpus_per_node: 0\nprocs_per_node: 2\n")
    distlaunch("run", str(job), status=1)
    text = distlaunch("why", "-v", cwd=tmp_path, status=0).stdout
    assert "root cause: rank 1 (node0) failed first: exit status 1 [" in text
    assert "\n  \\x1b]0;title\\x07\n" in text
    assert re.search(
        r"\n  rank 0 \(pid \d+\): (sleeping|running), [\d.]+ .iB\n    listens on port \d+\n", text
    ), text
    assert "memory events: " in text


def test_events_of_the_kernel_count_only_for_the_processes_of_the_run(tmp_path: Path) -> None:
    job = write_job(tmp_path, "import sys; sys.exit(7)", "gpus_per_node: 0\n")
    distlaunch("run", str(job), status=7)
    (run,) = (tmp_path / "runs").iterdir()
    pid = json.loads((run / "summary.json").read_text())["workers"][0]["pid"]
    for killed, shown in ((pid, True), (pid + 100_000_000, False)):
        kernel = [f"Memory cgroup out of memory: Killed process {killed} (python)"]
        record = {"time": 0.0, "node": "node0", "first_rank": 0, "kernel": kernel}
        (run / "evidence.jsonl").write_text(json.dumps(record) + "\n")
        text = distlaunch("why", str(run), status=0).stdout
        assert ("evidence: kernel log of node0: Memory cgroup" in text) == shown


def test_says_what_a_damaged_run_directory_still_has(tmp_path: Path) -> None:
    job = write_job(tmp_path, "raise SystemExit(1)", "gpus_per_node: 0\n")
    distlaunch("run", str(job), status=1)
    (run,) = (tmp_path / "runs").iterdir()
    (run / "evidence.jsonl").write_bytes(b'\xff{[\n[1]\n{"workers": [3], "kernel": [4], "memory": 5}\n')
    assert "exit status 1" in distlaunch("why", "-v", str(run), status=0).stdout
    (run / "events.jsonl").write_text("junk\n{}")
    text = distlaunch("why", str(run), status=0).stdout
    assert "root cause: rank 0 (node0) failed first: exit status 1\n" in text
    assert "incomplete: events.jsonl: line" in text, text
    (run / "summary.json").write_text('{"cause": [3]}')
    done = distlaunch("why", str(run), status=0)
    assert "FAILED with exit status 1" in done.stdout
    assert "incomplete: events.jsonl: line" in done.stdout
    (run / "events.jsonl").unlink()  # each run that a test leaves is replayed


# NCCL can't run here. In its place, a thread of each rank reads from the pipe that NCCL's watchdog would read
# from, and writes torch's own record of gloo's collectives; another answers as NCCL's RAS service does.
LIKE_NCCL = """
    import os, socket, threading, time
    import torch, torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace

    rank = os.environ["RANK"]
    pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
    os.mkfifo(pipe)

    def dump():
        while open(pipe).read():
            with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "wb") as file:
                file.write(_dump_fr_trace())

    def answer(server):
        while True:
            client, _ = server.accept()
            next(line for line in client.makefile() if line == "verbose status\\n")
            client.sendall(b"RAS: 1 communicator, rank 1 is missing")
            client.close()

    dist.init_process_group("gloo")
    threading.Thread(target=dump, daemon=True).start()
    if rank == "0":
        host, port = os.environ["NCCL_RAS_ADDR"].split(":")
        server = socket.create_server((host, int(port)))
        threading.Thread(target=answer, args=(server,), daemon=True).start()
    dist.barrier()
    if rank == "1":
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))
"""


def test_names_the_collective_that_a_rank_never_called_from_flight_recorders(tmp_path: Path) -> None:
    keys = "backend: nccl\ngpus_per_node: 3\nenv: {CUDA_VISIBLE_DEVICES: ''}\non_stall: stop\n"
    job = write_job(tmp_path, LIKE_NCCL, f"{keys}timeouts: {{stall: 8s}}\n")
    distlaunch("run", str(job), status=124)
    text = distlaunch("why", "-v", cwd=tmp_path, status=0).stdout
    assert "likely root cause: rank 1 (node0) stalled for 8 s in <module> (worker.py:" in text
    assert "waiting: ranks 0, 2 are waiting in all_reduce #2 of default_pg, called at worker.py:" in text
    assert ", never reached by rank 1 (last in barrier at worker.py:" in text
    assert "  NCCL: RAS: 1 communicator, rank 1 is missing" in text


SUSPENDED = """
    import datetime, os, signal, torch, torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
    dist.barrier()
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))
"""
WAITS_FOR_MORE = """
    import os, torch.distributed as dist
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=5)
"""


def test_names_a_suspended_rank_although_torch_gave_up_before_the_stall_watch(tmp_path: Path) -> None:
    job = write_job(tmp_path, SUSPENDED, "gpus_per_node: 0\nprocs_per_node: 3")
    distlaunch("run", str(job), status=1)
    text = distlaunch("why", cwd=tmp_path, status=0).stdout
    assert "likely root cause: rank 1 (node0) was in <module> (worker.py:" in text
    assert re.search(r"evidence: rank 1 \(pid \d+ on node0\) was suspended by a signal\n", text)


def test_says_during_a_hang_that_a_world_size_may_be_too_large(tmp_path: Path) -> None:
    with running(write_job(tmp_path, WAITS_FOR_MORE, "gpus_per_node: 0\nprocs_per_node: 2")) as run:
        run.wait_for("both ranks joined the rendezvous")
        waits = "waiting: ranks 0-1 in init_process_group (worker.py:"

        def told() -> bool:
            text = distlaunch("why", cwd=tmp_path, status=0).stdout
            return waits in text and "its world_size is too large" in text

        wait_until(told, lambda: run.stderr)
