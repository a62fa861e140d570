"""`why` explains jobs that fail in twelve ways."""

import contextlib
import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.faults.memory import memory_group
from tests.faults.scenes import here
from tests.harness import distlaunch, running, wait_until, write_job

HEAD = """
import datetime, os, time
RANK = int(os.environ["RANK"])
def init(seconds=600, **more):
    global dist, torch
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds), **more)
def train(does):
    for step in range(9):
        if RANK == 1 and step == 2:
            does()
        dist.all_reduce(torch.ones(1))
def rank_1(does):
    if RANK == 1:
        does()
    stuck()
def stuck():
    time.sleep(1000)
def computes():
    while True: pass
def raises():
    raise ValueError("loss is nan at step 2")
def imports():
    import fused_attention
def saves():
    with open("/dev/full", "w") as file: file.write("x")
def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
def loses_its_node():
    agent = os.getppid()
    for pid in (parent(agent), agent): os.kill(pid, 9)
    stuck()
"""
CRASH = "ValueError: loss is nan at step 2"
STALL = {"on_stall": "stop", "timeouts": {"stall": "4s"}}
# The rest of the script; more of the job; whether rank 1 has to be named; words of what is told.
PATTERNS: dict[str, tuple[str, dict[str, Any], bool, str]] = {
    "crash": ("rank_1(raises)", {}, True, CRASH),
    "hang": ("init(); train(stuck)", STALL, True, "in stuck (worker.py:"),
    "missed collective": ("init(8); train(lambda: dist.barrier())", {"procs_per_node": 3}, True, ""),
    "straggler": ("init(8); train(computes)", {}, True, "computes (worker.py:"),
    "out of memory": ("rank_1(lambda: b'x' * (1 << 30))", {}, True, "OOM"),
    "lost node": ("rank_1(loses_its_node)", {"nodes": 2, "procs_per_node": 1}, False, "node1 was lost"),
    "port taken": ("init()", {"rendezvous": {"endpoint": "127.0.0.1:PORT"}}, False, "in use"),
    "disk full": ("rank_1(saves)", {}, True, "disk is full"),
    "import error": ("rank_1(imports)", {}, True, "No module named"),
    "rank 0 missing": ("stuck() if RANK == 0 else init()", {"timeouts": {"join": "12s"}}, False, "rank 0"),
    "wrong world size": ("init(8, world_size=3, rank=RANK)", {}, False, "its world_size is too large"),
    "crash loop": ("rank_1(raises)", {"restarts": {"max": 2, "backoff": "0s"}}, True, CRASH),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_explains_a_failed_run(name: str, tmp_path: Path) -> None:
    """The cause, the error or the advice has the words, and rank 1 is named where it is the culprit."""
    script, keys, names_rank_1, words = PATTERNS[name]
    job = here(tmp_path, f"{HEAD}{script}\n", **{"procs_per_node": 2, **keys})
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        job.write_text(job.read_text().replace("PORT", str(port)))
        limit = stack.enter_context(memory_group(256 << 20)) if name == "out of memory" else None
        distlaunch("run", str(job), preexec_fn=limit)
    found = json.loads(distlaunch("why", "--json", cwd=tmp_path, status=0).stdout)
    told = " ".join([found["cause"], *found["error"], *found["waiting"], found["advice"]])
    assert words in told, found
    named = found["rank"] == 1 or (found["rank"] is None and "rank 1 " in found["cause"])
    assert named or not names_rank_1, found


def test_names_what_has_changed_since_the_last_good_run(tmp_path: Path) -> None:
    for status, more in (0, ""), (3, "min_nodes: 1"):
        script = f"import sys; sys.exit({status // 3} * int(sys.argv[1]))"
        job = write_job(tmp_path, script, f"gpus_per_node: 0\nargs: ['{status}']\n{more}\n")
        distlaunch("run", str(job), status=status)
    lines = distlaunch("why", cwd=tmp_path, status=0).stdout.splitlines()
    assert any("the last good run: args: 0 → 3" in line for line in lines), lines
    assert len(lines) <= 10
    good, bad = map(
        str, sorted((tmp_path / "runs").iterdir(), key=lambda directory: directory.stat().st_ctime)
    )
    found = json.loads(distlaunch("why", bad, "--diff", good, "--json", status=0).stdout)
    assert found["differs"].pop("checksum of the script")
    implied = {"min_nodes": ["unset", 1], "restarts.max": ["unset", 3]}
    assert found["differs"] == {"args": ["0", "3"], **implied}
    assert distlaunch("why", good, "--diff", good).stdout.endswith(":\nno differences\n")
    assert distlaunch("why", good, status=0).stdout.count("\n") == 1
    events = Path(good, "events.jsonl")
    known = events.read_text()
    events.write_text(known.replace('"version": ', '"version": 0.', 1))
    assert "last good run" not in distlaunch("why", bad, status=0).stdout
    for pair in (bad, good), (good, bad):  # either may be the one that can't be read
        refused = distlaunch("why", pair[0], "--diff", pair[1], status=1).stderr
        assert f"can't compare {Path(good).name}: line 1: recorded by " in refused
    events.write_text(known)


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


def test_explains_by_what_is_in_the_run_directory(tmp_path: Path) -> None:
    """Events of the kernel count only for the processes of the run; what is damaged hides nothing else."""
    worker = "import os, time\ntime.sleep(int(os.environ['RANK']) * 1000)\nraise SystemExit(7)"
    distlaunch("run", str(here(tmp_path, worker, procs_per_node=2)), status=7)
    (run,) = (tmp_path / "runs").iterdir()
    pid = json.loads((run / "summary.json").read_text())["workers"][0]["pid"]

    def why(*options: str) -> str:
        return str(distlaunch("why", *options, str(run), status=0).stdout)

    for killed, shown in ((pid, True), (pid + 100_000_000, False)):
        kernel = [f"Memory cgroup out of memory: Killed process {killed} (python)"]
        record = {"time": 0.0, "node": "node0", "first_rank": 0, "kernel": kernel}
        (run / "evidence.jsonl").write_text(json.dumps(record) + "\n")
        assert ("evidence: kernel log of node0: Memory cgroup" in why()) == shown
    (run / "evidence.jsonl").write_bytes(b'\xff{[\n[1]\n{"workers": [3], "kernel": [4], "memory": 5}\n')
    assert "exit status 7" in why("-v")
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    ends = [line for line in lines if '"WorkerExited"' in line]
    for lost in (ends[1:], ends):  # as a full disk keeps the shorter ones
        (run / "events.jsonl").write_text("".join(line for line in lines if line not in lost))
        text = why()
        assert "root cause: rank 0 (node0) failed first: exit status 7\n" in text
        assert "incomplete: events.jsonl: lines are missing" in text
    told = distlaunch("attach", "-a", str(run), status=7).stderr
    assert f"{run.name}: FAILED, exit status 7: rank 0 (node0) failed first: exit status 7" in told
    (run / "events.jsonl").write_text("junk\n{}")
    text = why()
    assert "root cause: rank 0 (node0) failed first: exit status 7\n" in text
    assert "incomplete: events.jsonl: line" in text, text
    (run / "summary.json").write_text('{"cause": [3]}')
    text = why()
    assert "FAILED with exit status 7" in text
    assert "incomplete: events.jsonl: line" in text
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
    _dump_fr_trace()  # the first one imports 800 modules, which may take longer than ranks are given
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
    assert "waiting: ranks 0, 2 were waiting in all_reduce #2 of default_pg, called at worker.py:" in text
    assert ", never reached by rank 1 (last in barrier at worker.py:" in text
    assert "  NCCL: RAS: 1 communicator, rank 1 is missing" in text


def test_tells_where_a_rank_hung_when_the_run_was_stopped(tmp_path: Path) -> None:
    """Only the stacks of ranks that hang are read. The other rank computes, like one that waits in nccl."""
    script = f"{HEAD}stuck() if RANK == 1 else computes()\n"
    with running(here(tmp_path, script, procs_per_node=2, timeouts={"stall": "3s"})) as run:
        run.wait_for("rank 1 is blocked in: stuck (worker.py:")
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
    text = distlaunch("why", cwd=tmp_path, status=0).stdout
    assert "root cause: stopped by SIGINT" in text
    assert re.search(r"\nwaiting: rank 1 in stuck \(worker\.py:\d+\)\nthen: ", text), text


def test_names_a_suspended_rank_although_torch_gave_up_before_the_stall_watch(tmp_path: Path) -> None:
    suspended = "init(10); train(lambda: os.kill(os.getpid(), 19))\n"  # SIGSTOP
    distlaunch("run", str(here(tmp_path, HEAD + suspended, procs_per_node=3)), status=1)
    text = distlaunch("why", cwd=tmp_path, status=0).stdout
    assert "likely root cause: rank 1 (node0) was stopped by a signal; ranks 0, 2 were waiting" in text
    assert re.search(r"evidence: rank 1 \(pid \d+ on node0\) was suspended by a signal\n", text)


def test_says_during_a_hang_that_a_world_size_may_be_too_large(tmp_path: Path) -> None:
    with running(here(tmp_path, f"{HEAD}init(world_size=3, rank=RANK)\n", procs_per_node=2)) as run:
        run.wait_for("both ranks joined the rendezvous")

        def told() -> bool:
            text = distlaunch("why", cwd=tmp_path, status=0).stdout
            waits = "waiting: ranks 0-1 in init_process_group (worker.py:"
            return waits in text and "its world_size is too large" in text

        wait_until(told, lambda: run.stderr)


def test_does_not_call_a_rank_running_whose_end_was_never_recorded(tmp_path: Path) -> None:
    ends = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"ignores{RANK}", "w").close()
while not os.path.exists("ignores0"):
    time.sleep(0.02)
rank_1(lambda: os._exit(3))
"""
    keys = {"rendezvous": "none", "timeouts": {"stop": "4s"}}
    with running(here(tmp_path, HEAD + ends, procs_per_node=2, **keys)) as run:
        run.wait_for("waiting for rank 0")
        run.process.kill()
        run.process.wait()
        text = distlaunch("why", cwd=tmp_path, status=0).stdout
    assert "likely root cause: rank 1 (node0) failed first: exit status 3" in text
    assert re.search(r"then: its controller, process \d+ on .*, ended without reporting a result", text)
    assert "running" not in text
