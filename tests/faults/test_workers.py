"""Faults of workers: each ends the job everywhere, in time, and leaves nothing."""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Bed, find, parent_of
from tests.faults.conftest import Figures, Pace
from tests.faults.memory_group import memory_group
from tests.faults.scenes import (
    CPU,
    IGNORES,
    ONE,
    RANKS,
    SLEEPER,
    STUBBORN,
    Ending,
    assert_no_traceback,
    clean,
    ends,
    on_hosts,
    open_gate,
    stop_after,
    worker,
)
from tests.harness import (
    PATIENCE_S,
    ROOT,
    children_of,
    distlaunch_argv,
    held,
    kill,
    running,
    wait_gone,
    wait_until,
    write_job,
)

KILLED = "killed by signal 9 (SIGKILL)"
SIGKILLED = 128 + signal.SIGKILL


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A fifo in the workers' folder; who reads it waits for `open_gate`."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


@pytest.mark.fault(1, "a worker exits with 1", promise="1")
def test_exit_1(tmp_path: Path, gate: Path, figures: Figures) -> None:
    fails = worker("""
        if os.environ["RANK"] == "2":
            open("gate").read()
            raise SystemExit(1)
        signal.pause()
    """)
    with running(write_job(tmp_path, fails, CPU)) as run:
        pids = run.wait_ready(RANKS)
        with clean(run, pids, figures, Ending(1, "rank 2 (node1) failed first: exit status 1", 2.0)):
            open_gate(gate)


@pytest.mark.fault(2, "a worker is killed by a signal", promise="1, 9")
@pytest.mark.parametrize("signum", [signal.SIGSEGV, signal.SIGKILL])
def test_killed_by_a_signal(tmp_path: Path, figures: Figures, signum: signal.Signals) -> None:
    no_core = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
    words = f"rank 3 (node1) failed first: killed by signal {signum:d} ({signum.name})"
    with running(write_job(tmp_path, worker(first=no_core), CPU)) as run:
        pids = run.wait_ready(RANKS)
        with clean(run, pids, figures, Ending(128 + signum, words, 2.0)):
            kill(pids[3], signum)


@pytest.mark.fault(3, "workers ignore SIGTERM", promise="1")
def test_workers_that_ignore_sigterm(tmp_path: Path, figures: Figures, pace: Pace) -> None:
    with running(write_job(tmp_path, STUBBORN, CPU), *stop_after(pace.stop_s)) as run:
        pids = run.wait_ready(RANKS)
        ending = Ending(SIGKILLED, f"rank 3 (node1) failed first: {KILLED}", pace.stop_s + 2.0)
        with clean(run, pids, figures, ending):
            kill(pids[3])


@pytest.mark.fault(3, "workers ignore SIGTERM, over ssh", promise="1")
def test_workers_on_hosts_that_ignore_sigterm(tmp_path: Path, bed: Bed, figures: Figures, pace: Pace) -> None:
    with running(write_job(tmp_path, STUBBORN, on_hosts(bed)), *stop_after(pace.stop_s)) as run:
        pids = run.wait_ready(RANKS)
        ending = Ending(SIGKILLED, f"rank 2 (host2) failed first: {KILLED}", pace.stop_s + 2.0)
        with clean(run, pids, figures, ending):
            kill(pids[2])


@pytest.mark.fault(4, "workers are stopped with SIGSTOP", promise="1")
def test_stopped_workers(tmp_path: Path, figures: Figures, pace: Pace) -> None:
    """SIGTERM stays pending until they are woken: they have to get the chance to heed it."""
    heeds = worker(
        first="""
            def leave(*_):
                print("tidied up", flush=True)
                sys.exit(0)
            signal.signal(signal.SIGTERM, leave)
        """
    )
    with running(write_job(tmp_path, heeds, CPU), *stop_after(pace.stop_s)) as run:
        pids = run.wait_ready(RANKS)
        ending = Ending(SIGKILLED, f"rank 3 (node1) failed first: {KILLED}", pace.stop_s + 2.0)
        with clean(run, pids, figures, ending):
            for rank in (0, 1, 2):
                kill(pids[rank], signal.SIGSTOP)
            kill(pids[3])
        figures("not woken", 3 - run.stdout.count("tidied up"), at_most=0, unit="ranks")


@pytest.mark.fault(5, "the OOM killer strikes a worker", promise="1, 9")
def test_killed_for_its_memory(tmp_path: Path, gate: Path, figures: Figures) -> None:
    """In a memory cgroup below our own, so that only what the test starts can be struck."""
    uses_up = worker("""
        if os.environ["RANK"] == "2":
            open("gate").read()
            hog = b"x" * (1 << 30)
        signal.pause()
    """)
    words = f"rank 2 (node1) failed first: {KILLED}, probably by the OOM killer (the kernel reports 1 "
    with memory_group(256 << 20) as join, running(write_job(tmp_path, uses_up, CPU), preexec_fn=join) as run:
        pids = run.wait_ready(RANKS)
        with clean(run, pids, figures, Ending(SIGKILLED, words, 2.0)):
            open_gate(gate)
            wait_gone([pids[2]], PATIENCE_S)
        assert "hint: reduce memory use" in run.stderr


@pytest.mark.fault(5, "the kernel kills a worker for its CPU time", promise="1, 9")
def test_killed_by_the_kernel(tmp_path: Path, gate: Path, figures: Figures) -> None:
    """The same SIGKILL from the kernel, which is not taken for the OOM killer's."""
    uses_up = worker("""
        if os.environ["RANK"] == "2":
            import resource
            resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
            while True: pass
        signal.pause()
    """)
    with running(write_job(tmp_path, uses_up, CPU)) as run:
        pids = run.wait_ready(RANKS)
        with clean(run, pids, figures, Ending(SIGKILLED, f"rank 2 (node1) failed first: {KILLED}", 2.0)):
            wait_gone([pids[2]], PATIENCE_S)


@pytest.mark.long
@pytest.mark.fault(6, "a worker is in uninterruptible sleep", promise="8, 12")
def test_uninterruptible_sleep(tmp_path: Path, gate: Path, figures: Figures, pace: Pace) -> None:
    writes = worker(
        """
        if os.environ["RANK"] == "1":
            open("gate").read()
            os.write(file, b"x")
        while True: signal.pause()
        """,
        first=f"{IGNORES}\nfile = os.open(f'disk/{{os.environ[\"RANK\"]}}', os.O_CREAT | os.O_WRONLY)",
    )
    with (
        mounted_disk(tmp_path / "disk"),
        running(write_job(tmp_path, writes, CPU), *stop_after(pace.stop_s)) as run,
    ):
        pids = run.wait_ready(RANKS)
        with held(pids.values()) as ranks, frozen(tmp_path / "disk"):
            open_gate(gate)
            wait_uninterruptible(pids[1])
            kill(pids[0])
            began = time.monotonic()
            ranks.wait_ends([pids[0], pids[2], pids[3]], began + PATIENCE_S)
            figures("the other ranks gone", time.monotonic() - began, at_most=pace.stop_s + 2.0)
            assert run.wait() == SIGKILLED
            figures("the command ended", time.monotonic() - began, at_most=pace.stop_s + 15.0)
            assert f"rank 0 (node0) failed first: {KILLED}" in run.stderr
            assert f"node0: 1 process resists SIGKILL: python (pid {pids[1]})" in run.stderr
            assert_no_traceback(run.stderr)
        figures("gone after the disk's return", wait_gone([pids[1]], PATIENCE_S), at_most=2.0)


@contextlib.contextmanager
def mounted_disk(folder: Path) -> Iterator[None]:
    """A small ext4 of its own at `folder`."""
    tools = ("mkfs.ext4", "mount", "umount", "fsfreeze")
    if os.geteuid() or not all(map(find, tools)):
        pytest.skip(f"root and {', '.join(tools)} are needed for a disk that can be frozen")
    folder.mkdir()
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(16 << 20)
    call("mkfs.ext4", "-q", image)
    call("mount", "-o", "loop", image, folder)
    try:
        yield
    finally:
        call("umount", folder)


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Who writes to the disk at `folder` waits, and no signal wakes it."""
    call("fsfreeze", "--freeze", folder)
    try:
        yield
    finally:
        call("fsfreeze", "--unfreeze", folder)


def call(tool: str, *words: str | Path) -> None:
    """Run a tool, which must succeed."""
    subprocess.run([str(find(tool)), *words], check=True, capture_output=True, timeout=PATIENCE_S)


def wait_uninterruptible(pid: int) -> None:
    """Wait until the kernel shows a process as D; nothing announces that, hence the looks."""
    pidfd, deadline = os.pidfd_open(pid), time.monotonic() + PATIENCE_S
    try:
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "D":
            assert not select.select([pidfd], [], [], 0.01)[0], f"process {pid} ended"
            assert time.monotonic() < deadline, f"process {pid} was never in uninterruptible sleep"
    finally:
        os.close(pidfd)


SPAWNS = """
    import subprocess
    for i in range(3):
        number = 100 * (1 + i) + int(os.environ["RANK"])
        code = f"import os, signal; os.write(1, b'ready {number} %d\\\\n' % os.getpid()); signal.pause()"
        subprocess.Popen([sys.executable, "-c", code], start_new_session={new_session})
"""


@pytest.mark.fault(7, "workers have children of their own", promise="2")
def test_grandchildren(tmp_path: Path, figures: Figures) -> None:
    parents = worker(first=SPAWNS.replace("{new_session}", "False"))
    with running(write_job(tmp_path, parents, CPU)) as run:
        pids = run.wait_ready(4 * RANKS)
        with clean(run, pids, figures, Ending(SIGKILLED, f"rank 1 (node0) failed first: {KILLED}", 2.0)):
            kill(pids[1])


@pytest.mark.fault(8, "workers have daemons: setsid and double fork", promise="2")
def test_daemons(tmp_path: Path, bed: Bed, figures: Figures) -> None:
    daemon = f"""
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                {IGNORES}
                os.write(1, b"ready %d %d\\n" % (100 + int(os.environ["RANK"]), os.getpid()))
                while True: signal.pause()
            os._exit(0)
        os.wait()
    """
    with running(write_job(tmp_path, worker(first=daemon), on_hosts(bed))) as run:
        pids = run.wait_ready(2 * RANKS)
        with clean(run, pids, figures, Ending(SIGKILLED, f"rank 1 (host2) failed first: {KILLED}", 2.0)):
            kill(pids[1])


@pytest.mark.fault(9, "workers are fork bombs", promise="2")
def test_fork_bombs(tmp_path: Path, figures: Figures) -> None:
    """Each process forks three, four levels deep, and each that dies is replaced: many, but not endless."""
    bomb = worker(
        first=f"""
            up, tell = os.pipe()
            def fork(depth):
                if os.fork() == 0:
                    {IGNORES}
                    os.write(tell, b".")
                    explode(depth)
            def explode(depth):
                for _ in range(3 if depth else 0):
                    fork(depth - 1)
                while depth:
                    os.wait()
                    fork(depth - 1)
                while True: signal.pause()
            fork(4)
            seen = 0
            while seen < 1 + 3 + 9 + 27 + 81:
                seen += len(os.read(up, 100))
        """
    )
    job = write_job(tmp_path, bomb, "nodes: 2\ngpus_per_node: 0\n")
    with running(job) as run:
        ranks = run.wait_ready(2)
        pids = dict(enumerate(run.holders()))
        figures("processes of the two bombs", len(pids), unit="processes")
        assert len(pids) >= 2 * 122
        with held([*pids.values(), *map(parent_of, ranks.values())]) as processes:
            kill(ranks[1])
            began = time.monotonic()
            processes.wait_ends(processes.pids, began + PATIENCE_S)
            figures("all gone", time.monotonic() - began, at_most=5.0)
            ends(run, figures, Ending(SIGKILLED, f"rank 1 (node1) failed first: {KILLED}", 5.0), began)


@pytest.mark.fault(10, "a worker ends, its child keeps its output open", promise="1")
@pytest.mark.parametrize("status", [0, 3])
def test_output_kept_open(tmp_path: Path, gate: Path, figures: Figures, status: int) -> None:
    leaves = worker(
        f"""
            open("gate").read()
            sys.exit({status})
        """,
        first=SPAWNS.replace("{new_session}", "True"),
    )
    with running(write_job(tmp_path, leaves, ONE)) as run:
        pids = run.wait_ready(4)
        words = "1 rank on 1 node finished" if status == 0 else f"failed first: exit status {status}"
        with clean(run, pids, figures, Ending(status, words, 2.0)):
            open_gate(gate)
            began = time.monotonic()
            run.wait_for("outlived" if status == 0 else "failed first")
            figures("the exit was reported", time.monotonic() - began, at_most=1.0)


@pytest.mark.fault(11, "a rank has finished, the others go on", promise="9")
def test_one_finishes_early(tmp_path: Path, figures: Figures) -> None:
    """Each rank ends only after the one before it has been reaped: whoever was stopped could not tell so."""
    for rank in range(RANKS):
        os.mkfifo(tmp_path / f"gate{rank}")
    finishes = worker("""
        open(f"gate{os.environ['RANK']}").read()
        print("finished by itself", flush=True)
    """)
    with running(write_job(tmp_path, finishes, CPU)) as run:
        pids = run.wait_ready(RANKS)
        with held(pids.values()) as ranks:
            for done, (rank, pid) in enumerate(pids.items(), 1):
                open_gate(tmp_path / f"gate{rank}")
                ranks.wait_ends([pid], time.monotonic() + PATIENCE_S)
                run.wait_for("finished by itself", done)
        assert run.wait() == 0, run.stderr
        stopped = RANKS - run.stdout.count("finished by itself")
        figures("ranks stopped because another had finished", stopped, at_most=0, unit="ranks")


@pytest.mark.fault(12, "all succeed and leave daemons", promise="2")
def test_daemons_left_by_success(tmp_path: Path, gate: Path, figures: Figures) -> None:
    leaves = worker('open("gate").read()', first=SPAWNS.replace("{new_session}", "True"))
    with running(write_job(tmp_path, leaves, ONE)) as run:
        pids = run.wait_ready(4)
        with clean(run, pids, figures, Ending(0, "killed 3 processes that outlived their workers", 2.0)):
            open_gate(gate)


@pytest.mark.fault(13, "another process gets the PID of a worker that has ended", promise="2")
def test_reused_pid(tmp_path: Path, figures: Figures) -> None:
    """Inside a PID namespace, where the next PID can be chosen; see `reused_pid`."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.geteuid() or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a PID namespace is needed, which only root can make")
    argv = [*inside, sys.executable, "-m", "tests.faults.reused_pid", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["status"] == SIGKILLED
    figures("signals to a foreign process", found["signals"], at_most=0, unit="signals")


@pytest.mark.fault(14, "a worker leaves a thousand orphans, which end at once", promise="2")
def test_a_thousand_orphans(tmp_path: Path, gate: Path, figures: Figures) -> None:
    """A pipe's end tells that the last has ended; a line that is printed then comes after the reaping."""
    orphans = worker(
        """
            open("gate").read()
            os.close(hold)
            os.read(ends, 1)
            print("they have ended", flush=True)
            while True: signal.pause()
        """,
        first="""
            ends, tell = os.pipe()
            wait, hold = os.pipe()
            if os.fork() == 0:
                os.close(hold)
                for _ in range(1000):
                    if os.fork() == 0:
                        os.read(wait, 1)
                        os._exit(0)
                os._exit(0)
            os.close(tell)
            os.wait()
        """,
    )
    with running(write_job(tmp_path, orphans, ONE)) as run:
        pids = run.wait_ready(1)
        agent = parent_of(pids[0])
        assert len(children_of(agent)) == 1001
        open_gate(gate)
        run.wait_for("they have ended")
        # A pipe's end is told before its writer can be reaped.
        wait_until(lambda: children_of(agent) == [pids[0]], lambda: f"{len(children_of(agent))} are left")
        figures("zombies of 1000 orphans", len(children_of(agent)) - 1, at_most=0, unit="zombies")
        with clean(run, pids, figures, Ending(SIGKILLED, f"rank 0 (node0) failed first: {KILLED}", 2.0)):
            kill(pids[0])


@pytest.mark.fault(15, "a program that can't be started", promise="9")
@pytest.mark.parametrize(
    ("program", "status", "words"),
    [
        ("./missing", 127, "missing: No such file or directory"),
        ("./data", 126, "data: Permission denied"),
        ("./badshebang", 127, "the interpreter in its #! line does not exist"),
    ],
    ids=["missing", "not executable", "bad shebang"],
)
def test_what_cannot_be_started(
    tmp_path: Path, figures: Figures, program: str, status: int, words: str
) -> None:
    (tmp_path / "data").write_text("no program")
    (tmp_path / "badshebang").write_text("#!/no/such/interpreter\n")
    (tmp_path / "badshebang").chmod(0o755)
    (tmp_path / "job.yaml").write_text(f"command: [{program}]\n{CPU}")
    assert_refused(tmp_path / "job.yaml", figures, Ending(status, words, 2.0))


@pytest.mark.fault(16, "an environment that is too big", promise="9")
def test_environment_too_big(tmp_path: Path, figures: Figures) -> None:
    job = write_job(tmp_path, "", f"{CPU}env: {{BIG: {'x' * 200_000}}}")
    assert_refused(job, figures, Ending(126, "are too long (E2BIG)", 2.0))


def assert_refused(job: Path, figures: Figures, ending: Ending) -> None:
    """No rank of the job can be started: told, and not tried again."""
    with running(job) as run:
        run.wait_for("could not be started")
        ends(run, figures, ending, time.monotonic())
        tried = [(event["node"], event["local_rank"]) for event in run.events("WorkerUnstarted")]
        figures("tries of one rank", max(map(tried.count, tried)), at_most=1, unit="tries")


@pytest.mark.fault(17, "a worker reads stdin", promise="1")
def test_reads_stdin(tmp_path: Path, figures: Figures) -> None:
    job = write_job(tmp_path, "import sys; print(len(sys.stdin.buffer.read()))", CPU)
    done = subprocess.run(
        distlaunch_argv("run", str(job)),
        input=b"x" * 1000,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(read) == RANKS
    figures("bytes before the end of stdin", max(read), at_most=0, unit="bytes")


@pytest.mark.fault(18, "a worker has no descriptor left (EMFILE)", promise="1")
def test_worker_without_descriptors(tmp_path: Path, gate: Path, figures: Figures) -> None:
    opens = worker("""
        if os.environ["RANK"] == "2":
            open("gate").read()
            while True: os.dup(0)
        signal.pause()
    """)
    with running(write_job(tmp_path, opens, CPU)) as run:
        pids = run.wait_ready(RANKS)
        with clean(run, pids, figures, Ending(1, "  | OSError: [Errno 24] Too many open files", 2.0)):
            open_gate(gate)
        assert "rank 2 (node1) failed first: exit status 1" in run.stderr


@pytest.mark.fault(18, "an agent has too few descriptors for its workers (EMFILE)", promise="1, 9")
def test_agent_without_descriptors(tmp_path: Path, figures: Figures) -> None:
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))  # noqa: E731
    job = write_job(tmp_path, SLEEPER, f"{ONE}procs_per_node: 60\n")
    with running(job, preexec_fn=limit) as run:
        run.wait_for("could not be started")
        ends(run, figures, Ending(126, "(node0) could not be started", 2.0), time.monotonic())
        assert "Too many open files" in run.stderr


@pytest.mark.fault(19, "a node refuses to fork (EAGAIN)", promise="1, 9")
def test_fork_refused(tmp_path: Path, figures: Figures) -> None:
    """By a limit on the node's processes. Root has none, so there the agent is another user's."""
    uid = os.getuid() or 54321
    interpreter = tmp_path / "limited"
    limits = f"prlimit --nproc={tasks_of(uid) + 30}"
    if not os.getuid():
        keeps = "--inh-caps=-all,+dac_override --ambient-caps=-all,+dac_override"
        limits += f" setpriv --reuid={uid} --clear-groups {keeps}"
    interpreter.write_text(f'#!/bin/sh\nexec {limits} {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    job = tmp_path / "job.yaml"
    job.write_text(f"{ONE}procs_per_node: 60\npython: {interpreter}\ncommand: [sleep, infinity]\n")
    with running(job) as run:
        run.wait_for("could not be started")
        ends(run, figures, Ending(126, "(node0) could not be started", 2.0), time.monotonic())
        assert "Resource temporarily unavailable" in run.stderr


def tasks_of(uid: int) -> int:
    """Threads of a user, as the limit counts them."""
    found = 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and folder.stat().st_uid == uid:
                found += len(list((folder / "task").iterdir()))
    return found
