"""Faults of agents and of the controller: one is stopped, killed or held up, and the others act alone."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Site, find, parent_of
from tests.faults.attempts import (
    NODE_LOST,
    NOISE_S,
    SLEEPER,
    STUBBORN,
    here,
    interrupted,
    kill_agent_and_guardian,
    lost,
    pids,
    started_run,
    starts,
    there,
)
from tests.faults.disks import freezable_disk, frozen
from tests.faults.figures import Figures, Pace
from tests.faults.scenes import open_gate
from tests.faults.strikes import names
from tests.harness import PATIENCE_S, PRESS_S, children_of, held, kill, line_pipe, running, wait_gone

HEARTBEATS = 6
"""In each lease."""
WITH_DAEMON = f"if RANK == '1': daemon()\n{SLEEPER}"
LEFT = "killed 1 process left over from a crashed agent"


@pytest.mark.alone  # any other run that starts here kills what was left, and tells it
@pytest.mark.fault(22, "agent and guardian are killed at once, then another run starts", promise="12")
def test_the_next_start_ends_what_a_crash_left(tmp_path: Path, figures: Figures) -> None:
    (tmp_path / "next").mkdir()
    with started_run(here(tmp_path, WITH_DAEMON, nodes=2), 3) as (run, started):
        daemon = started.pop(101).pid
        kill_agent_and_guardian(started[1].pid)
        figures("all ranks gone", wait_gone(pids(started), PATIENCE_S), at_most=4.0)
        assert run.wait() == NODE_LOST
        assert run.holders() == [daemon]
        with running(here(tmp_path / "next", "")) as following:
            figures("from the next start, the daemon gone", wait_gone([daemon], PATIENCE_S), at_most=5.0)
            assert following.wait() == 0
            assert LEFT in following.stderr


@pytest.mark.fault(22, "agent and guardian are killed at once, and the job starts again", promise="6, 12")
def test_a_restart_ends_what_a_crash_left(tmp_path: Path, pace: Pace, figures: Figures) -> None:
    job = here(tmp_path, WITH_DAEMON, nodes=2, restarts={"max": 1}, timeouts=pace.keys)
    with started_run(job, 3) as (run, started):
        began = time.monotonic()
        kill_agent_and_guardian(started[1].pid)
        again = starts(run, 1, 3)
        figures("the next attempt runs", time.monotonic() - began, at_most=5.0)
        wait_gone(pids(started), 0.0)
        figures("processes of the old one that it saw", sum(s.beside for s in again.values()), 0, unit="")
        interrupted(run)


@pytest.mark.long
@pytest.mark.everywhere
@pytest.mark.fault(23, "an agent is stopped by SIGSTOP", promise="5")
def test_a_stopped_agent_is_lost(site: Site, pace: Pace, figures: Figures) -> None:
    with started_run(there(site, ["host1", "host2"], STUBBORN, pace), 2) as (run, started):
        began = time.monotonic()
        agent = parent_of(started[1].pid)
        kill(agent, signal.SIGSTOP)
        run.wait_for("host2 was lost: no heartbeat for")
        silent_s = pace.lease_s * (1 + 1 / HEARTBEATS)
        figures("told to be lost", time.monotonic() - began, at_most=silent_s + NOISE_S)
        # Its guardian wakes it. Another attempt would wait as long for that as a fence stands.
        figures("then its ranks gone", wait_gone([started[1].pid, agent], PATIENCE_S), at_most=pace.fence_s)
        wait_gone([started[0].pid], pace.stop_s + NOISE_S)
        lost(run)


@pytest.mark.parametrize("bed", ["slurm"], indirect=True)
@pytest.mark.fault(79, "a slurmstepd is killed with SIGKILL", promise="4, 5")
def test_a_node_without_slurmstepd_is_lost(site: Site, pace: Pace, figures: Figures) -> None:
    """Slurm tells nobody; the agent sees its link end at once."""
    with started_run(there(site, ["host1", "host2"], SLEEPER, pace), 2) as (run, started):
        agent = parent_of(started[1].pid)
        began = time.monotonic()
        kill(parent_of(parent_of(agent)))
        figures("its ranks gone", wait_gone([started[1].pid, agent], PATIENCE_S), at_most=2.0)
        run.wait_for("host2 was lost: ")  # the lease is over, or srun says before that its step does not end
        assert "no heartbeat for" in run.stderr or "Timed out waiting for job step" in run.stderr
        silent_s = pace.lease_s * (1 + 1 / HEARTBEATS)
        figures("told to be lost", time.monotonic() - began, at_most=silent_s + NOISE_S)
        lost(run)


@pytest.mark.everywhere(alone="slurm")
@pytest.mark.fault(80, "a link's process is stopped by SIGSTOP, a spare is there", promise="2, 5")
def test_ends_and_reaps_a_stopped_link(site: Site, pace: Pace, figures: Figures) -> None:
    hosts = ["host1", "host2", "host3"]
    with running(there(site, hosts[:2], SLEEPER, pace, spares=hosts[2:])) as run:
        starts(run, 0, 2)
        (link,) = [pid for pid in children_of(run.process.pid) if "host1" in names(pid)]
        with held([link]) as stopped:
            kill(link, signal.SIGSTOP)
            run.wait_for("host1 was lost: no heartbeat for")
            began = time.monotonic()
            stopped.wait_reaped(began + PATIENCE_S)
            figures("ended and reaped", time.monotonic() - began, at_most=2.0 + NOISE_S)
        assert run.process.poll() is None
        starts(run, 1, 2)
        interrupted(run)


@pytest.mark.everywhere
@pytest.mark.fault(25, "the controller is stopped by SIGSTOP", promise="5")
def test_agents_of_a_stopped_controller_end_their_ranks(site: Site, pace: Pace, figures: Figures) -> None:
    before = site.processes()
    with started_run(there(site, ["host1", "host2", "host3"], STUBBORN, pace), 3) as (run, started):
        agents = [parent_of(pid) for pid in pids(started)]
        kill(run.process.pid, signal.SIGSTOP)
        took_s = wait_gone([*pids(started), *agents], PATIENCE_S)
        figures("agents have stopped their ranks", took_s, at_most=pace.lease_s + pace.stop_s + NOISE_S)
        assert run.holders() == []
        kill(run.process.pid, signal.SIGCONT)
        assert run.wait() == NODE_LOST
        assert "Traceback" not in run.stderr
        site.assert_gone(before)


@pytest.mark.fault(26, "Ctrl-Z: SIGTSTP to the controller", promise="7")
def test_a_controller_is_not_suspended(tmp_path: Path, gate: Path, figures: Figures) -> None:
    with running(here(tmp_path, "ready()\nopen('gate').read()\nprint('went on')")) as run:
        starts(run, 0, 1)
        began = time.monotonic()
        kill(run.process.pid, signal.SIGTSTP)
        run.wait_for("can't be suspended")
        figures("said so", time.monotonic() - began, at_most=1.0)
        open_gate(gate)
        assert run.wait() == 0
        assert "went on" in run.stdout


AGENT_DIED = 70
"""A guardian's exit status: the agent was killed, and all is swept."""


@pytest.mark.fault(
    62, "scancel: SIGTERM to the command's process group, SIGKILL after KillWait", promise="3, 7"
)
@pytest.mark.parametrize("patient", [True, False], ids=["KillWait is enough", "KillWait is too short"])
def test_scancel_ends_all_ranks_in_time(tmp_path: Path, pace: Pace, figures: Figures, patient: bool) -> None:
    """These are the signals that slurmstepd sends, in its order.

    Its SIGKILL to the whole step would hit workers too, which only makes it easier for us.
    """
    kill_wait_s = pace.stop_s + 2.0
    job = here(tmp_path, STUBBORN, nodes=2, procs_per_node=2, timeouts=pace.keys)
    with started_run(job, 4, process_group=0) as (run, started):
        began = time.monotonic()
        os.killpg(run.process.pid, signal.SIGTERM)
        run.wait_for("received SIGTERM")
        if not patient:
            os.killpg(run.process.pid, signal.SIGKILL)
        wait_gone(pids(started), PATIENCE_S)
        what = "all ranks gone" if patient else "all ranks gone, the command killed meanwhile"
        figures(what, time.monotonic() - began, at_most=kill_wait_s)
        assert run.wait() == (128 + signal.SIGTERM if patient else -signal.SIGKILL)
        assert run.holders() == []


NOTING_SSH = """#!/bin/sh
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
def test_an_agent_killed_in_mid_clean_up_ends_only_when_all_is_swept(
    site: Site, pace: Pace, figures: Figures
) -> None:
    note = site.folder / "status"
    (site.folder / "ssh").write_text(NOTING_SSH.format(ssh=find("ssh"), note=note))
    (site.folder / "ssh").chmod(0o755)
    environment = {**os.environ, "PATH": f"{site.folder}:{os.environ['PATH']}"}
    worker = f"if RANK == '1': daemon()\n{STUBBORN}"
    job = there(site, ["host1", "host2"], worker, pace, timeouts={"stop": "30s"})
    with line_pipe(note) as noted, running(job, env=environment) as run:
        started = starts(run, 0, 3)
        run.process.send_signal(signal.SIGINT)
        run.wait_for("received SIGINT")
        agent = parent_of(started[1].pid)
        began = time.monotonic()
        for pid, signum in (
            (parent_of(agent), signal.SIGTERM),
            (agent, signal.SIGTERM),
            (agent, signal.SIGKILL),
        ):
            kill(pid, signum)
        assert int(noted()) == AGENT_DIED
        wait_gone([started[1].pid, started[101].pid], 0.0)  # said only when nothing is left
        figures("swept, and said so", time.monotonic() - began, at_most=2.0)
        time.sleep(PRESS_S)
        run.process.send_signal(signal.SIGINT)  # kills on the other host too
        assert run.wait() == 130
        assert "killing the workers" in run.stderr
        assert "host2: its agent exited before confirming its cleanup" in run.stderr
        assert run.holders() == []


CHATTY = """
ready()
while True:
    print("still here", flush=True)
    time.sleep(0.02)
"""


@pytest.mark.fault(33, "the log folder's disk stalls", promise="1, 10")
def test_a_stalled_disk_delays_no_tear_down(tmp_path: Path, figures: Figures) -> None:
    with freezable_disk(tmp_path / "disk") as disk:
        job = here(tmp_path, CHATTY, nodes=2, logs={"dir": str(disk)})
        with running(job) as run:
            started = starts(run, 0, 2)
            with frozen(disk):
                run.wait_for("still here", times=run.stdout.count("still here") + 200)
                began = time.monotonic()
                kill(started[0].pid)
                run.wait_for("rank 0 (node0) failed")
                figures("told", time.monotonic() - began, at_most=1.0)
                wait_gone(pids(started), PATIENCE_S)
                figures("all ranks gone", time.monotonic() - began, at_most=2.0)
            assert run.wait() == 128 + signal.SIGKILL
            assert "Traceback" not in run.stderr
