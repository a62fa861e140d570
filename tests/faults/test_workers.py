"""Faults of workers, and deaths of what is above them: all ends, in time, and leaves nothing."""

import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import harness
from tests.cluster.hosts import parent_of
from tests.cluster.workers import DAEMONS, SLEEPER, STUBBORN, worker
from tests.faults import chaos, scenes
from tests.faults.chaos import Scene
from tests.faults.disks import freezable_disk, frozen
from tests.faults.figures import Figures, Pace, fault
from tests.faults.memory import memory_group
from tests.faults.scenes import CPU, KILLED, ONE, RANKS, SIGKILLED, Ending, ends, ends_clean, killed
from tests.harness import (
    PATIENCE_S,
    Run,
    distlaunch,
    held,
    kill,
    open_gate,
    program,
    running,
    wait_gone,
    write_job,
)


def rank_2_does(what: str) -> str:
    """Workers of which rank 2, once the gate is open, does something."""
    return worker(f"""
        ready()
        if RANK == "2":
            open("gate").read()
            {what}
        wait()
    """)


SPINS = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1)); any(iter(int, 1))"
EXITS, CPU_TIME = "exit status 1\n", f"{KILLED}; the kernel reports no OOM kill"


@pytest.mark.parametrize(
    ("what", "how", "status"),
    [
        fault(1, "a worker exits with 1", "1", "raise SystemExit(1)", EXITS, 1),
        fault(5, "the kernel kills a worker for its CPU time", "1, 9", SPINS, CPU_TIME, SIGKILLED),
        fault(18, "a worker has no descriptor left (EMFILE)", "1", "while True: os.dup(0)", EXITS, 1),
    ],
)
def test_a_worker_fails(
    tmp_path: Path, gate: Path, figures: Figures, what: str, how: str, status: int
) -> None:
    ending = Ending(status, f"rank 2 (node1) failed first: {how}", 2.0)
    with ends_clean(write_job(tmp_path, rank_2_does(what), CPU), figures, ending) as (run, pids):
        open_gate(gate)
        wait_gone([pids[2]], PATIENCE_S)
    assert ("  | OSError: [Errno 24] Too many open files" in run.stderr) == ("dup" in what)


NO_CORE = worker("import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); ready(); wait()")
COMPUTES = worker("""
    ready()
    os.nice(19)  # the other tests come first
    while True: pass
""")
SPAWNS = """
    import subprocess
    for i in range(3):
        number = 100 * (1 + i) + int(RANK)
        code = f"import os, signal; os.write(1, b'ready {number} %d\\\\n' % os.getpid()); signal.pause()"
        subprocess.Popen([sys.executable, "-c", code], start_new_session={new_session})
    ready()
"""
CHILDREN = worker(SPAWNS.replace("{new_session}", "False") + "    wait()")
MIXED = worker("if RANK in '12': resist()\nready()\nwait()")
FAILED_FIRST = "failed first: "


class Blow(NamedTuple):
    """A signal to rank 2, or to what is above it, while workers with this text run; how the run then ends.

    Where they ignore SIGTERM, all have the grace, too: `grace_s`, or that of the pace.
    """

    does: str
    words: str = FAILED_FIRST + KILLED
    status: int = SIGKILLED
    signum: signal.Signals = signal.SIGKILL
    victim: Callable[[Scene], int] = chaos.worker
    ready: int = RANKS
    within_s: float = 2.0
    grace_s: float | None = None
    reaped: bool = True


ORPHANED = "host2 was lost: its agent's guardian process was killed"
SEGFAULT = Blow(NO_CORE, f"{FAILED_FIRST}killed by signal 11 (SIGSEGV)", 128 + signal.SIGSEGV, signal.SIGSEGV)
AGENT = Blow(MIXED, "host2 was lost: its agent ", scenes.NODE_LOST, victim=chaos.agent)
# The grace is more than the margin: two graces in a row are seen.
GUARDIAN = Blow(STUBBORN, ORPHANED, scenes.NODE_LOST, victim=chaos.guardian, grace_s=3.0, reaped=False)
CONTROLLER = Blow(STUBBORN, "", -signal.SIGKILL, victim=chaos.controller, reaped=False)
HANGUP = Blow(STUBBORN, "by SIGHUP", 128 + signal.SIGHUP, signal.SIGHUP, chaos.controller)
COMPUTING = "a worker is killed, the other nodes compute and do not communicate"


@pytest.mark.parametrize(
    ("nodes", "blow"),
    [
        fault(0, COMPUTING, "1", "ssh", Blow(COMPUTES, within_s=0.5)),
        fault(2, "SIGSEGV to a worker", "1, 9", "here", SEGFAULT),
        fault(2, "SIGKILL to a worker", "1, 9", "here", Blow(SLEEPER)),
        fault(3, "workers ignore SIGTERM", "1", "ssh", Blow(STUBBORN)),
        fault(7, "workers have children", "2", "here", Blow(CHILDREN, ready=4 * RANKS)),
        fault(8, "workers have daemons", "2", "ssh", Blow(DAEMONS, ready=2 * RANKS)),
        fault(20, "an agent is killed", "4", "ssh", AGENT),
        fault(20, "an agent is killed", "4", "slurm", AGENT),
        fault(21, "a guardian is killed", "4", "ssh", GUARDIAN),
        # slurmstepd kills what is left when the guardian ends: another run could see it first, and tell.
        fault(21, "a guardian is killed", "4", "slurm", GUARDIAN, alone=True),
        fault(24, "the command is killed", "3", "here", CONTROLLER),
        fault(24, "the command is killed", "3", "ssh", CONTROLLER),
        fault(24, "the command is killed", "3", "slurm", CONTROLLER),
        fault(27, "the terminal goes away: SIGHUP", "7", "here", HANGUP),
    ],
    indirect=["nodes"],
)
def test_a_signal_that_ends_a_process_ends_all(
    tmp_path: Path, nodes: str, figures: Figures, pace: Pace, blow: Blow
) -> None:
    grace_s = (blow.grace_s or pace.stop_s) if blow.does == STUBBORN else 0.0
    rank_2 = f"rank 2 ({'host2' if 'host2' in nodes else 'node1'}) "
    words = blow.words.replace(FAILED_FIRST, rank_2 + FAILED_FIRST)
    ending = Ending(blow.status, words, blow.within_s + grace_s, blow.reaped)
    options, job = scenes.stop_after(grace_s) if grace_s else (), write_job(tmp_path, blow.does, nodes)
    with ends_clean(job, figures, ending, *options, ready=blow.ready) as (run, _):
        kill(blow.victim(Scene(run, 2)), blow.signum)


@pytest.mark.fault(4, "workers are stopped with SIGSTOP", promise="1")
def test_wakes_stopped_workers(tmp_path: Path, figures: Figures, pace: Pace) -> None:
    """SIGTERM stays pending until they are woken: they have to get the chance to heed it."""
    job, ending = (
        write_job(tmp_path, scenes.LEAVES.replace("USR1", "TERM"), CPU),
        killed(3, "node1", pace.stop_s + 2.0),
    )
    with ends_clean(job, figures, ending, *scenes.stop_after(pace.stop_s)) as (run, pids):
        for rank in (0, 1, 2):
            kill(pids[rank], signal.SIGSTOP)
        kill(pids[3])
    figures("not woken", 3 - run.stdout.count("finished by itself"), at_most=0, unit="ranks")


@pytest.mark.fault(5, "the OOM killer strikes a worker", promise="1, 9")
def test_names_the_oom_killer(tmp_path: Path, gate: Path, figures: Figures) -> None:
    """In a memory cgroup below our own, so that only what the test starts can be struck."""
    job = write_job(tmp_path, rank_2_does('hog = b"x" * (1 << 30)'), CPU)
    words = f"rank 2 (node1) failed first: {KILLED}, probably by the OOM killer (the kernel reports 1 "
    ending = Ending(SIGKILLED, words, 2.0)
    with memory_group(256 << 20) as join, ends_clean(job, figures, ending, preexec_fn=join) as (run, pids):
        open_gate(gate)
        wait_gone([pids[2]], PATIENCE_S)
    assert "hint: reduce memory use" in run.stderr


@pytest.mark.long
@pytest.mark.fault(6, "a worker is in uninterruptible sleep", promise="8, 12")
def test_names_a_worker_in_d_state(tmp_path: Path, gate: Path, figures: Figures, pace: Pace) -> None:
    writes = worker("""
        resist()
        file = os.open(f"disk/{RANK}", os.O_CREAT | os.O_WRONLY)
        ready()
        if RANK == "1":
            open("gate").read()
            os.write(file, b"x")
        wait()
    """)
    job = write_job(tmp_path, writes, CPU)
    with freezable_disk(tmp_path / "disk") as disk, running(job, *scenes.stop_after(pace.stop_s)) as run:
        pids = run.wait_ready(RANKS)
        stat = Path(f"/proc/{pids[1]}/stat")
        with held(pids.values()) as ranks, frozen(disk):
            open_gate(gate)
            harness.wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "D", stat.read_text)
            kill(pids[0])
            began = time.monotonic()
            ranks.wait_ends([pids[0], pids[2], pids[3]], began + PATIENCE_S)
            figures("the other ranks gone", time.monotonic() - began, at_most=pace.stop_s + 2.0)
            assert run.wait() == SIGKILLED
            figures("the command ended", time.monotonic() - began, at_most=pace.stop_s + 15.0)
            assert f"rank 0 (node0) failed first: {KILLED}" in run.stderr
            assert f"node0: 1 process survived SIGKILL: python (pid {pids[1]})" in run.stderr
            scenes.assert_no_traceback(run.stderr)
        figures("gone after the disk's return", wait_gone([pids[1]], PATIENCE_S), at_most=2.0)


@pytest.mark.fault(9, "workers are fork bombs", promise="2")
def test_ends_fork_bombs(tmp_path: Path, figures: Figures) -> None:
    """Each process forks three, four levels deep, and each that dies is replaced: many, but not endless."""
    bomb = worker("""
        up, tell = os.pipe()
        def fork(depth):
            if os.fork() == 0:
                resist()
                os.write(tell, b".")
                for _ in range(3 if depth else 0):
                    fork(depth - 1)
                while depth:
                    os.wait()
                    fork(depth - 1)
                wait()
        fork(4)
        seen = 0
        while seen < 1 + 3 + 9 + 27 + 81:
            seen += len(os.read(up, 100))
        ready()
        wait()
    """)
    with running(write_job(tmp_path, bomb, "nodes: 2\ngpus_per_node: 0\n")) as run:
        ranks = run.wait_ready(2)
        pids = run.holders()
        figures("processes of the two bombs", len(pids), unit="processes")
        assert len(pids) >= 2 * 122
        with held([*pids, *map(parent_of, ranks.values())]) as processes:
            kill(ranks[1])
            began = time.monotonic()
            processes.wait_ends(processes.pids, began + PATIENCE_S)
            figures("all gone", time.monotonic() - began, at_most=5.0)
            ends(run, figures, killed(1, "node1", 5.0), began)


DAEMONS_LEFT = "all succeed and leave daemons that keep their output open"
OUTLIVED = "killed 3 processes that outlived their workers"


@pytest.mark.parametrize(
    ("status", "told"),
    [
        fault(12, DAEMONS_LEFT, "1, 2", 0, OUTLIVED),
        fault(10, "a worker ends, its child keeps its output open", "1", 3, "failed first: exit status 3"),
    ],
)
def test_reports_an_exit_although_daemons_keep_the_output_open(
    tmp_path: Path, gate: Path, figures: Figures, status: int, told: str
) -> None:
    leaves = f"    open('gate').read()\n    sys.exit({status})"
    job = write_job(tmp_path, worker(SPAWNS.replace("{new_session}", "True") + leaves), ONE)
    with ends_clean(job, figures, Ending(status, told, 2.0), ready=4) as (run, _):
        open_gate(gate)
        began = time.monotonic()
        run.wait_for(told)
        figures("the exit was reported", time.monotonic() - began, at_most=1.0)


@pytest.mark.fault(13, "another process gets the PID of a worker that has ended", promise="2")
def test_never_signals_a_reused_pid(tmp_path: Path, figures: Figures) -> None:
    """Inside a PID namespace, where the next PID can be chosen; see `reused_pid`."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.geteuid() or harness.completed([*inside, "true"]).returncode:
        pytest.skip("a PID namespace is needed, which only root can make")
    argv = [*inside, sys.executable, "-m", "tests.faults.reused_pid", str(tmp_path)]
    done = harness.completed(argv, 0, cwd=harness.ROOT)
    found = json.loads(done.stdout)
    assert found["status"] == SIGKILLED
    figures("signals to a foreign process", found["signals"], at_most=0, unit="signals")


@pytest.mark.fault(14, "a worker leaves a thousand orphans, which end at once", promise="2")
def test_reaps_a_thousand_orphans(tmp_path: Path, gate: Path, figures: Figures) -> None:
    """A pipe's end tells that the last has ended; a line that is printed then comes after the reaping."""
    orphans = worker("""
        ends, tell = os.pipe()
        waits, hold = os.pipe()
        if os.fork() == 0:
            os.close(hold)
            for _ in range(1000):
                if os.fork() == 0:
                    os.read(waits, 1)
                    os._exit(0)
            os._exit(0)
        os.close(tell)
        os.wait()
        ready()
        open("gate").read()
        os.close(hold)
        os.read(ends, 1)
        print("they have ended", flush=True)
        wait()
    """)
    with running(write_job(tmp_path, orphans, ONE)) as run:
        pids = run.wait_ready(1)
        agent = parent_of(pids[0])
        assert len(harness.children_of(agent)) == 1001
        open_gate(gate)
        run.wait_for("they have ended")
        # A pipe's end is told before its writer can be reaped.
        harness.wait_until(lambda: len(harness.children_of(agent)) == 1, lambda: "zombies are left")
        figures("zombies of 1000 orphans", len(harness.children_of(agent)) - 1, at_most=0, unit="zombies")
        with scenes.clean(run, pids, figures, killed(0, "node0")):
            kill(pids[0])


TOO_BIG = f"command: ['true']\nenv: {{BIG: {'x' * 200_000}}}"
SEARCHED = "env: {PATH: .:/usr/bin:/bin}"
NO_INTERPRETER = "the interpreter in its #! line (or, for a binary, its loader) does not exist"


@pytest.mark.parametrize(
    ("keys", "status", "words"),
    [
        fault(15, "no program", "9", "command: [./missing]", 127, "missing: No such file or directory"),
        fault(15, "not executable", "9", "command: [./data]", 126, "data: Permission denied"),
        fault(15, "a bad shebang", "9", "command: [./bad]", 127, NO_INTERPRETER),
        fault(15, "a file not in PATH", "9", "command: [bad]", 127, "bad: not found in PATH"),
        fault(15, "a directory in PATH", "9", f"command: [sub]\n{SEARCHED}", 127, "sub: not found in PATH"),
        fault(15, "a directory", "9", "command: [./sub]", 126, "sub: is a directory"),
        fault(16, "an environment that is too big", "9", TOO_BIG, 126, "(E2BIG); the longest is BIG"),
    ],
)
def test_never_retries_what_cannot_be_started(
    tmp_path: Path, figures: Figures, keys: str, status: int, words: str
) -> None:
    (tmp_path / "data").write_text("no program")
    (tmp_path / "sub").mkdir()
    program(tmp_path / "bad", "#!/no/such/interpreter\n")
    (tmp_path / "job.yaml").write_text(f"{keys}\n{CPU}restarts: {{max: 3}}\n")
    with running(tmp_path / "job.yaml") as run:
        unstarted(run, figures, status, words)
        tried = [(event["node"], event["local_rank"]) for event in run.events("WorkerUnstarted")]
        figures("tries of one rank", max(map(tried.count, tried)), at_most=1, unit="tries")
        figures("restarts", run.stderr.count("restart "), at_most=0, unit="")


def unstarted(run: Run, figures: Figures, status: int, words: str) -> None:
    """Ranks of the run can't be started, which is told, and ends it."""
    run.wait_for("could not be started")
    ends(run, figures, Ending(status, words, 2.0), time.monotonic())


@pytest.mark.fault(18, "an agent has too few descriptors for its workers (EMFILE)", promise="1, 9")
def test_tells_that_an_agent_has_no_descriptors(tmp_path: Path, figures: Figures) -> None:
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, 64))
    with running(write_job(tmp_path, SLEEPER, f"{ONE}procs_per_node: 60\n"), preexec_fn=limit) as run:
        unstarted(run, figures, 126, "(node0) could not be started")
        assert "Too many open files" in run.stderr


@pytest.mark.fault(19, "a node refuses to fork (EAGAIN)", promise="1, 9")
def test_tells_that_a_node_refuses_to_fork(tmp_path: Path, figures: Figures) -> None:
    """By a limit on the node's processes. Root has none, so there the agent is another user's."""
    with running(limited(tmp_path, 30)) as run:
        unstarted(run, figures, 126, "(node0) could not be started")
        assert "Too many processes: raise the limit" in run.stderr


def test_tells_that_a_node_refuses_to_fork_even_the_agent(tmp_path: Path) -> None:
    told = harness.distlaunch("run", str(limited(tmp_path, 1)), status=69).stderr
    assert "  | can't fork: Resource temporarily unavailable; raise the limit on processes" in told
    assert "Traceback" not in told


FORKS = """
import os, signal
try:
    while os.fork():
        pass
except OSError:
    print("no more processes", flush=True)
signal.pause()
"""


def test_a_node_that_refuses_to_fork_reports_stalled_ranks_without_stacks(tmp_path: Path) -> None:
    keys = {"procs_per_node": 1, "command": [sys.executable, "-c", FORKS], "on_stall": "stop"}
    job = limited(tmp_path, 30, **keys, timeouts={"stall": "2s", "stop": "1s"})
    with tempfile.TemporaryDirectory() as tools:
        os.chmod(tools, 0o755)  # for the other user
        program(Path(tools, "py-spy"), "exec true")
        env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
        done = harness.distlaunch("run", str(job), env=env, status=124)
    assert "no more processes" in done.stdout
    assert "rank 0 (node0) stalled for 2 s" in done.stderr
    assert "Traceback" not in done.stderr
    (events,) = tmp_path.glob("runs/*/events.jsonl")
    assert '"not recorded: [Errno 11] Resource temporarily unavailable"' in events.read_text()


def limited(directory: Path, more: int, **keys: Any) -> Path:
    """A job on a node that allows so many processes more; unless `keys` say otherwise, of 60 ranks."""
    uid, tasks = os.getuid() or 54321, 0
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # threads count, too
            tasks += os.stat(f"/proc/{process}").st_uid == uid and len(os.listdir(f"/proc/{process}/task"))
    limits = f"prlimit --nproc={tasks + more}"
    if not os.getuid():
        keeps = "--inh-caps=-all,+dac_override --ambient-caps=-all,+dac_override"
        limits += f" setpriv --reuid={uid} --clear-groups {keeps}"
    interpreter = program(directory / "limited", f'exec {limits} {sys.executable} "$@"')
    job = directory / "job.yaml"
    usual = {"gpus_per_node": 0, "procs_per_node": 60, "command": ["sleep", "infinity"]}
    job.write_text(json.dumps({**usual, "python": interpreter, **keys}))
    return job


@pytest.mark.fault(17, "a worker reads stdin", promise="1")
def test_gives_workers_an_empty_stdin(tmp_path: Path, figures: Figures) -> None:
    job = write_job(tmp_path, "import sys; print(len(sys.stdin.buffer.read()))", CPU)
    done = distlaunch("run", str(job), input="x" * 1000, status=0)
    read = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(read) == RANKS
    figures("bytes before the end of stdin", max(read), at_most=0, unit="bytes")
