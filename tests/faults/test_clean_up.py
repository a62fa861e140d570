"""Faults in mid-clean-up, and a disk that stalls: ranks end in time and are told to, whatever else hangs."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Site, find, parent_of
from tests.faults.attempts import STUBBORN, here, pids, starts, there
from tests.faults.disks import freezable_disk, frozen
from tests.faults.figures import Figures, Pace
from tests.harness import PATIENCE_S, PRESS_S, kill, line_pipe, running, wait_gone

AGENT_DIED = 70
"""A guardian's exit status: the agent was killed, and all is swept."""


@pytest.mark.fault(
    62, "scancel: SIGTERM to the command's process group, SIGKILL after KillWait", promise="3, 7"
)
@pytest.mark.parametrize("patient", [True, False], ids=["KillWait is enough", "KillWait is too short"])
def test_scancel_ends_all_ranks_in_time(tmp_path: Path, pace: Pace, figures: Figures, patient: bool) -> None:
    """No Slurm transport is there yet: these are the signals that slurmstepd sends, in its order.

    Its SIGKILL to the whole step would hit workers too, which only makes it easier for us.
    """
    kill_wait_s = pace.stop_s + 2.0
    job = here(tmp_path, STUBBORN, nodes=2, procs_per_node=2, timeouts=pace.keys)
    with running(job, process_group=0) as run:
        started = starts(run, 0, 4)
        began = time.monotonic()
        os.killpg(run.process.pid, signal.SIGTERM)
        run.wait_for("stopped by SIGTERM")
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
        run.wait_for("stopped by SIGINT")
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
                run.wait_for("rank 0 (node0) failed first")
                figures("told", time.monotonic() - began, at_most=1.0)
                wait_gone(pids(started), PATIENCE_S)
                figures("all ranks gone", time.monotonic() - began, at_most=2.0)
            assert run.wait() == 128 + signal.SIGKILL
            assert "Traceback" not in run.stderr
