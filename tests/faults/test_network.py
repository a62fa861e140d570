"""Faults of the network: what breaks is noticed in time, what is only slow breaks nothing."""

import contextlib
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import GONE_S, Site, parent_of
from tests.cluster.workers import STUBBORN, worker
from tests.faults import mangler, scenes
from tests.faults.figures import Figures, Pace, fault
from tests.faults.networks import inside, lossy, narrow
from tests.faults.scenes import earlier_seen, interrupted, lost, lost_within_s, started_run, starts, there
from tests.harness import PATIENCE_S, Run, kill, open_gate, running, wait_gone, wait_until

TOLD_S = 1.0
"""A broken link is told so soon."""
HOSTS = ["host1", "host2", "host3"]


WORKING = """
    with open("go") as go:
        ready()
        go.read()
    began = time.monotonic()
    if RANK == "2":
        for _ in range(20_000):  # 2 MB, for which 1 Mbit/s takes 16 s
            os.write(1, b"x" * 99 + b"\\n")
        print("printed in", time.monotonic() - began, file=sys.stderr, flush=True)
    while time.monotonic() < began + SECONDS:
        print("still here", flush=True)
        time.sleep(0.5)
"""


REDUCES = worker("""
    import datetime, torch, torch.distributed as dist
    # If a connection is reset at a bad moment, gloo waits for ever, or for as long as it may.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    dist.barrier()
    ready()
    while True:
        dist.all_reduce(torch.ones(1))
""")


def test_a_collective_between_nodes_that_are_cut_off_from_each_other_gets_advice(site: Site) -> None:
    with started_run(there(site, HOSTS[:2], REDUCES), 2) as (run, _):
        others = ["-p", "tcp", "!", "-i", "lo", "!", "--dport", "22"]
        with site.bed.rule("host2", "INPUT", *others, "-j", "REJECT", "--reject-with", "tcp-reset"):
            # After the exception, a thread of gloo's may still abort the process.
            assert run.wait() in (1, 128 + signal.SIGABRT), run.stderr
        assert "check firewalls and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME" in run.stderr
        assert " was lost" not in run.stderr


def alarms(run: Run) -> int:
    """How much was told that is no news."""
    return sum(event["level"] != "info" for event in run.events("Message"))


@pytest.mark.long
@pytest.mark.once
@pytest.mark.fault(50, "30 % loss to one node and from another, 1 Mbit/s from a third", promise="5, 10")
def test_bad_lines_raise_no_alarm(site: Site, pace: Pace, figures: Figures) -> None:
    work_s = max(25.0, pace.lease_s + 5.0)  # longer than ssh's own patience, which is 19.4 s
    script = WORKING.replace("SECONDS", str(work_s))
    os.mkfifo(site.directory / "go")
    go = os.open(site.directory / "go", os.O_RDWR)
    job = there(site, HOSTS, worker(script))
    before = site.processes()
    with contextlib.ExitStack() as bad, running(job) as run:
        run.wait_ready(3)
        bad.enter_context(lossy(site.bed, "host1", "OUTPUT"))
        bad.enter_context(lossy(site.bed, "host2", "INPUT"))
        bad.enter_context(narrow(site.bed, "host3"))
        began = time.monotonic()
        os.close(go)
        assert run.wait(work_s + PATIENCE_S) == 0, run.stderr
        took_s = time.monotonic() - began
    figures("false alarms", alarms(run), at_most=0, unit="")
    (printed,) = re.findall(r"printed in ([\d.]+)", run.stderr)
    figures("2 MB printed into 1 Mbit/s, in", float(printed), at_most=1.0)
    assert (run.run_directory() / "rank2.out").read_bytes().count(b"x") == 20_000 * 99
    figures("from the workers' end to the run's", took_s - work_s, at_most=pace.stop_s + 15.0)
    site.assert_gone(before)


def mangled(site: Site, how: str) -> str:
    """host2 behind a mangler that begins as soon as the fifo `begin` is opened."""
    os.mkfifo(site.directory / "begin")
    proxy = [sys.executable, mangler.__file__, how, site.bed.hosts["host2"].address, "22", "begin"]
    return site.name("mangled", "host2", ProxyCommand=shlex.join(proxy))


@pytest.mark.fault(52, "slices of 7 bytes", promise="10")
def test_slices_of_the_stream_lose_nothing(site: Site, figures: Figures) -> None:
    lines = ["sh", "-c", "seq -f 'line %.0f of {rank}' 20000"]
    job, before = site.job(["host1", mangled(site, "sliced")], command=lines), site.processes()
    with running(job, "--quiet", cwd=site.directory) as run:
        assert run.wait() == 0, run.stderr
        expected = "".join(f"line {number} of 1\n" for number in range(1, 20001))
        assert (run.run_directory() / "rank1.out").read_text() == expected
        figures("the whole run", time.monotonic() - run.began, at_most=30.0)
        site.assert_gone(before)


CHATTY = worker("ready()\nwhile True:\n    os.write(1, b'still here\\n')\n    time.sleep(0.05)")
CORRUPT = "Corrupted MAC|message authentication code incorrect"


def mangle(site: Site, rank: int) -> None:
    open_gate(site.directory / "begin")


def reset(site: Site, rank: int) -> None:
    inside(site.bed, "host2", "ss", "-K", "-t", "sport", "=", ":22")


def kill_session(site: Site, rank: int) -> None:
    kill(parent_of(parent_of(parent_of(rank))))


@pytest.mark.parametrize(
    ("how", "break_it", "words"),
    [
        fault(45, "sshd's session process is killed", "1", "", kill_session, ""),
        fault(49, "RST: all TCP connections of a node are reset", "5", "", reset, ""),
        fault(52, "a truncated stream", "10", "truncated", mangle, r"Broken pipe|[Cc]onnection|ended"),
        fault(52, "a corrupt stream", "10", "corrupt", mangle, CORRUPT),
    ],
)
def test_a_broken_connection_loses_its_node(
    how: str, break_it: Callable[[Site, int], None], words: str, site: Site, figures: Figures
) -> None:
    """What an agent says that is no frame, or one of 4 GiB, is among the lies in `agents`."""
    host2 = mangled(site, how) if how else "host2"
    job, before = there(site, ["host1", host2, "host3"], CHATTY), site.processes()
    with running(job, cwd=site.directory) as run:
        ranks = run.wait_ready(3)
        agent, began = parent_of(ranks[1]), time.monotonic()
        break_it(site, ranks[1])
        run.wait_for(" was lost")
        figures("until told", time.monotonic() - began, at_most=TOLD_S)
        wait_gone([*ranks.values(), agent], PATIENCE_S)
        figures("all ranks gone", time.monotonic() - began, at_most=GONE_S)
        lost(run)
        assert re.search(f"{host2} was lost: .*({words})", run.stderr), run.stderr
        site.assert_gone(before)


def opens(gate: Path) -> bool:
    """Let the process go on that reads the fifo `gate`, if there is one."""
    with contextlib.suppress(OSError):
        os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        return True
    return False


SAVES = worker("""
    def save(*_):
        if RANK == "1":
            open("gate").read()
            open("saved", "w").close()
        sys.exit()
    signal.signal(signal.SIGTERM, save)
    ready()
    wait()
""")


@pytest.mark.fault(45, "sshd's session process is killed, and its rank is saving its work", promise="6")
def test_ranks_of_a_node_that_is_back_at_once_keep_their_grace_period(site: Site, figures: Figures) -> None:
    gate = site.directory / "gate"
    os.mkfifo(gate)
    job = there(site, HOSTS[:2], SAVES, restarts={"max": 1})
    with started_run(job, 2, cwd=site.directory) as (run, ranks):
        kill_session(site, ranks[1])
        wait_until(lambda: len(run.events("AgentUp")) == 3, lambda: run.stderr)
        wait_until(lambda: opens(gate), lambda: run.stderr)
        starts(run, 1, 2)
        figures("processes of the old attempt that the new one saw", earlier_seen(run, 1), 0, unit="")
        assert (site.directory / "saved").exists()
        interrupted(run)


@pytest.mark.once
@pytest.mark.everywhere
@pytest.mark.fault(46, "blackhole: a node's packets are dropped", promise="5")
def test_a_node_that_is_cut_off_is_lost(site: Site, pace: Pace, figures: Figures) -> None:
    with started_run(there(site, HOSTS, STUBBORN, pace), 3) as (run, started):
        site.cut("host2")
        began = time.monotonic()
        run.wait_for("host2 was lost")
        figures("told to be lost", time.monotonic() - began, at_most=lost_within_s(pace))
        took_s = wait_gone([started[0], started[2]], PATIENCE_S)
        figures("then the others gone", took_s, at_most=pace.stop_s + 2.0)
        wait_gone([started[1]], PATIENCE_S)
        limit_s = pace.lease_s + pace.stop_s + scenes.NOISE_S
        figures("its own ranks gone", time.monotonic() - began, at_most=limit_s)
        lost(run)


@pytest.mark.once
@pytest.mark.everywhere
@pytest.mark.fault(47, "one-way drop: one node receives nothing, another's packets get lost", promise="5")
def test_a_node_that_is_cut_off_one_way_is_lost(site: Site, pace: Pace, figures: Figures) -> None:
    with started_run(there(site, HOSTS, STUBBORN, pace), 3) as (run, started):
        # Loopback is not cut: it is the network that is one-way.
        deaf = site.bed.rule("host2", "INPUT", "!", "-i", "lo", "-j", "DROP")
        with deaf, site.bed.rule("host3", "OUTPUT", "!", "-o", "lo", "-j", "DROP"):
            began = time.monotonic()
            run.wait_for(" was lost")
            figures("the first told to be lost", time.monotonic() - began, at_most=lost_within_s(pace))
            wait_gone([*started.values()], PATIENCE_S)
            # A node that still hears us counts from our last word, said before we gave it up.
            limit_s = lost_within_s(pace) + pace.lease_s + pace.stop_s
            figures("all ranks gone", time.monotonic() - began, at_most=limit_s)
            lost(run)


COUNTS = worker("""
    import itertools
    ready()
    for counted in itertools.count():
        if os.path.exists("enough"): break
        print("still", counted, flush=True)
        time.sleep(0.02)
    print("in all", counted)
""")


@pytest.mark.once
@pytest.mark.everywhere
@pytest.mark.fault(48, "a blip: a third of the lease long, 10 s by default", promise="5")
def test_survives_a_blip(site: Site, pace: Pace, figures: Figures) -> None:
    # What ssh bears is whole seconds a third of the lease: of a short one little is left for slow machines.
    if pace.lease_s < 12.0:
        pace = Pace(pace.stop_s, 12.0, pace.keys | {"lease": "12s"})
    with running(there(site, HOSTS[:2], COUNTS, pace)) as run:

        def heard(rank: int) -> int:
            return run.stdout.count(f"host{rank + 1}:{rank}] still")

        starts(run, 0, 2)
        site.cut("host2")
        blip_s = pace.lease_s / 3
        time.sleep(blip_s)  # the fault itself
        run.wait_until(lambda: heard(0) > heard(1) + blip_s * 12, "a rank behind")
        before, began = heard(1), time.monotonic()
        site.bed.call("heal", "host2")
        run.wait_for("host2:1] still", times=before + int(blip_s * 25))
        figures("heard again after", time.monotonic() - began, at_most=pace.lease_s)
        (site.directory / "enough").touch()
        assert run.wait() == 0, run.stderr
        figures("alarms", alarms(run), at_most=0, unit="")
        *counts, last = (run.run_directory() / "rank1.out").read_text().splitlines()[1:]
        assert counts == [f"still {i}" for i in range(len(counts))]
        assert last == f"in all {len(counts)}"


@pytest.mark.long
@pytest.mark.once
@pytest.mark.everywhere
@pytest.mark.fault(51, "a partition during a restart", promise="6")
def test_a_restart_waits_until_a_cut_off_node_is_fenced(site: Site, pace: Pace, figures: Figures) -> None:
    job = there(site, HOSTS[:2], STUBBORN, pace, spares=HOSTS[2:], restarts={"max": 1})
    with started_run(job, 2) as (run, started):
        site.cut("host2")
        kill(started[0])
        began = time.monotonic()
        run.wait_for("restart 1 of 1")
        wait_gone([started[1]], PATIENCE_S)
        gone_at, took_s = time.time(), time.monotonic() - began
        figures("old ranks on the cut host gone", took_s, pace.lease_s + pace.stop_s + scenes.NOISE_S)
        limit_s = lost_within_s(pace) + pace.fence_s
        starts(run, 1, 2, within_s=limit_s + PATIENCE_S)
        figures("the new attempt runs", time.monotonic() - began, at_most=limit_s + scenes.NOISE_S)
        figures("processes of the old one that it saw", earlier_seen(run, 1), 0, unit="")
        interrupted(run)
        assert "continuing with 2 of 2 nodes: host1, host3" in run.stderr
        new_at = min(event["time"] for event in run.events("WorkerStarted")[2:])
        figures("new start after the last old end", new_at - gone_at)
        assert new_at > gone_at


@pytest.mark.long
@pytest.mark.once
@pytest.mark.fault(51, "a partition, after which the host's name leads to another host", promise="6")
def test_another_host_of_the_name_of_one_that_is_cut_off_waits_for_its_end(
    site: Site, pace: Pace, figures: Figures
) -> None:
    config = site.ssh_config.read_text()
    port = site.sshd("host3", inside=["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"])
    nodes = ["host1", site.name("moves", "host2")]
    with started_run(there(site, nodes, STUBBORN, pace, restarts={"max": 1}), 2) as (run, started):
        site.cut("host2")
        site.ssh_config.write_text(config)
        site.name("moves", "host3", port)
        run.wait_for("restart 1 of 1")
        wait_gone([started[1]], PATIENCE_S)
        gone_at = time.time()
        starts(run, 1, 2, within_s=pace.fence_s + PATIENCE_S)
        figures("processes of the old attempt that the new one saw", earlier_seen(run, 1), 0, unit="")
        interrupted(run)
        assert min(event["time"] for event in run.events("WorkerStarted")[2:]) > gone_at
