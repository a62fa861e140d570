"""Ranks that stall, never join the rendezvous, or miss a collective."""

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from distlaunch.agent import procfs
from distlaunch.agent.watches import Arrivals, JoinWatch, doing
from distlaunch.diagnosis.flight import KEPT, MAX_GROUPS, _groups, waiting_lines
from distlaunch.observers.recording import flight_dumps
from tests.harness import Going, distlaunch, kill, program, running, wait_until, write_job
from tests.process.commands import TWO
from tests.unit.samples import WATCHDOG

HARDLY_WORKS = """
    import time
    while True:  # as idle torch does: a clock tick now and then
        until = time.process_time() + 0.008
        while time.process_time() < until:
            pass
        time.sleep(0.5)
"""


def test_a_rank_that_wakes_up_now_and_then_counts_as_stalled(tmp_path: Path) -> None:
    job = write_job(tmp_path, HARDLY_WORKS, "gpus_per_node: 0\non_stall: stop\ntimeouts: {stall: 2s}")
    done = distlaunch("run", str(job), status=124)
    assert re.search(r"rank 0 \(node0\) stalled for 2 s", done.stderr), done.stderr


WAITS_OR_STEPS = """
    import os, signal, sys
    sys.path.insert(0, os.environ["PLACE"])
    from torch.distributed import c10d
    def step():
        signal.pause()
    c10d.all_reduce() if os.environ["RANK"] == "0" else step()
"""


@pytest.fixture
def collective(tmp_path: Path) -> Path:
    """Where the import of torch finds a stand-in for its collective: what counts is the stack."""
    (tmp_path / "torch/distributed").mkdir(parents=True)
    for name in ("torch", "torch/distributed"):
        (tmp_path / name / "__init__.py").touch()
    text = "import signal\n\n\ndef all_reduce():\n    signal.pause()\n"
    (tmp_path / "torch/distributed/c10d.py").write_text(text)
    return tmp_path


def test_finds_the_culprit_by_the_stacks_that_python_prints(tmp_path: Path, collective: Path) -> None:
    (tmp_path / "python").symlink_to(os.path.realpath(sys.executable))  # where no py-spy is beside it
    keys = f"python: {tmp_path}/python\nenv: {{PYTHONFAULTHANDLER: 1, PLACE: {collective}}}"
    job = write_job(tmp_path, WAITS_OR_STEPS, f"{TWO}on_stall: stop\ntimeouts: {{stall: 3s}}\n{keys}")
    done = distlaunch("run", str(job), env={**os.environ, "PATH": "/usr/bin:/bin"}, status=124)
    cause = "rank 1 (node0) stalled for 3 s in step (worker.py:6); rank 0 is waiting in a collective"
    assert cause in done.stderr
    assert "SIGABRT" not in done.stderr
    assert "distlaunch: rank 0: stopped by distlaunch" in done.stderr


FAILS_ONCE = """
echo "Process $4: python"
[ -e {at}.failed ] && exec {py_spy} "$@"
touch {at}.failed
printf '\\nError: Failed to get stack traces\\n\\nCaused by:\\n    Failed to copy PyFrameObject\\n'
exit 1
"""


def test_reads_a_stack_again_if_a_busy_thread_has_made_it_unreadable(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(os.path.realpath(sys.executable))  # where no py-spy is beside it
    py_spy = Path(sys.executable).with_name("py-spy")
    program(tmp_path / "py-spy", FAILS_ONCE.format(at=tmp_path / "py-spy", py_spy=py_spy))
    keys = f"python: {tmp_path}/python\ngpus_per_node: 0\non_stall: stop\ntimeouts: {{stall: 2s}}"
    job = write_job(tmp_path, "import signal\ndef step():\n    signal.pause()\nstep()", keys)
    env = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert "stalled for 2 s in step (worker.py:3)" in distlaunch("run", str(job), env=env, status=124).stderr
    assert (tmp_path / "py-spy.failed").exists()


def test_why_shows_where_the_ranks_are_before_they_count_as_stalled(tmp_path: Path, collective: Path) -> None:
    ready = "    print('ready', os.environ['RANK'], os.getpid(), flush=True)\n"
    worker = WAITS_OR_STEPS.replace("    c10d.", f"{ready}    c10d.")
    job = write_job(tmp_path, worker, f"{TWO}env: {{PLACE: {collective}}}")
    with running(job) as run:
        pid = run.wait_ready(2)[1]
        for suspended in (False, True):
            shown = distlaunch("why", str(run.run_directory()), status=0).stdout
            where = "rank 0 in all_reduce (worker.py:8); rank 1 not in a collective but in step (worker.py:6)"
            assert f"waiting: {where}" in shown
            assert (f"evidence: rank 1 (pid {pid} on node0) was suspended by a signal" in shown) == suspended
            kill(pid, signal.SIGCONT if suspended else signal.SIGSTOP)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
    assert run.events("StackDumped") == []  # the supervisor must not judge by the stacks of ranks that work
    evidence = distlaunch("why", str(run.run_directory()), "-v", status=0).stdout
    assert evidence.count("    step (worker.py:6)\n") == 2


def test_says_why_it_gets_no_stack_in_why_and_in_one_line_of_a_warning(tmp_path: Path) -> None:
    keys = f"{TWO}on_stall: warn\ncommand: [sh, -c, 'echo ready; exec sleep 1000']\n"
    (tmp_path / "job.yaml").write_text(keys)
    with running(tmp_path / "job.yaml") as run:
        run.wait_for("ready", times=2)
        shown = distlaunch("why", str(run.run_directory()), status=0).stdout
        assert re.search("\nwaiting: no stack for ranks 0-1: .+\n", shown), shown
        assert "\nwaiting: no rank has failed; the last output came " in shown
    with running(tmp_path / "job.yaml", "--set", "timeouts.stall=1s", "--set", "logs.dir=other") as run:
        run.wait_for("no stack for rank 0: ")
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
    assert len(re.findall("no stack for rank 0: .+\n", run.stderr)) == 1
    assert all(line.startswith("distlaunch: ") for line in run.stderr.splitlines())
    assert "Stack backtrace" not in run.stderr


def test_reports_a_rank_that_a_signal_has_stopped(tmp_path: Path) -> None:
    worker = """
        import os, signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.environ["RANK"] == "1" and os.kill(os.getpid(), signal.SIGSTOP)
    """
    keys = f"{TWO}on_stall: stop\ntimeouts: {{stall: 1s, stop: 100ms}}"
    done = distlaunch("run", str(write_job(tmp_path, worker, keys)))
    told = r"rank 1 \(node0, pid (\d+): stopped by a signal; `kill -CONT \1` resumes it\)"
    assert re.search(f"stalled: {told}: ", done.stderr), done.stderr
    assert "rank 1 (node0) stalled for 1 s: stopped by a signal" in done.stderr
    assert "rank 1 is blocked in" not in done.stderr
    assert "hint: " not in done.stderr  # distlaunch itself has killed it


# Joining

ONE_IS_MISSING = """
    import os, signal, sys
    if os.environ["RANK"] == "0":
        sys.exit(0)
    if os.environ["RANK"] == "1":
        signal.pause()
    from torch.distributed import init_process_group
    init_process_group("gloo")
"""
TWICE_A_SLOW_IMPORT_S = 40
"""Until then rank 2 has imported torch, also on two cores that run other tests."""


@pytest.mark.long
def test_gives_up_when_rank_0_does_not_join(tmp_path: Path) -> None:
    keys = f"gpus_per_node: 0\nprocs_per_node: 3\ntimeouts: {{join: {TWICE_A_SLOW_IMPORT_S}s}}"
    done = distlaunch("run", str(write_job(tmp_path, ONE_IS_MISSING, keys)), status=124)
    told = (
        r"0/3 ranks joined; waiting for rank 0 \(node0.*exited with status 0\), "
        r"rank 1 \(node0, pid \d+: has not imported torch or JAX yet\), rank 2 \(node0, pid \d+: "
    )
    refused = r"connection to the rendezvous refused\); the others are waiting for rank 0"
    at_the_end = rf"; gave up after {TWICE_A_SLOW_IMPORT_S} s \(timeouts\.join\)\n"
    notice, *_, end = re.findall(rf"{told}.*\n", done.stderr)
    assert "gave up" not in notice  # after 15 s; rank 2 may still import torch
    assert re.fullmatch(rf"{told}{refused}{at_the_end}", end), end


CONNECTS = """
import signal, socket, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
signal.pause()
"""


def test_looks_again_at_a_connection_that_takes_its_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]

        def is_sent() -> bool:
            return any(s.state == procfs.SYN_SENT and s.remote_port == port for s in procfs.sockets())

        # The queue is full: a SYN is dropped, and sent again.
        with socket.create_connection(("127.0.0.1", port)):
            arrivals = Arrivals(port)
            worker = Going(tmp_path, [sys.executable, "-c", CONNECTS, str(port)])
            try:
                wait_until(is_sent, lambda: "no SYN was sent")
                assert arrivals.look({0: worker.process.pid}) == set()
                server.accept()[0].close()
                worker.wait_for("connected")
                assert arrivals.look({0: worker.process.pid}) == {0}
            finally:
                worker.kill()


def test_a_worker_has_not_joined_by_what_it_inherits_until_its_exec() -> None:
    """Between fork and exec, it has its launcher's sockets, one of which may lead to the same port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        worker, box = SimpleNamespace(local_rank=0, pid=os.getpid(), started=False), mock.Mock(node=0)
        joins = JoinWatch(poller := mock.Mock(), box, lambda: [worker])  # type: ignore[list-item]
        with socket.create_connection(("127.0.0.1", port)):
            joins.begin(port, ())
            assert joins.joined == set()
            worker.started = True
            poller.after.call_args.args[2]()
            assert joins.joined == {0}


# Dumps of torch's flight recorder

# Gloo stands for nccl, which can't run here: the same recorder, but only NCCL's watchdog dumps by itself.
RECORDS = """
    import os, pathlib, signal, sys, time, torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace

    dist.init_process_group("gloo")
    rank, x = dist.get_rank(), torch.ones(4)
    dist.all_reduce(x)
    dist.barrier()
    if rank == 0:
        dist.all_reduce(x, async_op=True)  # the one to which rank 1 never comes
    elif "LEAVES" in os.environ:
        dist.distributed_c10d._get_default_store().set("dumped1", str(os.getpid()))
        os._exit(0)
    pathlib.Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}").write_bytes(_dump_fr_trace())
    store = dist.distributed_c10d._get_default_store()
    store.set(f"dumped{rank}", "")
    while rank != 0:
        signal.pause()
    pid = store.get("dumped1").decode()
    while pid and os.path.exists(f"/proc/{pid}"):
        time.sleep(0.02)
    print(os.environ["WATCHDOG"], file=sys.stderr)
    os.abort()
"""
NCCL = "backend: nccl\ngpus_per_node: 2\nenv: {CUDA_VISIBLE_DEVICES: ''}\n"


def test_names_the_rank_that_missed_the_last_collective(tmp_path: Path) -> None:
    """And blames it, rather than the rank that timed out."""
    job = write_job(tmp_path, RECORDS, NCCL)
    done = distlaunch("run", str(job), "--set", f"env.WATCHDOG={json.dumps(WATCHDOG)}", status=134)
    how = "killed by signal 6 (SIGABRT), after timing out while waiting for another rank"
    assert f"distlaunch: rank 0 (node0) failed first: {how}" in done.stderr
    waits = "rank 0 was waiting in all_reduce #3 of default_pg, called at worker.py:"
    assert waits in done.stderr and ", never reached by rank 1 (last in " in done.stderr, done.stderr
    assert "frame #" not in done.stderr.partition("failed first")[2]
    assert "distlaunch: rank 1: stopped by distlaunch\n" in done.stderr
    assert re.search(r"hint: look for a branch .*\n", done.stderr)
    (directory,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in directory.glob("*.flight")) == ["rank0.flight", "rank1.flight"]
    shown = distlaunch("why", cwd=tmp_path, status=0).stdout
    assert re.search(rf"\nlikely root cause: {waits}.*, never reached by rank 1 \(", shown), shown
    assert f"\nthen: rank 0 (node0) failed first: {how}" in shown


def test_says_that_the_rank_that_is_missing_had_finished(tmp_path: Path) -> None:
    """It left no dump, and may have called the collective in which the other one hangs."""
    job = write_job(tmp_path, RECORDS, NCCL)
    log = f"env.WATCHDOG={json.dumps(WATCHDOG)}"
    done = distlaunch("run", str(job), "--set", log, "--set", "env.LEAVES=1", status=134)
    waits = (
        r"rank 0 was waiting in all_reduce #3 of default_pg, called at worker\.py:\d+; rank 1 had finished\n"
    )
    assert re.search(f"distlaunch: {waits}", done.stderr), done.stderr
    assert "; rank 1 had already exited with status 0 (uneven batches?)" in done.stderr


@pytest.mark.parametrize("does", ['printf x > "${TORCH_FR_DUMP_TEMP_FILE}1"', 'rm -rf "$TMPDIR"/*'])
def test_a_dump_of_a_child_or_a_missing_directory_does_no_harm(tmp_path: Path, does: str) -> None:
    """A rank may start a process per GPU, and may clean what it takes for its own directory."""
    (tmp_path / "tmp").mkdir()
    command = json.dumps(["sh", "-c", f"{does}; echo x > result.txt"])
    (tmp_path / "job.yaml").write_text(f"command: {command}\ncollect: [result.txt]\n{NCCL}")
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    done = distlaunch("run", "job.yaml", "--set", "procs_per_node=1", cwd=tmp_path, env=env, status=0)
    assert "lost" not in done.stderr and "early" not in done.stderr, done.stderr
    assert len([*(tmp_path / "runs").rglob("result.txt")]) == 1


class Evil:
    """Pickles to a call."""

    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("ran",))


def test_ignores_a_file_that_is_not_a_dump_and_runs_nothing_in_it(tmp_path: Path) -> None:
    broken = {"entries": 3, "pg_config": {"": {"ranks": "[["}}}
    odd = [Evil(), {"entries": [1, {"process_group": 3}]}, broken, 7]
    for rank, data in enumerate([b"\x80garbage", *map(pickle.dumps, odd)]):
        (tmp_path / f"rank{rank}.flight").write_bytes(data)
    found = dict(flight_dumps(str(tmp_path), 0, 9))
    assert found == {2: odd[1], 3: odd[2], 4: 7}
    assert waiting_lines(found.items(), 9) == []


def test_reads_what_it_can_of_a_dump_that_was_made_to_be_hard_to_read() -> None:
    deep: Any = []
    wide: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    for _ in range(100):  # 2 to the power of 100 characters, as text
        wide = [wide, wide]
    for odd in (deep, wide, 10**5000, -1, "x" * 10_000):
        frame = {"filename": "train.py", "line": odd}
        hard = {**call(7, "barrier"), "profiling_name": odd, "frames": [{"filename": odd}, frame]}
        entries = [{**hard, "process_group": (odd, "default_pg")}, {**hard, "collective_seq_id": odd}]
        for sizes, types in ((odd, odd), ([odd], [odd]), ([[odd]], ["Float"]), ([[9**19] * 99], ["Float"])):
            tensor = {"input_sizes": sizes, "input_dtypes": types, "process_group": (odd, "default_pg")}
            entries.append({**call(7, "all_reduce"), **tensor})
        configs = {"": {"ranks": [odd, *[0, 1] * 9]}, "odd": {"ranks": odd}}
        (line,) = waiting_lines([(0, {"entries": entries, "pg_config": configs})], 2)
        assert line.endswith("; no record of rank 1")
        assert len(line) < 1000


def call(
    number: int, name: str, group: str = "default_pg", ended: bool = False, size: tuple[int, ...] = ()
) -> dict[str, object]:
    frames = [{"filename": "/x/torch/y.py", "line": 1}, {"filename": "/x/train.py", "line": number}]
    named = {"process_group": (group[:1], group), "profiling_name": f"nccl:{name}", "frames": frames}
    tensors = {"input_sizes": [[*size]], "input_dtypes": ["Float"]} if size else {}
    return {**named, **tensors, "collective_seq_id": number, "state": "completed" if ended else "started"}


def test_the_group_whose_missing_rank_waits_nowhere_comes_first() -> None:
    """Ranks 0 and 3 wait in their group for rank 1, which waits in another group for rank 2."""
    groups, waits = {"a": {"ranks": "[0, 1, 3]"}, "b": {"ranks": "[1, 2]"}}, [call(2, "all_reduce", "a")]
    entries = [waits, [call(1, "all_reduce", "a", True), call(4, "broadcast", "b")], [], waits]
    dumps = {rank: {"pg_config": groups, "entries": each} for rank, each in enumerate(entries)}
    first, second = waiting_lines(dumps.items(), 4)
    where = "in broadcast #4 of b, called at train.py:4; no record of rank 2"
    assert first == f"rank 1 was waiting {where}"
    where = "in all_reduce #2 of a, called at train.py:2, never reached by rank 1"
    assert second == f"ranks 0, 3 were waiting {where} (last in all_reduce at train.py:1)"


def test_names_ranks_that_call_different_collectives() -> None:
    dumps = {rank: {"entries": [call(7, name)]} for rank, name in enumerate(["barrier", "gather", "gather"])}
    differs = "collective #7 of default_pg differs: rank 0 called barrier at train.py:7, "
    assert waiting_lines(dumps.items(), 3) == [f"{differs}ranks 1-2 called gather at train.py:7"]
    ended = {"entries": [call(7, "barrier", ended=True)]}
    assert waiting_lines([(rank, ended) for rank in range(3)], 3) == []


def test_names_ranks_whose_collectives_differ_although_one_of_them_has_ended() -> None:
    """As seen on an H200: to the rank that sends a broadcast, it ends although nobody receives it."""
    sent = [call(7, "broadcast", ended=True), *(call(at, "send", "b", True) for at in range(200))]
    dumps = {0: {"entries": [call(7, "all_reduce")]}, 1: {"entries": sent}}
    (line,) = waiting_lines(dumps.items(), 2)
    called = "rank 0 called all_reduce at train.py:7, rank 1 called broadcast at train.py:7"
    assert line == f"collective #7 of default_pg differs: {called}"


def test_names_ranks_that_pass_tensors_of_different_sizes() -> None:
    """As seen on an H200: the smaller tensor is done, and its rank then waits in the next collective."""
    went_on = [call(7, "all_reduce", ended=True, size=(4, 4)), call(8, "all_reduce_barrier", size=(1,))]
    dumps = {0: {"entries": went_on}, 1: {"entries": [call(7, "all_reduce", size=(32,))]}}
    (line,) = waiting_lines(dumps.items(), 2)
    one, other = "all_reduce with 16 float values", "all_reduce with 32 float values"
    called = f"rank 0 called {one} at train.py:7, rank 1 called {other} at train.py:7"
    assert line == f"collective #7 of default_pg differs: {called}"
    dumps[1] = {"entries": [call(7, "all_reduce", size=(2, 8))]}
    (line,) = waiting_lines(dumps.items(), 2)
    assert line.startswith("rank 0 was waiting in all_reduce_barrier #8 "), "only the number of values counts"
    uneven = [(rank, {"entries": [call(7, "all_to_all", size=(rank + 1,))]}) for rank in range(2)]
    assert waiting_lines(uneven, 2) == []


def test_names_the_collective_that_hangs_rather_than_the_last_one_that_was_called() -> None:
    queued = {"entries": [call(2, "broadcast", ended=True), *(call(at, "all_reduce") for at in (3, 4, 5))]}
    dumps = {0: queued, 1: {"entries": [call(2, "broadcast", ended=True)]}}
    late = "called at train.py:3, never reached by rank 1 (last in broadcast at train.py:2)"
    assert waiting_lines(dumps.items(), 2) == [f"rank 0 was waiting in all_reduce #3 of default_pg, {late}"]
    gone = "rank 0 was waiting in all_reduce #3 of default_pg, called at train.py:3; "
    assert waiting_lines([(0, queued)], 2) == [f"{gone}no record of rank 1"]
    assert waiting_lines([(0, queued)], 2, finished=[1]) == [f"{gone}rank 1 had finished"]


def test_blames_no_rank_that_waits_in_the_same_collective() -> None:
    """One of them has called more, and waits for the same rank, whose dump is missing, or for a network."""
    dumps = {
        0: {"entries": [call(3, "all_reduce"), call(4, "all_reduce")]},
        1: {"entries": [call(3, "all_reduce")]},
    }
    assert waiting_lines(dumps.items(), 2) == []
    gone = "ranks 0-1 were waiting in all_reduce #3 of default_pg, called at train.py:3; no record of rank 2"
    assert waiting_lines(dumps.items(), 3) == [gone]
    # On rank 1, it has ended: rank 0 may only be slower, and rank 1 waits for it in the next one.
    dumps = {
        0: {"entries": [call(3, "barrier")]},
        1: {"entries": [call(3, "barrier", ended=True), call(4, "scan")]},
    }
    late = "never reached by rank 0 (last in barrier at train.py:3)"
    assert waiting_lines(dumps.items(), 2) == [
        f"rank 1 was waiting in scan #4 of default_pg, called at train.py:4, {late}"
    ]


def test_a_mismatch_is_never_the_consequence_of_another_hang() -> None:
    """Ranks 0 and 1 call different collectives in their group, and the others wait for them."""
    groups = {"a": {"ranks": "[0, 1, 2, 3]"}, "b": {"ranks": "[0, 1]"}}
    entries = [[call(1, "gather", "b")], [call(1, "barrier", "b")], [call(2, "all_reduce", "a")], []]
    entries[:2] = [[call(1, "all_reduce", "a", True), *each] for each in entries[:2]]
    dumps = {rank: {"pg_config": groups, "entries": each} for rank, each in enumerate(entries)}
    first, second = waiting_lines(dumps.items(), 4)
    assert first.startswith("collective #1 of b differs: rank 0 called gather ")
    assert second.startswith(
        "rank 2 was waiting in all_reduce #2 of a, called at train.py:2, never reached by "
    )
    dumps[0] = {"entries": [call(7, "all_reduce")]}
    dumps[1] = {"entries": [call(7, "broadcast")]}
    (line,) = waiting_lines([(rank, dumps[rank]) for rank in range(2)], 3)
    assert line.startswith("collective #7 of default_pg differs: "), "although rank 2 is missing"


def test_a_group_without_a_description_goes_by_its_number() -> None:
    entry = {**call(7, "barrier"), "process_group": ("3", "undefined")}
    dump = {"entries": [entry], "pg_config": {"3": {"ranks": "[0, 1]", "desc": "undefined"}}}
    assert " waiting in barrier #7 of group 3, called at " in waiting_lines([(0, dump)], 2)[0]


def test_keeps_little_of_a_dump_that_is_large() -> None:
    """The calls in which ranks may hang are kept: the first that have not ended, and the last."""
    ended = [call(at, "barrier", ended=True) for at in range(1, 9000)]
    long = {"entries": [*ended, *(call(at, "barrier") for at in range(9000, 18_000))]}
    (group,) = _groups([(0, long)], 1)
    assert min(group.calls[0]) == 9000 and max(group.calls[0]) == 17_999 and len(group.calls[0]) == 2 * KEPT
    many = {"entries": [call(1, "barrier", f"{at}") for at in range(9000)]}
    assert len(_groups([(0, many)], 1)) == MAX_GROUPS


MAPS = """
import mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_says_which_library_a_rank_has_imported(tmp_path: Path) -> None:
    """A file in a directory of that name: what counts is the path of what a process has mapped."""
    (tmp_path / "jaxlib").mkdir()
    (tmp_path / "jaxlib" / "x.so").write_bytes(bytes(4096))
    argv = [sys.executable, "-I", "-c", MAPS, str(tmp_path / "jaxlib" / "x.so")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdin and rank.stdout and rank.stdout.readline() == b"ready\n"
        ((_, words),) = doing([rank.pid], 1)
        rank.stdin.close()
    assert words.startswith("JAX imported, ")


WORKS_FOR_EVIDENCE = """
    import os, sys, time
    print([os.environ[f"TORCH_FR_{name}"] for name in ("BUFFER_SIZE", "DUMP_TEMP_FILE")], flush=True)
    pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + os.environ["RANK"] + ".pipe"
    os.mkfifo(pipe)
    while True:
        open(pipe).read()
        print("[E1126 19:21:25.9 ProcessGroupNCCL.cpp:1628] preparing to dump debug info", file=sys.stderr)
        until = time.process_time() + 0.5
        while time.process_time() < until:
            pass
"""


def test_a_stalled_rank_that_helps_to_collect_evidence_has_not_resumed(tmp_path: Path) -> None:
    keys = f"{NCCL.replace('2', '1')}on_stall: stop\ntimeouts: {{stall: 2s}}"
    own = ("--set", "env.TORCH_FR_BUFFER_SIZE=7", "--set", "env.TORCH_FR_DUMP_TEMP_FILE=/mine")
    done = distlaunch("run", str(write_job(tmp_path, WORKS_FOR_EVIDENCE, keys)), *own, status=124)
    assert "['7', '/mine']" in done.stdout  # the user's variables stay
    assert "rank 0 (node0) stalled for 2 s" in done.stderr
    assert "preparing to dump" in done.stderr
    assert "resumed" not in done.stderr


LOADS_AND_JOINS = """
    import ctypes, os, signal, socket, time
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    ctypes.CDLL(os.environ["TORCH_" + os.environ["GROUP_RANK"]] + "/torch/lib/libtorch_cpu.so")
    store = socket.create_server(address) if os.environ["RANK"] == "0" else None
    while True:
        try:
            joined = socket.create_connection(address)
            signal.pause()
        except ConnectionRefusedError:
            time.sleep(0.05)
"""


def torch_like(place: Path, version: str) -> Path:
    """A directory with a torch of this version, of which only a library can be loaded."""
    library = next(Path("/usr/lib").rglob("libutil.so.1"))
    (place / "torch/lib").mkdir(parents=True)
    (place / "torch/lib/libtorch_cpu.so").write_bytes(library.read_bytes())
    (place / "torch/version.py").write_text(f"__all__ = ['__version__']\n__version__ = '{version}'\n")
    return place


def test_names_the_versions_of_torch_that_nodes_have_loaded(tmp_path: Path) -> None:
    old, new = torch_like(tmp_path / "old", "2.12.1"), torch_like(tmp_path / "new one", "2.13.0+cpu")
    keys = f"nodes: 2\ngpus_per_node: 0\nenv: {{TORCH_0: {new}, TORCH_1: {new}}}\n"
    job = write_job(tmp_path, LOADS_AND_JOINS, keys)
    different = "the nodes have different versions of torch: 2.13.0+cpu on node0; 2.12.1 on node1; install"
    for name, options in (("same", ()), ("mixed", ("--set", f"env.TORCH_1={old}"))):
        with running(job, "--set", f"logs.dir={name}", *options) as run:
            run.wait_for(different if options else "joined the rendezvous")
            run.process.send_signal(signal.SIGINT)
            run.wait()
        assert (different in run.stderr) == bool(options)
    (same,), (mixed,) = (list((tmp_path / name).iterdir()) for name in ("same", "mixed"))
    compared = distlaunch("why", str(mixed), "--diff", str(same), status=0).stdout
    assert "node1: torch: 2.13.0+cpu → 2.12.1\n" in compared
    distlaunch("report", str(mixed), "-o", str(tmp_path / "run.html"), status=0)
    assert "2.13.0+cpu on node0" in (tmp_path / "run.html").read_text()
