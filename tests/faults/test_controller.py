"""Faults of the controller, its terminal and its readers: the job ends everywhere, or goes on."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

import pytest

from tests.cluster.hosts import parent_of
from tests.faults.attempts import INTERRUPTED, NODE_LOST
from tests.faults.disks import small_disk
from tests.faults.figures import Figures, Pace, fault
from tests.faults.scenes import (
    CPU,
    IGNORES,
    LEAVES,
    ONE,
    RANKS,
    SLEEPER,
    STUBBORN,
    Ending,
    assert_no_traceback,
    clean,
    ends,
    ends_clean,
    family,
    open_gate,
    stop_after,
    worker,
)
from tests.harness import (
    PATIENCE_S,
    PRESS_S,
    Run,
    agents_of,
    children_of,
    cookie_holders,
    distlaunch,
    held,
    kill,
    nothing_was_dropped,
    running,
    write_job,
)
from tests.process.test_runs import beside


@pytest.mark.fault(20, "an agent is killed with SIGKILL", promise="4")
@pytest.mark.parametrize("nodes", ["ssh", "slurm"], indirect=True)
def test_ends_when_an_agent_is_killed(tmp_path: Path, nodes: str, figures: Figures) -> None:
    mixed = worker(first=f'if os.environ["RANK"] in "12": {IGNORES}')
    ending = Ending(NODE_LOST, "host2 was lost: its agent ", 2.0)
    with ends_clean(write_job(tmp_path, mixed, nodes), figures, ending) as (_, pids):
        kill(parent_of(pids[1]))


@pytest.mark.fault(21, "a guardian is killed with SIGKILL", promise="4")
@pytest.mark.parametrize(
    # slurmstepd kills what is left when the guardian ends: another run could see it first, and tell.
    "nodes",
    ["ssh", pytest.param("slurm", marks=pytest.mark.alone)],
    indirect=True,
)
def test_ends_when_a_guardian_is_killed(tmp_path: Path, nodes: str, figures: Figures) -> None:
    grace_s = 3.0  # more than the margin: two graces in a row are seen
    words = "host2 was lost: its agent's guardian process was killed"
    job, ending = write_job(tmp_path, STUBBORN, nodes), Ending(NODE_LOST, words, grace_s + 2.0, reaped=False)
    with ends_clean(job, figures, ending, *stop_after(grace_s)) as (_, pids):
        kill(parent_of(parent_of(pids[1])))


KILLED = Ending(-signal.SIGKILL, "", 0.0, reaped=False)


@pytest.mark.parametrize(
    ("nodes", "signum", "ending"),
    [
        fault(24, "the command is killed with SIGKILL", "3", "here", signal.SIGKILL, KILLED),
        fault(24, "the command is killed with SIGKILL", "3", "ssh", signal.SIGKILL, KILLED),
        fault(24, "the command is killed with SIGKILL", "3", "slurm", signal.SIGKILL, KILLED),
        fault(27, "the terminal goes away: SIGHUP", "7", "here", signal.SIGHUP, Ending(129, "by SIGHUP", 0)),
    ],
    indirect=["nodes"],
)
def test_ends_by_a_signal(
    tmp_path: Path, nodes: str, figures: Figures, pace: Pace, signum: signal.Signals, ending: Ending
) -> None:
    job, ending = write_job(tmp_path, STUBBORN, nodes), ending._replace(within_s=pace.stop_s + 2.0)
    with ends_clean(job, figures, ending, *stop_after(pace.stop_s)) as (run, _):
        run.process.send_signal(signum)


@pytest.mark.fault(27, "SIGHUP under nohup", promise="7")
def test_goes_on_after_a_sighup_under_nohup(tmp_path: Path, figures: Figures) -> None:
    """The job ends with 0 by itself, each rank by a signal of its own that comes after the SIGHUP."""
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    with running(write_job(tmp_path, LEAVES, CPU), preexec_fn=ignore) as run:
        pids = run.wait_ready(RANKS)
        run.process.send_signal(signal.SIGHUP)
        for pid in pids.values():
            kill(pid, signal.SIGUSR1)
        assert run.wait() == 0, run.stderr
        figures("the SIGHUP told of", run.stderr.count("SIGHUP"), at_most=0, unit="times")


class Brought(NamedTuple):
    """A run in one of its phases: its ranks, the status and the words that Ctrl-C gets."""

    run: Run
    pids: dict[int, int]
    status: int = INTERRUPTED
    answer: str = "received SIGINT"

    def press(self, times: int) -> None:
        """Press Ctrl-C so many times, each after the answer to the last, as fast as people do."""
        for number, answer in enumerate((self.answer, "killing the workers", "exited; agents are")[:times]):
            time.sleep(PRESS_S if number else 0.0)
            self.run.process.send_signal(signal.SIGINT)
            self.run.wait_for(answer)


JOINS = worker(
    first=f"""
        import socket
        {IGNORES}
        port = int(os.environ["MASTER_PORT"])
        if os.environ["RANK"] == "0":
            server = socket.create_server(("", port))
            open("gate", "w").close()
        else:
            open("gate").read()
        joined = socket.create_connection((os.environ["MASTER_ADDR"], port))
    """
)


def parsing(folder: Path, grace: tuple[str, str], stack: contextlib.ExitStack) -> Brought:
    """The job file is a pipe that nobody writes to."""
    os.mkfifo(folder / "job.yaml")
    run = stack.enter_context(running(folder / "job.yaml", *grace))
    stack.callback(os.close, os.open(folder / "job.yaml", os.O_WRONLY))
    return Brought(run, {})


def connecting(folder: Path, grace: tuple[str, str], stack: contextlib.ExitStack) -> Brought:
    """An sshd that accepts, and never says a word."""
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    nodes = f"nodes: [{{host: 127.0.0.1, port: {silent.getsockname()[1]}, procs: 1}}]\n{ONE}"
    run = stack.enter_context(running(write_job(folder, SLEEPER, nodes), *grace))
    stack.enter_context(silent.accept()[0])
    return Brought(run, {})


def booting(folder: Path, grace: tuple[str, str], stack: contextlib.ExitStack) -> Brought:
    """An interpreter that never comes up."""
    os.mkfifo(folder / "gate")
    (folder / "python").write_text(f"#!/bin/sh\nread line < {folder}/gate\n")
    (folder / "python").chmod(0o755)
    job = write_job(folder, SLEEPER, f"{ONE}python: {folder}/python\n")
    run = stack.enter_context(running(job, *grace))
    stack.callback(os.close, os.open(folder / "gate", os.O_WRONLY))
    return Brought(run, {})


def joining(folder: Path, grace: tuple[str, str], stack: contextlib.ExitStack) -> Brought:
    """Ranks that run, and have not joined the rendezvous."""
    run = stack.enter_context(running(write_job(folder, STUBBORN, CPU), *grace))
    return Brought(run, run.wait_ready(RANKS))


def training(folder: Path, grace: tuple[str, str], stack: contextlib.ExitStack) -> Brought:
    """Ranks that run, and have joined the rendezvous."""
    os.mkfifo(folder / "gate")
    run = stack.enter_context(running(write_job(folder, JOINS, f"{ONE}procs_per_node: 2\n"), *grace))
    run.wait_for("joined the rendezvous")
    return Brought(run, run.wait_ready(2))


def stopping(folder: Path, grace: tuple[str, str], stack: contextlib.ExitStack) -> Brought:
    """One rank has failed, the others ignore SIGTERM; the status stays that of the first."""
    run, pids, *_ = joining(folder, grace, stack)
    kill(pids.pop(3))
    run.wait_for("rank 3 (node1) failed")
    return Brought(run, pids, 128 + signal.SIGKILL, "already stopping")


Phase = Callable[[Path, tuple[str, str], contextlib.ExitStack], Brought]
# Every phase that a run has; a job that waits before it starts again would be one more.
BEFORE_RANKS = [parsing, connecting, booting]
WITH_RANKS = [joining, training, stopping]


@contextlib.contextmanager
def brought_to(phase: Phase, folder: Path, grace_s: float) -> Iterator[Brought]:
    """A run in this phase."""
    with contextlib.ExitStack() as stack:
        yield phase(folder, stop_after(grace_s), stack)


@pytest.mark.fault(28, "Ctrl-C, before ranks have been started", promise="7")
@pytest.mark.parametrize("phase", BEFORE_RANKS)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_interrupts_end_a_run_before_its_ranks_start(
    tmp_path: Path, figures: Figures, phase: Phase, times: int
) -> None:
    """As fast as one can: what comes after the first finds a command that is about to leave, or has left."""
    with brought_to(phase, tmp_path, 10.0) as brought, held(children_of(brought.run.process.pid)) as links:
        run = brought.run
        for _ in range(times):
            run.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert run.wait() == brought.status, run.stderr
        figures(f"{phase.__name__}, {times} times: the command ended", time.monotonic() - began, at_most=2.0)
        links.wait_ends(links.pids, began + PATIENCE_S)
        figures(f"{phase.__name__}, {times} times: all gone", time.monotonic() - began, at_most=2.0)
        assert_no_traceback(run.stderr)


@pytest.mark.fault(28, "Ctrl-C once or twice, with ranks that ignore SIGTERM", promise="7")
@pytest.mark.parametrize("phase", WITH_RANKS)
@pytest.mark.parametrize("times", [1, 2])
def test_interrupts_end_ranks_that_ignore_sigterm(
    tmp_path: Path, figures: Figures, pace: Pace, phase: Phase, times: int
) -> None:
    grace_s, within_s = (pace.stop_s, pace.stop_s + 2.0) if times == 1 else (60.0, 2.0)
    with brought_to(phase, tmp_path, grace_s) as brought:
        words = brought.answer if times == 1 else "killing the workers"
        with clean(brought.run, brought.pids, figures, Ending(brought.status, words, within_s)):
            brought.press(times)


@pytest.mark.fault(28, "Ctrl-C thrice, with agents that do not answer", promise="7")
@pytest.mark.parametrize("phase", WITH_RANKS)
def test_three_interrupts_end_the_command_before_its_agents(
    tmp_path: Path, figures: Figures, pace: Pace, phase: Phase
) -> None:
    """The agents are stopped, so that the second can't end the job; their guardians wake them at the end."""
    with brought_to(phase, tmp_path, pace.stop_s) as brought:
        run = brought.run
        with held(family(run, brought.pids.values())) as processes:
            for agent in agents_of(run.process.pid):
                kill(agent, signal.SIGSTOP)
            brought.press(3)
            began = time.monotonic()
            assert run.wait() == brought.status
            figures("the command ended", time.monotonic() - began, at_most=1.0)
            processes.wait_ends(processes.pids, began + PATIENCE_S)
            figures("all gone", time.monotonic() - began, at_most=pace.stop_s + 2.0)
        assert run.holders() == []
        assert_no_traceback(run.stderr)


@pytest.mark.quiet  # ranks that print without end take all cores that there are
@pytest.mark.fault(29, "the output's reader leaves: `| head -1`", promise="1, 7")
def test_ends_when_the_reader_of_its_output_leaves(tmp_path: Path, figures: Figures) -> None:
    """The ranks print without end, but say on stderr that they are up, which `head` does not read."""
    prints = """
        import os
        os.write(2, b"up\\n")
        while True: print("more")
    """
    with running(write_job(tmp_path, prints, CPU)) as run:
        unread, run.process.stdout = run.process.stdout, None
        run.wait_for("up", RANKS)
        assert unread is not None
        with unread, held([*run.holders(), *agents_of(run.process.pid)]) as processes:
            head = subprocess.run(["head", "-1"], stdin=unread, capture_output=True, check=True)
            unread.close()
            began = time.monotonic()
            assert head.stdout.count(b"\n") == 1
            ends(run, figures, Ending(141, "", 2.0), began)
            processes.wait_ends(processes.pids, began + PATIENCE_S)
            figures("all gone", time.monotonic() - began, at_most=2.0)


@pytest.mark.fault(31, "the terminal's window is resized without end", promise="10")
def test_loses_nothing_when_the_window_is_resized(tmp_path: Path, gate: Path, figures: Figures) -> None:
    prints = worker("""
        for _ in range(100_000): print("x" * 99)
        open("gate").read()
    """)
    with running(write_job(tmp_path, prints, ONE)) as run:
        agent = parent_of(run.wait_ready(1)[0])
        for _ in range(10_000):
            kill(run.process.pid, signal.SIGWINCH)
            kill(agent, signal.SIGWINCH)
        open_gate(gate)
        assert run.wait() == 0, run.stderr
        nothing_was_dropped(run.stderr)
        kept = (run.run_directory() / "rank0.out").read_text().count("x" * 99 + "\n")
        figures("lines lost", 100_000 - kept, at_most=0, unit="lines")


AT_ONCE_S = 5.0


class Left:
    """A run that was left, whose ranks say `ready RANK PID`."""

    def __init__(self, job: Path, *words: str) -> None:
        self.folder = job.parent
        done = distlaunch("run", "-d", str(job), *words, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()
        follow = beside(self.folder, "logs", "-f", self.id)
        try:
            self.pids = follow.wait_ready(RANKS)
        finally:
            follow.kill()

    def does(self, *words: str) -> CompletedProcess[str]:
        """One of the commands about it, `words` and its id."""
        return distlaunch(*words, self.id, cwd=self.folder)

    def ps(self, place: str = ".") -> dict[str, Any]:
        done = distlaunch("ps", "-a", place, "--json", cwd=self.folder)
        (run,) = json.loads(done.stdout)
        return dict(run)


@pytest.mark.fault(26, "the controller of a run that was left gets SIGTERM", promise="3")
def test_the_run_ends_when_the_controller_is_terminated(tmp_path: Path, figures: Figures) -> None:
    left = Left(write_job(tmp_path, SLEEPER, CPU))
    with held([*cookie_holders(left.id), left.ps()["controller"]["pid"]]) as processes:
        began = time.monotonic()
        kill(left.ps()["controller"]["pid"], signal.SIGTERM)
        assert left.does("wait").returncode == 128 + signal.SIGTERM
        figures("the run ended", time.monotonic() - began, at_most=AT_ONCE_S)
        processes.wait_ends(processes.pids, began + AT_ONCE_S)
    assert cookie_holders(left.id) == []
    assert left.ps()["state"] == "CANCELLED"


@pytest.mark.fault(27, "the controller of a run that was left gets SIGHUP", promise="7")
def test_the_run_goes_on_when_the_controller_gets_sighup(tmp_path: Path, figures: Figures) -> None:
    """The ranks end with 0, each by a signal of its own that comes after the SIGHUP."""
    left = Left(write_job(tmp_path, LEAVES, CPU))
    kill(left.ps()["controller"]["pid"], signal.SIGHUP)
    assert left.ps()["state"] == "RUNNING"
    for pid in left.pids.values():
        kill(pid, signal.SIGUSR1)
    figures("the status of the run", left.does("wait").returncode, at_most=0, unit="")


@pytest.mark.fault(29, "`attach | head -1`: a run that was left goes on", promise="7")
def test_goes_on_when_its_readers_leave(tmp_path: Path, figures: Figures) -> None:
    prints = worker(
        "while True: os.write(1, b'more' * 20 + b'\\n'); select.select([], [], [], 0.001)", "import select"
    )
    left = Left(write_job(tmp_path, prints, CPU))
    for words in (("attach",), ("logs", "-f")):
        follow = beside(tmp_path, *words, left.id)
        follow.wait_for("more")
        assert follow.process.stdout
        follow.process.stdout.close()
        began = time.monotonic()
        assert follow.process.wait(PATIENCE_S) in (0, 141, -signal.SIGPIPE)
        figures(f"{words[0]} ended", time.monotonic() - began, at_most=AT_ONCE_S)
        follow.kill()
    assert left.ps()["state"] == "RUNNING"
    assert left.does("stop", "--now").returncode == 0


@pytest.mark.fault(32, "the disk of a run that was left is full", promise="10")
def test_its_end_is_known_although_its_disk_is_full(tmp_path: Path, figures: Figures) -> None:
    """What `ps` has said stays true, and the end is known, though nothing else of it could be kept."""
    worker = """
        import os, sys, time
        os.write(1, b"ready %s %d\\n" % (os.environ["RANK"].encode(), os.getpid()))
        while not os.path.exists("gate"):
            time.sleep(0.05)
        for _ in range(100):
            os.write(1, b"." * 9999 + b"\\n")
        sys.exit(7)
    """
    with small_disk(tmp_path / "small", "size=300k"):
        left = Left(write_job(tmp_path, worker, f"{CPU}logs: {{dir: small}}\n"))
        assert left.ps("small")["state"] == "RUNNING"
        (tmp_path / "gate").touch()
        assert distlaunch("wait", left.id, cwd=tmp_path).returncode == 7
        run = left.ps("small")
        assert (run["state"], run["exit_status"]) == ("FAILED", 7)
        kept = sum(path.stat().st_size for path in (tmp_path / "small").rglob("*") if path.is_file())
        figures("KiB that were kept", kept / 1024, at_most=300, unit="KiB")
        shown = distlaunch("logs", left.id, cwd=tmp_path)
        assert (shown.returncode, "Traceback" in shown.stderr) == (0, False)
