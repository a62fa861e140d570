"""Faults of the network: what breaks is noticed at once, what is only slow breaks nothing."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pytest

from tests.cluster.hosts import GONE_S, Node, Site, why_not
from tests.cluster.odd_hosts import NODE_LOST, installed
from tests.faults import mangler
from tests.faults.agents import python_that_says
from tests.faults.conftest import Figures, Pace
from tests.faults.memory import Meter
from tests.harness import PATIENCE_S, Run, running, wait_gone

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TOLD_S = 1.0
"""A broken link is told so soon."""
CONTROLLER_MIB = 64.0
SLEEPING = ["sh", "-c", "echo ready {rank} $$; exec sleep 1000"]


def inside(site: Site, host: str, *argv: str) -> str:
    """Run a program in a host's network, which must succeed; what it prints."""
    enter = [installed("nsenter"), f"--net=/proc/{site.bed.hosts[host].pid}/ns/net"]
    done = subprocess.run([*enter, *argv], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOST = (("10", "0"), ("9", "0"), ("8", "3"))
"""Of each ten packets the fifth and the last two: each rule counts only what those before it let through."""


@contextlib.contextmanager
def lossy(site: Site, host: str, chain: str) -> Iterator[None]:
    """30 % of what a host receives (chain INPUT) or sends (OUTPUT) is lost.

    By count, not by chance: among some hundred segments that stand alone, chance now and then loses one eight
    times in a row, and with it rightly the node.
    """
    iptables = [installed("iptables"), "-w", "5"]
    nth = ["-m", "statistic", "--mode", "nth"]
    rules = [[chain, *nth, "--every", every, "--packet", first, "-j", "DROP"] for every, first in LOST]
    for rule in rules:
        inside(site, host, *iptables, "-A", *rule)
    try:
        yield
        counted = inside(site, host, *iptables, "-nvxL", chain)
        dropped = re.findall(r"^ +[1-9]\d* .*statistic", counted, re.MULTILINE)
        assert len(dropped) == len(rules), f"too little was lost: {counted}"
    finally:
        for rule in rules:
            inside(site, host, *iptables, "-D", *rule)


@contextlib.contextmanager
def narrow(site: Site, host: str) -> Iterator[None]:
    """What a host sends leaves at 1 Mbit/s."""
    tc, eth0 = installed("tc"), ["dev", "eth0", "root"]
    inside(site, host, tc, "qdisc", "add", *eth0, "tbf", "rate", "1mbit", "burst", "16kb", "latency", "400ms")
    try:
        yield
        counted = inside(site, host, tc, "-s", "qdisc", "show", "dev", "eth0")
        assert re.search(r"overlimits [1-9]", counted), f"nothing had to wait: {counted}"
    finally:
        inside(site, host, tc, "qdisc", "del", *eth0)


def expect_loss(run: Run, began: float, ranks: Mapping[int, int], figures: Figures, what: str = "") -> None:
    """The run tells at once that it has lost a node, and ends on all hosts; `began` is when it was broken."""
    run.wait_for(" was lost")
    figures(f"{what}until told", time.monotonic() - began, at_most=TOLD_S)
    wait_gone(list(ranks.values()), PATIENCE_S)
    figures(f"{what}all ranks gone", time.monotonic() - began, at_most=GONE_S)
    assert run.wait() == NODE_LOST
    assert "Traceback" not in run.stderr
    assert run.holders() == []


@pytest.mark.fault(49, "RST: all TCP connections of a node are reset", promise="5")
def test_reset(site: Site, figures: Figures) -> None:
    ss = installed("ss")
    job, before = site.job(["host1", "host2", "host3"], command=SLEEPING), site.processes()
    with running(job) as run:
        ranks = run.wait_ready(3)
        began = time.monotonic()
        inside(site, "host2", ss, "-K", "-t", "sport", "=", ":22")
        expect_loss(run, began, ranks, figures)
        site.assert_gone(before)


WORKING = """
import os, sys, time
rank = os.environ["RANK"]
with open("go") as go:
    os.write(1, f"ready {rank} {os.getpid()}\\n".encode())
    go.read()
began = time.monotonic()
if rank == "2":
    for _ in range(PRINTED // 100):
        os.write(1, b"x" * 99 + b"\\n")
    print("printed in", time.monotonic() - began, file=sys.stderr, flush=True)
while time.monotonic() < began + SECONDS:
    print("still here", flush=True)
    time.sleep(0.5)
"""
WORK_S = 25.0
"""Longer than ssh's own patience, which is 19.4 s."""
PRINTED = 2_000_000
"""Bytes, for which 1 Mbit/s takes 16 s."""


@pytest.mark.long
@pytest.mark.once
@pytest.mark.fault(50, "30 % loss to one node and from another, 1 Mbit/s from a third", promise="5, 10")
def test_bad_lines(site: Site, pace: Pace, figures: Figures) -> None:
    work_s = max(WORK_S, pace.lease_s + 5.0)
    script = WORKING.replace("PRINTED", str(PRINTED)).replace("SECONDS", str(work_s))
    (site.folder / "worker.py").write_text(script)
    os.mkfifo(site.folder / "go")
    go = os.open(site.folder / "go", os.O_RDWR)
    job = site.job(["host1", "host2", "host3"], command=[sys.executable, "worker.py"])
    before = site.processes()
    with contextlib.ExitStack() as bad, running(job) as run:
        run.wait_ready(3)
        bad.enter_context(lossy(site, "host1", "OUTPUT"))
        bad.enter_context(lossy(site, "host2", "INPUT"))
        bad.enter_context(narrow(site, "host3"))
        began = time.monotonic()
        os.close(go)
        assert run.wait(work_s + PATIENCE_S) == 0, run.stderr
        took_s = time.monotonic() - began
    alarms = [event["text"] for event in run.events("Notice") if event["level"] != "info"]
    figures("false alarms", len(alarms), at_most=0, unit="")
    (printed,) = re.findall(r"printed in ([\d.]+)", run.stderr)
    figures("2 MB printed into 1 Mbit/s, in", float(printed), at_most=1.0)
    assert (run.run_folder() / "rank2.out").read_bytes().count(b"x") == PRINTED * 99 // 100
    figures("from the workers' end to the run's", took_s - work_s, at_most=pace.stop_s + 15.0)
    site.assert_gone(before)


CHATTY = """
import os, signal, time
os.write(1, f"ready {os.environ['RANK']} {os.getpid()}\\n".encode())
while True:
    os.write(1, b"still here\\n")
    time.sleep(0.05)
"""


def via_mangler(site: Site, how: str) -> Node:
    """host2 behind a mangler that begins as told by `begin`."""
    proxy = [sys.executable, mangler.__file__, how, site.bed.hosts["host2"].address, "22", "begin"]
    return site.name("mangled", "host2", ProxyCommand=shlex.join(proxy))


def from_an_agent(site: Site, words: str) -> Node:
    """host2 with an agent that says something wrong when told by `begin`."""
    python = python_that_says(site.folder / "python", words, site.folder / "begin")
    return {"host": site.name("mangled", "host2"), "python": python}


@pytest.mark.fault(52, "slices of 7 bytes", promise="10")
def test_slices(site: Site, figures: Figures) -> None:
    os.mkfifo(site.folder / "begin")
    lines = ["sh", "-c", "seq -f 'line %.0f of {rank}' 20000"]
    job, before = site.job(["host1", via_mangler(site, "sliced")], command=lines), site.processes()
    with running(job, "--quiet", cwd=site.folder) as run:
        assert run.wait() == 0, run.stderr
        expected = "".join(f"line {number} of 1\n" for number in range(1, 20001))
        assert (run.run_folder() / "rank1.out").read_text() == expected
        figures("the whole run", time.monotonic() - run.began, at_most=30.0)
        site.assert_gone(before)


class Broken(NamedTuple):
    """A way to break the stream: where it happens, how, and a pattern of what is told."""

    where: Callable[[Site, str], Node]
    how: str
    told: str


BROKEN = {
    "truncated": Broken(via_mangler, "truncated", r"Broken pipe|[Cc]onnection|ended"),
    "corrupt": Broken(via_mangler, "corrupt", "Corrupted MAC|message authentication code incorrect"),
    "a frame of 4 GiB": Broken(
        from_an_agent,
        "HEAD + bytes([255] * 4) + bytes(1 << 26)",
        "a frame of 4294967295 bytes is over the limit",
    ),
    "an unknown kind": Broken(from_an_agent, "bytes([9]) + HEAD[1:] + bytes(4)", "unknown frame kind 9"),
    "half a frame": Broken(
        from_an_agent, "HEAD + bytes([0, 0, 0, 40]) + b'{'", "a control frame is not JSON"
    ),
    "not JSON": Broken(from_an_agent, "HEAD + bytes([0, 0, 0, 4]) + b'oops'", "a control frame is not JSON"),
}


@pytest.mark.fault(52, "truncated, corrupt and 4-GiB-long frames", promise="10")
@pytest.mark.parametrize("name", BROKEN)
def test_broken_frames(name: str, site: Site, figures: Figures) -> None:
    os.mkfifo(site.folder / "begin")
    where, how, told = BROKEN[name]
    nodes = ["host1", where(site, how), "host3"]
    job, meter = site.job(nodes, command=[sys.executable, "-c", CHATTY]), Meter(site.folder)
    before = site.processes()
    with running(job, cwd=site.folder, executable=meter.program) as run:
        ranks = run.wait_ready(3)
        began = time.monotonic()
        os.close(os.open(site.folder / "begin", os.O_WRONLY))
        expect_loss(run, began, ranks, figures, f"{name}: ")
        assert re.search(f"mangled was lost: .*({told})", run.stderr), run.stderr
        site.assert_gone(before)
    figures(f"{name}: the controller's memory", meter.over_bare_mib, at_most=CONTROLLER_MIB, unit="MiB")
