"""Partitions: a node that can't be reached ends its own ranks, and no other takes their place before that."""

import time

import pytest

from tests.cluster.hosts import Site, why_not
from tests.faults.attempts import (
    NOISE_S,
    STUBBORN,
    interrupted,
    lost,
    lost_within_s,
    pids,
    starts,
    there,
)
from tests.faults.figures import Figures, Pace
from tests.faults.networks import rule
from tests.harness import PATIENCE_S, kill, running, wait_gone

REASON = why_not()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.once]

HOSTS = ["host1", "host2", "host3"]


@pytest.mark.everywhere
@pytest.mark.fault(46, "blackhole: a node's packets are dropped", promise="5")
def test_a_node_that_is_cut_off_is_lost(site: Site, pace: Pace, figures: Figures) -> None:
    with running(there(site, HOSTS, STUBBORN, pace)) as run:
        started = starts(run, 0, 3)
        site.cut("host2")
        began = time.monotonic()
        run.wait_for("host2 was lost")
        figures("told to be lost", time.monotonic() - began, at_most=lost_within_s(pace))
        others = [started[0].pid, started[2].pid]
        figures("then the others gone", wait_gone(others, PATIENCE_S), at_most=pace.stop_s + 2.0)
        wait_gone([started[1].pid], PATIENCE_S)
        limit_s = pace.lease_s + pace.stop_s + NOISE_S
        figures("its own ranks gone", time.monotonic() - began, at_most=limit_s)
        lost(run)


@pytest.mark.everywhere
@pytest.mark.fault(47, "one-way drop: one node receives nothing, another's packets get lost", promise="5")
def test_a_node_that_is_cut_off_one_way_is_lost(site: Site, pace: Pace, figures: Figures) -> None:
    with running(there(site, HOSTS, STUBBORN, pace)) as run:
        started = starts(run, 0, 3)
        # Loopback is not cut: it is the network that is one-way.
        deaf = rule(site.bed, "host2", "INPUT", "!", "-i", "lo", "-j", "DROP")
        dumb = rule(site.bed, "host3", "OUTPUT", "!", "-o", "lo", "-j", "DROP")
        with deaf, dumb:
            began = time.monotonic()
            run.wait_for(" was lost")
            figures("the first told to be lost", time.monotonic() - began, at_most=lost_within_s(pace))
            wait_gone(pids(started), PATIENCE_S)
            # A node that still hears us counts from our last word, said before we gave it up.
            limit_s = lost_within_s(pace) + pace.lease_s + pace.stop_s
            figures("all ranks gone", time.monotonic() - began, at_most=limit_s)
            lost(run)


COUNTS = """
ready()
counted = 0
while not os.path.exists("enough"):
    print("still", counted, flush=True)
    counted += 1
    time.sleep(0.02)
print("in all", counted)
"""


@pytest.mark.everywhere
@pytest.mark.fault(48, "a blip: a third of the lease long, 10 s by default", promise="5")
def test_survives_a_blip(site: Site, pace: Pace, figures: Figures) -> None:
    # What ssh bears is whole seconds a third of the lease: of a short one little is left for slow machines.
    if pace.lease_s < 12.0:
        pace = Pace(pace.stop_s, 12.0, pace.keys | {"lease": "12s"})
    with running(there(site, HOSTS[:2], COUNTS, pace)) as run:

        def heard() -> int:
            return run.stdout.count("host2:1] still")

        starts(run, 0, 2)
        site.cut("host2")
        blip_s = pace.lease_s / 3
        time.sleep(blip_s)  # the fault itself
        run.wait_until(lambda: run.stdout.count("host1:0] still") > heard() + blip_s * 12, "a rank behind")
        before = heard()
        began = time.monotonic()
        site.bed.call("heal", "host2")
        run.wait_for("host2:1] still", times=before + int(blip_s * 25))
        figures("heard again after", time.monotonic() - began, at_most=pace.lease_s)
        (site.folder / "enough").touch()
        assert run.wait() == 0, run.stderr
        alarms = [event["text"] for event in run.events("Notice") if event["level"] != "info"]
        figures("alarms", len(alarms), at_most=0, unit="")
        *counts, last = (run.run_folder() / "rank1.out").read_text().splitlines()[1:]
        assert counts == [f"still {i}" for i in range(len(counts))]
        assert last == f"in all {len(counts)}"


@pytest.mark.long
@pytest.mark.everywhere
@pytest.mark.fault(51, "a partition during a restart", promise="6")
def test_a_restart_waits_for_the_fence_of_a_node_that_is_cut_off(
    site: Site, pace: Pace, figures: Figures
) -> None:
    job = there(site, HOSTS[:2], STUBBORN, pace, spares=HOSTS[2:], restarts={"max": 1})
    with running(job) as run:
        started = starts(run, 0, 2)
        site.cut("host2")
        kill(started[0].pid)
        began = time.monotonic()
        run.wait_for("restart 1 of 1")
        wait_gone([started[1].pid], PATIENCE_S)
        gone_at = time.time()
        limit_s = pace.lease_s + pace.stop_s + NOISE_S
        figures("old ranks on the cut host gone", time.monotonic() - began, at_most=limit_s)
        limit_s = lost_within_s(pace) + pace.fence_s
        again = starts(run, 1, 2, within_s=limit_s + PATIENCE_S)
        figures("the new attempt runs", time.monotonic() - began, at_most=limit_s + NOISE_S)
        figures("processes of the old one that it saw", sum(s.beside for s in again.values()), 0, unit="")
        interrupted(run)
        assert "continuing with 2 of 2 nodes: host1, host3" in run.stderr
        new_at = min(event["time"] for event in run.events("WorkerStarted")[2:])
        figures("new start after the last old end", new_at - gone_at)
        assert new_at > gone_at
