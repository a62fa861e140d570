"""Faults of agents and of the controller: one is stopped, or falls silent, and the other acts alone."""

import signal
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Site, parent_of
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
    starts,
    there,
)
from tests.faults.figures import Figures, Pace
from tests.faults.scenes import open_gate
from tests.faults.victims import names
from tests.harness import PATIENCE_S, children_of, held, kill, running, wait_gone

HEARTBEATS = 6
"""In each lease."""
WITH_DAEMON = f"if RANK == '1': daemon()\n{SLEEPER}"
LEFT = "killed 1 process left over from a crashed agent"


@pytest.mark.alone  # any other run that starts here kills what was left, and tells it
@pytest.mark.fault(22, "agent and guardian are killed at once, then another run starts", promise="12")
def test_the_next_start_ends_what_a_crash_left(tmp_path: Path, figures: Figures) -> None:
    (tmp_path / "next").mkdir()
    with running(here(tmp_path, WITH_DAEMON, nodes=2)) as run:
        started = starts(run, 0, 3)
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
    with running(job) as run:
        started = starts(run, 0, 3)
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
    with running(there(site, ["host1", "host2"], STUBBORN, pace)) as run:
        started = starts(run, 0, 2)
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
    with running(there(site, ["host1", "host2"], SLEEPER, pace)) as run:
        started = starts(run, 0, 2)
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
    with running(there(site, ["host1", "host2", "host3"], STUBBORN, pace)) as run:
        started = starts(run, 0, 3)
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
