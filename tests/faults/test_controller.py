"""Faults of agents, of the controller, its terminal and its readers: the job ends everywhere, or goes on."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import harness
from tests.cluster.hosts import Site, find, parent_of
from tests.cluster.workers import DAEMONS, SLEEPER, STUBBORN, worker
from tests.faults import scenes
from tests.faults.chaos import names
from tests.faults.disks import freezable_disk, frozen, small_disk
from tests.faults.figures import Figures, Pace, fault
from tests.faults.scenes import CPU, ONE, RANKS, clean, here, interrupted, lost, started_run, starts, there
from tests.harness import PATIENCE_S, Run, distlaunch, held, kill, open_gate, running, wait_gone, write_job
from tests.process.test_runs import beside


@pytest.mark.parametrize(
    ("signum", "told"),
    [
        fault(26, "Ctrl-Z: SIGTSTP to the controller", "7", signal.SIGTSTP, "can't be suspended"),
        fault(27, "SIGHUP under nohup", "7", signal.SIGHUP, ""),
        fault(11, "a rank has finished, the others go on", "9", 0, ""),
    ],
)
def test_goes_on_after_a_signal_that_ends_nothing(
    tmp_path: Path, figures: Figures, signum: int, told: str
) -> None:
    """The job ends with 0 by itself, each rank by a signal of its own that comes after the other one.

    Each rank ends only after the one before it has been reaped: whoever was stopped could not tell so.
    """
    ignore = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    with running(write_job(tmp_path, scenes.LEAVES, CPU), preexec_fn=ignore) as run:
        pids = run.wait_ready(RANKS)
        began = time.monotonic()
        kill(run.process.pid, signum)
        if told:
            run.wait_for(told)
            figures("said so", time.monotonic() - began, at_most=1.0)
        with held(pids.values()) as ranks:
            for done, pid in enumerate(pids.values(), 1):
                kill(pid, signal.SIGUSR1)
                ranks.wait_ends([pid], time.monotonic() + PATIENCE_S)
                run.wait_for("finished by itself", done)
        assert run.wait() == 0, run.stderr
        stopped = RANKS - run.stdout.count("finished by itself")
        figures("ranks stopped because another had finished", stopped, at_most=0, unit="ranks")
        figures("the SIGHUP told of", run.stderr.count("SIGHUP"), at_most=0, unit="times")


HEARTBEATS = 6
"""In each lease."""


@pytest.mark.alone  # any other run that starts here kills what was left, and tells it
@pytest.mark.fault(22, "agent and guardian are killed at once, then another run starts", promise="12")
def test_the_next_start_ends_what_a_crash_left(
    tmp_path: Path, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("next", "scratch", "scratch/distlaunch-agent-of-the-user"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", f"{tmp_path}/scratch")
    with started_run(here(tmp_path, DAEMONS, nodes=2), 4) as (run, started):
        daemon = started.pop(101)
        scenes.kill_agent_and_guardian(started[1])
        figures("all ranks gone", wait_gone([*started.values()], PATIENCE_S), at_most=4.0)
        assert run.wait() == scenes.NODE_LOST
        assert run.holders() == [daemon]
        assert len([*(tmp_path / "scratch").iterdir()]) == 2
        with running(here(tmp_path / "next", "")) as following:
            figures("from the next start, the daemon gone", wait_gone([daemon], PATIENCE_S), at_most=5.0)
            assert following.wait() == 0
            assert "killed 1 process left over from a crashed agent" in following.stderr
        assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["distlaunch-agent-of-the-user"]


@pytest.mark.alone  # as above
@pytest.mark.fault(22, "they are killed while they build an environment", promise="12")
def test_the_next_start_ends_a_setup_that_a_crash_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("job", "next"):
        (tmp_path / name).mkdir()
    setup = {"run": "echo sleeps as $$; exec sleep 1000"}
    with running(here(tmp_path / "job", "", sync=True, setup=setup)) as run:
        run.wait_for("sleeps as ")
        pid = int(run.stderr.partition("sleeps as ")[2].split()[0])
        scenes.kill_agent_and_guardian(parent_of(pid))
        assert run.wait() == scenes.NODE_LOST
        with running(here(tmp_path / "next", "")) as following:
            wait_gone([pid], PATIENCE_S)
            assert following.wait() == 0
            assert "killed 1 process left over from a crashed agent" in following.stderr


@pytest.mark.alone  # without the ID of a job, the agents of other runs take what runs here for leftovers
def test_only_processes_that_a_crash_left_are_taken_for_its_leftovers(tmp_path: Path) -> None:
    """Not a job that a rank submitted, to which its scheduler passes the rank's variables on, nor one that
    a user started with a copy of them; they name an agent that is long gone."""
    job = str(write_job(tmp_path, "import json, os; json.dump({**os.environ}, open('env', 'w'))", ONE))
    distlaunch("run", job, status=0)
    env = json.loads((tmp_path / "env").read_text())
    with contextlib.ExitStack() as stack:
        copied, submitted = (
            stack.enter_context(subprocess.Popen(["sleep", "1000"], env={**env, **more}))
            for more in ({}, {"SLURM_JOB_ID": "18"})
        )
        stack.callback(submitted.kill)
        stack.callback(copied.kill)
        assert "left over" not in distlaunch("run", job, env=env, status=0).stderr
        os.mkdir(os.path.dirname(env["DISTLAUNCH_DEADLINE"]))  # as if its agent had been killed
        assert "killed 1 process left over" in distlaunch("run", job, env=env, status=0).stderr
        assert (copied.wait(), submitted.poll()) == (-signal.SIGKILL, None)


OTHER_TIMES = """
    set -m
    "$@" living/job.yaml &
    read up <up
    unshare --time --boottime 1000 --fork "$@" next/job.yaml
    timeout 30 sh -c ': >gate'
    wait $!
"""


INSIDE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.fixture
def namespaces() -> None:
    """PID and time namespaces can be made."""
    tried = [*INSIDE, "unshare", "--time", "true"]
    if os.geteuid() or not shutil.which("unshare") or harness.completed(tried).returncode:
        pytest.skip("missing: root, or unshare with --time")


@pytest.mark.usefixtures("namespaces")
def test_starts_nothing_where_pids_in_proc_mean_other_processes(tmp_path: Path) -> None:
    """In a PID namespace inside another one, whose /proc is still there."""
    job = write_job(tmp_path, "print('started')", ONE)
    argv = [*INSIDE, "unshare", "--pid", "--fork", "--kill-child", *harness.distlaunch_argv("run", str(job))]
    done = harness.completed(argv, status=69)
    assert "| /proc shows another PID namespace" in done.stderr
    assert "started" not in done.stdout


@pytest.mark.usefixtures("namespaces")
def test_a_start_among_other_times_spares_what_is_alive(tmp_path: Path) -> None:
    """Start times of processes differ between time namespaces. This happens inside a PID namespace."""
    for name in ("living", "next"):
        (tmp_path / name).mkdir()
    write_job(tmp_path / "living", "open('../up', 'w').write('up\\n'); open('../gate').read()", ONE)
    write_job(tmp_path / "next", "pass", ONE)
    for name in ("up", "gate"):
        os.mkfifo(tmp_path / name)
    done = harness.completed(
        [*INSIDE, "sh", "-ec", OTHER_TIMES, "sh", *harness.distlaunch_argv("run")], cwd=tmp_path
    )
    assert (done.returncode, "left over" in done.stderr) == (0, False), done.stderr


@pytest.mark.fault(22, "agent and guardian are killed at once, and the job starts again", promise="6, 12")
def test_a_restart_ends_what_a_crash_left(tmp_path: Path, pace: Pace, figures: Figures) -> None:
    job = here(tmp_path, DAEMONS, nodes=2, restarts={"max": 1}, timeouts=pace.keys)
    with started_run(job, 4) as (run, started):
        began = time.monotonic()
        scenes.kill_agent_and_guardian(started[1])
        starts(run, 1, 4)
        figures("the next attempt runs", time.monotonic() - began, at_most=5.0)
        wait_gone([*started.values()], 0.0)
        figures("processes of the old one that it saw", scenes.earlier_seen(run, 1), 0, unit="")
        interrupted(run)


@pytest.mark.long
@pytest.mark.everywhere
@pytest.mark.fault(23, "an agent is stopped by SIGSTOP", promise="5")
def test_a_stopped_agent_is_lost(site: Site, pace: Pace, figures: Figures) -> None:
    with started_run(there(site, ["host1", "host2"], STUBBORN, pace), 2) as (run, started):
        began = time.monotonic()
        agent = parent_of(started[1])
        kill(agent, signal.SIGSTOP)
        run.wait_for("host2 was lost: no heartbeat for")
        silent_s = pace.lease_s * (1 + 1 / HEARTBEATS)
        figures("told to be lost", time.monotonic() - began, at_most=silent_s + scenes.NOISE_S)
        # Its guardian wakes it. Another attempt would wait as long for that as a fence stands.
        figures("then its ranks gone", wait_gone([started[1], agent], PATIENCE_S), at_most=pace.fence_s)
        wait_gone([started[0]], pace.stop_s + scenes.NOISE_S)
        lost(run)


@pytest.mark.everywhere
@pytest.mark.fault(81, "a guardian is stopped by SIGSTOP", promise="2, 3")
def test_a_stopped_guardian_is_resumed_and_named(site: Site, pace: Pace, figures: Figures) -> None:
    before = site.processes()
    with started_run(there(site, ["host1", "host2"], SLEEPER, pace), 2) as (run, started):
        guardian = parent_of(parent_of(started[1]))
        kill(guardian, signal.SIGSTOP)
        began = time.monotonic()
        interrupted(run)
        figures("the run ends", time.monotonic() - began, at_most=pace.stop_s + scenes.NOISE_S)
        assert f"host2: resumed its guardian (pid {guardian}), which a signal had stopped" in run.stderr
        site.assert_gone(before)


@pytest.mark.parametrize("bed", ["slurm"], indirect=True)
@pytest.mark.fault(79, "a slurmstepd is killed with SIGKILL", promise="4, 5")
def test_a_node_without_slurmstepd_is_lost(site: Site, pace: Pace, figures: Figures) -> None:
    """Slurm tells nobody; the agent sees its link end at once."""
    with started_run(there(site, ["host1", "host2"], SLEEPER, pace), 2) as (run, started):
        agent = parent_of(started[1])
        began = time.monotonic()
        kill(parent_of(parent_of(agent)))
        figures("its ranks gone", wait_gone([started[1], agent], PATIENCE_S), at_most=2.0)
        run.wait_for("host2 was lost: ")  # the lease is over, or srun says before that its step does not end
        assert "no heartbeat for" in run.stderr or "Timed out waiting for job step" in run.stderr
        silent_s = pace.lease_s * (1 + 1 / HEARTBEATS)
        figures("told to be lost", time.monotonic() - began, at_most=silent_s + scenes.NOISE_S)
        lost(run)


@pytest.mark.everywhere(alone="slurm")
@pytest.mark.fault(80, "a link's process is stopped by SIGSTOP, a spare is there", promise="2, 5")
def test_ends_and_reaps_a_stopped_link(site: Site, pace: Pace, figures: Figures) -> None:
    hosts = ["host1", "host2", "host3"]
    with running(there(site, hosts[:2], SLEEPER, pace, spares=hosts[2:])) as run:
        starts(run, 0, 2)
        (link,) = [pid for pid in harness.children_of(run.process.pid) if "host1" in names(pid)]
        with held([link]) as stopped:
            kill(link, signal.SIGSTOP)
            run.wait_for("host1 was lost: no heartbeat for")
            began = time.monotonic()
            stopped.wait_reaped(began + PATIENCE_S)
            figures("ended and reaped", time.monotonic() - began, at_most=2.0 + scenes.NOISE_S)
        assert run.process.poll() is None
        starts(run, 1, 2)
        interrupted(run)


@pytest.mark.everywhere
@pytest.mark.fault(25, "the controller is stopped by SIGSTOP", promise="5")
def test_agents_of_a_stopped_controller_end_their_ranks(site: Site, pace: Pace, figures: Figures) -> None:
    before = site.processes()
    with started_run(there(site, ["host1", "host2", "host3"], STUBBORN, pace), 3) as (run, started):
        agents = [parent_of(pid) for pid in started.values()]
        kill(run.process.pid, signal.SIGSTOP)
        limit_s, took_s = pace.lease_s + pace.stop_s, wait_gone([*started.values(), *agents], PATIENCE_S)
        figures("agents have stopped their ranks", took_s, at_most=limit_s + scenes.NOISE_S)
        assert run.holders() == []
        kill(run.process.pid, signal.SIGCONT)
        assert run.wait() == scenes.NODE_LOST
        assert "Traceback" not in run.stderr
        site.assert_gone(before)


@pytest.mark.fault(62, "scancel: SIGTERM to the process group, SIGKILL after KillWait", promise="3, 7")
@pytest.mark.parametrize("patient", [True, False], ids=["KillWait is enough", "KillWait is too short"])
def test_scancel_ends_all_ranks_in_time(tmp_path: Path, pace: Pace, figures: Figures, patient: bool) -> None:
    """These are the signals that slurmstepd sends, in its order.

    Its SIGKILL to the whole step would hit workers too, which only makes it easier for us.
    """
    job = here(tmp_path, STUBBORN, nodes=2, procs_per_node=2, timeouts=pace.keys)
    with started_run(job, 4, process_group=0) as (run, started):
        began = time.monotonic()
        os.killpg(run.process.pid, signal.SIGTERM)
        run.wait_for("received SIGTERM")
        if not patient:
            os.killpg(run.process.pid, signal.SIGKILL)
        wait_gone([*started.values()], PATIENCE_S)
        what = "all ranks gone" if patient else "all ranks gone, the command killed meanwhile"
        figures(what, time.monotonic() - began, at_most=pace.stop_s + 2.0)
        assert run.wait() == (128 + signal.SIGTERM if patient else -signal.SIGKILL)
        assert run.holders() == []


NOTING_SSH = """
{ssh} "$@"
status=$?
case " $* " in
*" -G "*) ;;
*" host2 "*) echo $status > {note} ;;
esac
exit $status
"""
"""An ssh that tells us, as srun would be told, how what it ran on host2 has ended."""


@pytest.mark.fault(63, "srun -K: an agent is killed in mid-clean-up", promise="2, 4")
def test_a_killed_agents_status_comes_after_its_cleanup(site: Site, pace: Pace, figures: Figures) -> None:
    note = site.directory / "status"
    harness.program(site.directory / "ssh", NOTING_SSH.format(ssh=find("ssh"), note=note))
    environment = {**os.environ, "PATH": f"{site.directory}:{os.environ['PATH']}"}
    text = worker("daemon()\nresist()\nready()\nwait()")
    job = there(site, ["host1", "host2"], text, pace, timeouts={"stop": "30s"})
    with harness.line_pipe(note) as noted, running(job, env=environment) as run:
        started = starts(run, 0, 4)
        run.process.send_signal(signal.SIGINT)
        run.wait_for("received SIGINT")
        agent = parent_of(started[1])
        began = time.monotonic()
        kill(parent_of(agent), signal.SIGTERM)
        kill(agent, signal.SIGTERM)
        kill(agent)
        assert noted() == "70"  # a guardian's status: the agent was killed, and all is swept
        wait_gone([started[1], started[101]], 0.0)  # said only when nothing is left
        figures("swept, and said so", time.monotonic() - began, at_most=2.0)
        time.sleep(harness.PRESS_S)
        run.process.send_signal(signal.SIGINT)  # kills on the other host too
        assert run.wait() == 130
        assert "killing the workers" in run.stderr
        assert "host2: its agent exited early, but none of its ranks is left" in run.stderr
        assert run.holders() == []


class Brought(NamedTuple):
    """A run in one of its phases: its ranks, the status and the words that Ctrl-C gets."""

    run: Run
    pids: dict[int, int]
    status: int = scenes.INTERRUPTED
    answer: str = "received SIGINT"

    def press(self, times: int) -> None:
        """Press Ctrl-C so many times, each after the answer to the last, as fast as people do."""
        answers = (self.answer, "killing the workers", "exiting without waiting")
        for number, answer in enumerate(answers[:times]):
            time.sleep(harness.PRESS_S if number else 0.0)
            self.run.process.send_signal(signal.SIGINT)
            self.run.wait_for(answer)


JOINS = worker("""
    import socket
    resist()
    port = int(os.environ["MASTER_PORT"])
    if RANK == "0":
        server = socket.create_server(("", port))
        open("gate", "w").close()
    else:
        open("gate").read()
    joined = socket.create_connection((os.environ["MASTER_ADDR"], port))
    ready()
    wait()
""")
# Every phase that a run has, but for a job that waits before it starts again. First it waits for somebody who
# writes the job file, for a server that never says a word, and for an interpreter that never comes up.
BEFORE_RANKS = {
    "parsing": ("", ""),
    "connecting": (SLEEPER, f"nodes: [{{host: 127.0.0.1, port: PORT, procs: 1}}]\n{ONE}"),
    "booting": (SLEEPER, f"{ONE}python: ./python\n"),
}
WITH_RANKS = {"joining": STUBBORN, "training": JOINS, "stopping": STUBBORN}


@contextlib.contextmanager
def brought_to(phase: str, directory: Path, grace_s: float) -> Iterator[Brought]:
    """A run in this phase."""
    text, keys = BEFORE_RANKS.get(phase) or (WITH_RANKS[phase], f"nodes: 2\n{ONE}")
    gate = directory / ("gate" if text else "job.yaml")
    os.mkfifo(gate)
    harness.program(directory / "python", f"read line < {gate}")
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        if text:
            write_job(directory, text, keys.replace("PORT", str(silent.getsockname()[1])))
        run = stack.enter_context(running(directory / "job.yaml", *scenes.stop_after(grace_s)))
        if phase == "connecting":
            stack.enter_context(silent.accept()[0])
        elif phase in BEFORE_RANKS:
            stack.callback(os.close, os.open(gate, os.O_WRONLY))
        pids = run.wait_ready(2 if phase in WITH_RANKS else 0)
        if phase == "training":
            run.wait_for("joined the rendezvous")
        if phase != "stopping":
            yield Brought(run, pids)
            return
        kill(pids.pop(1))
        run.wait_for("rank 1 (node1) failed")
        yield Brought(run, pids, scenes.SIGKILLED, "already stopping")  # the status stays that of the first


@pytest.mark.fault(28, "Ctrl-C, before ranks have been started", promise="7")
@pytest.mark.parametrize("phase", BEFORE_RANKS)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_interrupts_end_a_run_before_its_ranks_start(
    tmp_path: Path, figures: Figures, phase: str, times: int
) -> None:
    """As fast as one can: what comes after the first finds a command that is about to leave, or has left."""
    with brought_to(phase, tmp_path, 10.0) as (run, *_), held(harness.children_of(run.process.pid)) as links:
        for _ in range(times):
            run.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert run.wait() == scenes.INTERRUPTED, run.stderr
        figures(f"{phase}, {times} times: the command ended", time.monotonic() - began, at_most=2.0)
        links.wait_ends(links.pids, began + PATIENCE_S)
        figures(f"{phase}, {times} times: all gone", time.monotonic() - began, at_most=2.0)
        scenes.assert_no_traceback(run.stderr)


@pytest.mark.fault(28, "Ctrl-C once or twice, with ranks that ignore SIGTERM", promise="7")
@pytest.mark.parametrize("phase", WITH_RANKS)
@pytest.mark.parametrize("times", [1, 2])
def test_interrupts_end_ranks_that_ignore_sigterm(
    tmp_path: Path, figures: Figures, pace: Pace, phase: str, times: int
) -> None:
    grace_s, within_s = (pace.stop_s, pace.stop_s + 2.0) if times == 1 else (60.0, 2.0)
    with brought_to(phase, tmp_path, grace_s) as brought:
        words = brought.answer if times == 1 else "killing the workers"
        with clean(brought.run, brought.pids, figures, scenes.Ending(brought.status, words, within_s)):
            brought.press(times)


@pytest.mark.fault(28, "Ctrl-C thrice, with agents that do not answer", promise="7")
@pytest.mark.parametrize("phase", WITH_RANKS)
def test_three_interrupts_end_the_command_before_its_agents(
    tmp_path: Path, figures: Figures, pace: Pace, phase: str
) -> None:
    """The agents are stopped, so that the second can't end the job; their guardians wake them at the end."""
    with brought_to(phase, tmp_path, pace.stop_s) as brought:
        run = brought.run
        with held(scenes.family(run, brought.pids.values())) as processes:
            for agent in harness.agents_of(run.process.pid):
                kill(agent, signal.SIGSTOP)
            brought.press(3)
            began = time.monotonic()
            assert run.wait() == brought.status
            figures("the command ended", time.monotonic() - began, at_most=1.0)
            processes.wait_ends(processes.pids, began + PATIENCE_S)
            figures("all gone", time.monotonic() - began, at_most=pace.stop_s + 2.0)
        assert run.holders() == []
        scenes.assert_no_traceback(run.stderr)


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
        with unread, held([*run.holders(), *harness.agents_of(run.process.pid)]) as processes:
            head = subprocess.run(["head", "-1"], stdin=unread, capture_output=True, check=True)
            unread.close()
            began = time.monotonic()
            assert head.stdout.count(b"\n") == 1
            scenes.ends(run, figures, scenes.Ending(141, "", 2.0), began)
            processes.wait_ends(processes.pids, began + PATIENCE_S)
            figures("all gone", time.monotonic() - began, at_most=2.0)


@pytest.mark.fault(31, "the terminal's window is resized without end", promise="10")
def test_loses_nothing_when_the_window_is_resized(tmp_path: Path, gate: Path, figures: Figures) -> None:
    prints = worker("""
        ready()
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
        harness.nothing_was_dropped(run.stderr)
        kept = (run.run_directory() / "rank0.out").read_text().count("x" * 99 + "\n")
        figures("lines lost", 100_000 - kept, at_most=0, unit="lines")


AT_ONCE_S = 5.0


def detached(job: Path) -> str:
    """The id of a detached run, whose ranks have said `ready RANK PID`."""
    run = distlaunch("run", "-d", str(job), cwd=job.parent, status=0).stdout.strip()
    follow = beside(job.parent, "logs", "-f", run)
    try:
        follow.wait_ready(RANKS)
    finally:
        follow.kill()
    return run


def listed(directory: Path) -> dict[str, Any]:
    """What `ps` says of the one run that has its logs there."""
    (run,) = json.loads(distlaunch("ps", "-a", str(directory), "--json").stdout)
    return dict(run)


@pytest.mark.fault(29, "`attach | head -1`, then SIGHUP and SIGTERM: a detached run", promise="3, 7")
def test_a_detached_run_outlives_its_readers_and_sighup(tmp_path: Path, figures: Figures) -> None:
    prints = """
        import select
        ready()
        while True:
            os.write(1, b"more" * 20 + b"\\n")
            select.select([], [], [], 0.001)
    """
    name = detached(write_job(tmp_path, worker(prints), CPU))
    for words in (("attach",), ("logs", "-f")):
        follow = beside(tmp_path, *words, name)
        follow.wait_for("more")
        assert follow.process.stdout
        follow.process.stdout.close()
        began = time.monotonic()
        assert follow.process.wait(PATIENCE_S) in (0, 141, -signal.SIGPIPE)
        figures(f"{words[0]} ended", time.monotonic() - began, at_most=AT_ONCE_S)
        follow.kill()
    controller = listed(tmp_path)["controller"]["pid"]
    with held([*harness.cookie_holders(name), controller]) as processes:
        kill(controller, signal.SIGHUP)
        assert listed(tmp_path)["state"] == "RUNNING"
        began = time.monotonic()
        kill(controller, signal.SIGTERM)
        distlaunch("wait", name, cwd=tmp_path, status=128 + signal.SIGTERM)
        figures("the run ended", time.monotonic() - began, at_most=AT_ONCE_S)
        processes.wait_ends(processes.pids, began + AT_ONCE_S)
    assert harness.cookie_holders(name) == []
    assert listed(tmp_path)["state"] == "CANCELLED"


@pytest.mark.fault(32, "the disk of a detached run is full", promise="10")
def test_the_end_of_a_detached_run_is_known_if_its_disk_is_full(tmp_path: Path, figures: Figures) -> None:
    """What `ps` has said stays true, and the end is known, though nothing else of it could be kept."""
    floods = """
        ready()
        while not os.path.exists("gate"):
            time.sleep(0.05)
        for _ in range(100):
            os.write(1, b"." * 9999 + b"\\n")
        sys.exit(7)
    """
    with small_disk(tmp_path / "small", "size=300k"):
        name = detached(write_job(tmp_path, worker(floods), f"{CPU}logs: {{dir: small}}\n"))
        assert listed(tmp_path / "small")["state"] == "RUNNING"
        (tmp_path / "gate").touch()
        distlaunch("wait", name, cwd=tmp_path, status=7)
        run = listed(tmp_path / "small")
        assert (run["state"], run["exit_status"]) == ("FAILED", 7)
        kept = sum(path.stat().st_size for path in (tmp_path / "small").rglob("*") if path.is_file())
        figures("KiB that were kept", kept / 1024, at_most=300, unit="KiB")
        assert "Traceback" not in distlaunch("logs", name, cwd=tmp_path, status=0).stderr


@pytest.mark.fault(33, "the disk of a detached run stalls", promise="1, 10")
def test_a_stalled_disk_delays_no_tear_down_of_a_detached_run(
    tmp_path: Path, gate: Path, figures: Figures, pace: Pace
) -> None:
    """Its stderr is on that disk, too; more is printed than waits for the disk, of which it warns there."""
    floods = """
        ready()
        if RANK != "0":
            wait()
        open("gate").read()
        for _ in range(256):
            os.write(1, (b"." * 1023 + b"\\n") * 64)
        sys.exit(7)
    """
    with freezable_disk(tmp_path / "disk") as disk:
        job = here(tmp_path, worker(floods), nodes=RANKS, logs={"dir": str(disk)}, timeouts=pace.keys)
        name = detached(job)
        with frozen(disk), held(harness.cookie_holders(name)) as processes:
            open_gate(gate)
            began = time.monotonic()
            processes.wait_ends(processes.pids, began + PATIENCE_S)
            figures("all ranks gone", time.monotonic() - began, at_most=2.0)
        distlaunch("wait", name, cwd=tmp_path, status=7)
        assert listed(disk)["trouble"] == "the disk is too slow", "not enough was printed"
