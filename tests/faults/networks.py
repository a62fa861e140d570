"""What breaks a host's network, or only slows it, and a host that falls."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.cluster.hosts import Bed, Host
from tests.cluster.odd_hosts import installed
from tests.harness import PATIENCE_S


def inside(bed: Bed, host: str, program: str, *arguments: str) -> str:
    """Run a program in a host's network, which must succeed; what it prints."""
    argv = bed.argv("exec", host, "--", installed(program), *arguments)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def closed(bed: Bed, host: str) -> contextlib.AbstractContextManager[None]:
    """A host starts no agents; those that are there go on."""
    syn = ("-p", "tcp", "--dport", str(bed.port), "--syn")
    return bed.rule(host, "INPUT", *syn, "-j", "REJECT", "--reject-with", "tcp-reset")


LOST = (("10", "0"), ("9", "0"), ("8", "3"))
"""Of each ten packets the fifth and the last two: each rule counts only what those before it let through."""


@contextlib.contextmanager
def lossy(bed: Bed, host: str, chain: str) -> Iterator[None]:
    """30 % of what a host receives (chain INPUT) or sends (OUTPUT) is lost.

    By count, not by chance: among some hundred segments that stand alone, chance now and then loses one eight
    times in a row, and with it rightly the node.
    """
    nth = ("-m", "statistic", "--mode", "nth")
    with contextlib.ExitStack() as rules:
        for every, first in LOST:
            words = (*nth, "--every", every, "--packet", first, "-j", "DROP")
            rules.enter_context(bed.rule(host, chain, *words))
        yield
        counted = inside(bed, host, "iptables", "-w", "5", "-nvxL", chain)
        dropped = re.findall(r"^ +[1-9]\d* .*statistic", counted, re.MULTILINE)
        assert len(dropped) == len(LOST), f"too little was lost: {counted}"


@contextlib.contextmanager
def narrow(bed: Bed, host: str) -> Iterator[None]:
    """What a host sends leaves at 1 Mbit/s."""
    eth0 = ("dev", "eth0", "root")
    rate = ("tbf", "rate", "1mbit", "burst", "32kbit", "latency", "400ms")
    inside(bed, host, "tc", "qdisc", "add", *eth0, *rate)
    try:
        yield
        counted = inside(bed, host, "tc", "-s", "qdisc", "show", "dev", "eth0")
        assert re.search(r"overlimits [1-9]", counted), f"nothing had to wait: {counted}"
    finally:
        inside(bed, host, "tc", "qdisc", "del", *eth0)


def fell(bed: Bed, host: str, before: set[int]) -> None:
    """All that has been started on a host since `before` ends at once, as when it crashes."""
    network = os.stat(f"/proc/{bed.hosts[host].pid}/ns/net").st_ino
    fallen = []
    for pid in bed.processes() - before:
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}/ns/net").st_ino == network:
                fallen.append(pid)
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none sees another's end
        for pid in fallen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


REACHABLE = {"tcp": "0A", "tcp6": "0A", "udp": "", "udp6": "", "raw": "", "raw6": ""}
"""Kinds of sockets, and the state in which others can reach one; any if none."""


def listening(host: Host, kinds: Sequence[str] = (*REACHABLE, "unix")) -> set[tuple[str, str]]:
    """All sockets on a host that others can reach: listening ones of TCP and Unix, any of UDP and raw."""
    found = set()
    for kind in kinds:
        rows = [line.split() for line in Path(f"/proc/{host.pid}/net/{kind}").read_text().splitlines()[1:]]
        if kind == "unix":
            found |= {(kind, " ".join(row[6:])) for row in rows if int(row[3], 16) & 0x10000}
        else:
            found |= {(kind, row[1]) for row in rows if REACHABLE[kind] in ("", row[3])}
    return found
